"""The constants that every backend computes with, made from a table once. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from fewbit.config import BLOCK
from fewbit.errors import TableError
from fewbit.table import Knots, Table, round_breaks


def packed_words(n: int, bits: int) -> int:
    """int32 words that n elements take at that many bits: bit-planes over blocks of 32."""
    return bits * ((n + BLOCK - 1) // BLOCK)


def gray(index):
    """The packed code of a level: neighboring levels differ in one bit, so a break flips one plane."""
    return index ^ (index >> 1)


@dataclass(frozen=True, eq=False)
class Encoding:
    """What a table is at run time.

    levels: (K,) float64. breaks: (M-1,) float64; codes: (M,) int64; closed: M-1 of "right" / "left".
    knots: for an unbiased table. Everything else follows:

    The packed code of x is ``initial ^ XOR of flips[j] over the breaks with not (x <= breaks[j])``, so NaN
    is beyond every break; q(x) is ``lut[code]``.
    """

    bits: int
    levels: np.ndarray
    breaks: np.ndarray
    codes: np.ndarray
    closed: tuple[str, ...]
    knots: Knots | None = None

    @classmethod
    def of(cls, table: Table) -> Encoding:
        """The constants of a table; tables that are equal at run time share one object."""
        return Encoding.parse(_text(table))

    @classmethod
    def parse(cls, text: str) -> Encoding:
        """The encoding that `text` describes. Raises TableError if it is not an encoding's text."""
        return _parse(text)

    @cached_property
    def text(self) -> str:
        """One line of JSON that says it all: ops carry it, so an exported program needs nothing else."""
        return _text(self)

    def __reduce__(self):
        return Encoding.parse, (self.text,)

    # -- what backends read -------------------------------------------------------------------------------

    @property
    def unbiased(self) -> bool:
        """Whether the code is drawn, so that a seed is needed."""
        return self.knots is not None

    @cached_property
    def initial(self) -> int:
        """The code below all breaks."""
        return int(gray(self.codes[0]))

    @cached_property
    def breaks64(self) -> np.ndarray:
        """(m,) float64, finite, strict: x is beyond a break if x > break."""
        return _strict(self.breaks, self.closed)

    @cached_property
    def flips64(self) -> np.ndarray:
        """(m,) uint8: what a break changes in the code."""
        codes = gray(self.codes)
        return (codes[1:] ^ codes[:-1]).astype(np.uint8)

    @cached_property
    def breaks32(self) -> np.ndarray:
        """The breaks for 16- and 32-bit inputs: (m,) float32, finite, strict."""
        return _strict(round_breaks(self.breaks, self.closed), self.closed)

    @property
    def flips32(self) -> np.ndarray:
        """(m,) uint8, for breaks32."""
        return self.flips64

    @cached_property
    def lut64(self) -> np.ndarray:
        """(2**bits,) float64: the level of each code, 0 for codes that do not occur."""
        lut = np.zeros(1 << self.bits)
        lut[gray(np.arange(len(self.levels)))] = self.levels
        return lut

    @cached_property
    def lut32(self) -> np.ndarray:
        """(2**bits,) float32, the levels rounded to nearest."""
        return self.lut64.astype(np.float32)

    # -- the constants of a draw (docs/table_schema.md), None unless unbiased -----------------------------

    @cached_property
    def levels32(self) -> np.ndarray | None:
        """(K,) float32, ascending."""
        return self.levels.astype(np.float32) if self.unbiased else None

    @cached_property
    def points(self) -> np.ndarray | None:
        """(n,) float32, strict: x is beyond a point if x > point."""
        if not self.unbiased:
            return None
        return _strict(round_breaks(self.knots.points, self.knots.closed), self.knots.closed)

    @cached_property
    def origins(self) -> np.ndarray | None:
        """(n,) float32: the points as the formula subtracts them."""
        return round_breaks(self.knots.points, self.knots.closed) if self.unbiased else None

    @cached_property
    def values(self) -> np.ndarray | None:
        """(n,) float32: the stand-in at the points."""
        return self.knots.values.astype(np.float32) if self.unbiased else None

    @cached_property
    def slopes(self) -> np.ndarray | None:
        """(n-1,) float32, between the points."""
        return self.knots.slopes.astype(np.float32) if self.unbiased else None

    @cached_property
    def inverse_gaps(self) -> np.ndarray | None:
        """(K-1,) float32: 1 / the distance to the next level."""
        return (1.0 / np.diff(self.levels)).astype(np.float32) if self.unbiased else None


def _strict(limits: np.ndarray, closed) -> np.ndarray:
    """The same limits such that "x > limit" is the one comparison: a closed "left" one moves down a step.

    Limits stay finite: one below the lowest number moves up to it (no activation lives down there).
    """
    left = np.array([side == "left" for side in closed], bool)
    with np.errstate(over="ignore"):
        below = np.nextafter(limits, limits.dtype.type(-np.inf))
    return np.maximum(np.where(left, below, limits), np.finfo(limits.dtype).min)


def _text(source) -> str:
    document = {
        # As many planes as the levels need: an exact table of two levels takes one, whatever was asked.
        "bits": max(1, (len(source.levels) - 1).bit_length()),
        "levels": source.levels.tolist(),
        "breaks": source.breaks.tolist(),
        "codes": source.codes.tolist(),
    }
    if "left" in source.closed:
        document["closed"] = list(source.closed)
    if source.knots is not None:
        document["knots"] = source.knots.document()
    return json.dumps(document, separators=(",", ":"))


@lru_cache(maxsize=1024)
def _parse(text: str) -> Encoding:
    try:
        document = json.loads(text)
        breaks = np.array(document["breaks"], np.float64)
        knots = document.get("knots")
        encoding = Encoding(
            bits=int(document["bits"]),
            levels=np.array(document["levels"], np.float64),
            breaks=breaks,
            codes=np.array(document["codes"], np.int64),
            closed=tuple(document.get("closed", ("right",) * len(breaks))),
            knots=None if knots is None else Knots(**knots),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise TableError(
            f"expected the text of a table's encoding, got {text[:60]!r}: {error}"
        ) from None
    for array in (encoding.levels, encoding.breaks, encoding.codes):
        array.setflags(write=False)
    return encoding
