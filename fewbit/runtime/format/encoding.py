"""The constants of a table with which every backend computes, made once for each table. Nothing here needs torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from fewbit.config import BLOCK
from fewbit.errors import TableError
from fewbit.table import Knots, Table, round_breaks


def packed_words(n: int, bits: int) -> int:
    """Return the int32 words of n elements of that many bits each, packed as bit-planes over blocks of 32."""
    return bits * ((n + BLOCK - 1) // BLOCK)


def gray(index):
    """Return the Gray code of a level. Codes of neighboring levels differ in one bit, so a break flips one plane."""
    return index ^ (index >> 1)


class Draw(NamedTuple):
    """The constants of a draw (docs/table_schema.md), all float32.

    Args:
        points: (n,), strict: x is beyond a point if x > point.
        origins: (n,), the points that the formula subtracts.
        values: (n,), the stand-in for f' at the points.
        slopes: (n-1,), its slopes between the points.
        levels: (K,), ascending.
        inverse_gaps: (K-1,), the reciprocal distance of each level to the next.
    """

    points: np.ndarray
    origins: np.ndarray
    values: np.ndarray
    slopes: np.ndarray
    levels: np.ndarray
    inverse_gaps: np.ndarray


@dataclass(frozen=True, eq=False)
class Encoding:
    """A table at run time.

    The packed code of x is ``initial ^ XOR of flips[j] over the breaks with not (x <= breaks[j])``, so NaN is beyond every
    break. The value q(x) is ``lut[code]``.

    Args:
        bits: of a code.
        levels: (K,) float64.
        breaks: (M-1,) float64.
        codes: (M,) int64, the level of each piece.
        closed: for each break "right" or "left", the piece that the break belongs to.
        knots: of an unbiased table, else None.
    """

    bits: int
    levels: np.ndarray
    breaks: np.ndarray
    codes: np.ndarray
    closed: tuple[str, ...]
    knots: Knots | None = None

    @classmethod
    def of(cls, table: Table) -> Encoding:
        """Return the constants of a table. Tables that are equal at run time share one object."""
        return Encoding.parse(_text(table))

    @classmethod
    def parse(cls, text: str) -> Encoding:
        """Return the encoding with that text. Raises TableError if it is not an encoding's text."""
        return _parse(text)

    @cached_property
    def text(self) -> str:
        """The encoding as one line of JSON, an argument of ops, so that an exported program needs nothing else."""
        return _text(self)

    def __reduce__(self):
        return Encoding.parse, (self.text,)

    # -- what backends read -------------------------------------------------------------------------------

    @property
    def unbiased(self) -> bool:
        """True if codes are drawn at random, so that a seed is needed."""
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
    def flips(self) -> np.ndarray:
        """(m,) uint8: the planes of the code that each break flips."""
        codes = gray(self.codes)
        return (codes[1:] ^ codes[:-1]).astype(np.uint8)

    @cached_property
    def breaks32(self) -> np.ndarray:
        """The breaks for 16- and 32-bit inputs: (m,) float32, finite, strict."""
        return _strict(round_breaks(self.breaks, self.closed), self.closed)

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

    @cached_property
    def draw(self) -> Draw | None:
        """The constants of a draw; None unless unbiased."""
        if self.knots is None:
            return None
        points = round_breaks(self.knots.points, self.knots.closed)
        return Draw(
            points=_strict(points, self.knots.closed),
            origins=points,
            values=self.knots.values.astype(np.float32),
            slopes=self.knots.slopes.astype(np.float32),
            levels=self.levels.astype(np.float32),
            inverse_gaps=(1.0 / np.diff(self.levels)).astype(np.float32),
        )


def _strict(limits: np.ndarray, closed) -> np.ndarray:
    """Return limits for which "x > limit" decides; those closed "left" move down to the next number.

    A limit that would become -inf moves up to the lowest finite number, which no activation reaches.
    """
    left = np.array([side == "left" for side in closed], bool)
    with np.errstate(over="ignore"):
        below = np.nextafter(limits, limits.dtype.type(-np.inf))
    return np.maximum(np.where(left, below, limits), np.finfo(limits.dtype).min)


def _text(source) -> str:
    document = {
        # An exact table may have fewer levels than was asked for, and then takes fewer planes.
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
