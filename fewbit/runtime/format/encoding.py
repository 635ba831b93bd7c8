"""Encodings: the constants of a table with which every backend computes. Nothing here needs torch.

The *code* that is saved for an input x is the Gray code of the number of the level q(x).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from fewbit.config import BLOCK
from fewbit.errors import TableError
from fewbit.runtime.interop.compiler_tracing import constant
from fewbit.table import Knots, Table, round_breaks


def packed_words(n: int, bits: int) -> int:
    """Return the number of int32 words of n codes, in blocks of 32."""
    return bits * ((n + BLOCK - 1) // BLOCK)


def gray(index):
    """Return the Gray code of an int or an array."""
    return index ^ (index >> 1)


class Draw(NamedTuple):
    """The float32 constants of a draw of codes from an unbiased table (docs/reference/table_schema.md, "A draw").

    Args:
        points: (n,), the knots' points, adjusted so that x lies right of knot j if x > points[j].
        origins: (n,), the knots' points. From knot j on, the mean is values[j] + (x - origins[j]) * slopes[j].
        values: (n,), the values at the knots.
        slopes: (n-1,), the slopes between the knots.
        levels: (K,), the levels, ascending.
        inverse_gaps: (K-1,), the reciprocal distance from each level to the next.
    """

    points: np.ndarray
    origins: np.ndarray
    values: np.ndarray
    slopes: np.ndarray
    levels: np.ndarray
    inverse_gaps: np.ndarray


@dataclass(frozen=True, eq=False)
class Encoding:
    """A table in the form with which backends compute.

    The code of x starts as `initial`. For every break j with `not (x <= breaks[j])`, it is XORed with `flips[j]`; NaN
    is beyond every break. The value q(x) is ``lut[code]``.

    Args:
        levels: (K,) float64, the K values of q.
        breaks: (M-1,) float64, ascending, the breaks between the M pieces.
        codes: (M,) int64, the number of the level of each piece, from 0 to K-1.
        closed: for each break, "right" if the piece on its left contains it, else "left".
        knots: those of an unbiased table; else None.
    """

    bits: int
    levels: np.ndarray
    breaks: np.ndarray
    codes: np.ndarray
    closed: tuple[str, ...]
    knots: Knots | None = None

    @classmethod
    def of(cls, table: Table) -> Encoding:
        """Return the encoding of a table, the same object for equal ones."""
        return Encoding.parse(_text(table))

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> Encoding:
        """Return the encoding with this `text`. Raises TableError if there is none."""
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

    @cached_property
    def text(self) -> str:
        """The encoding as one line of JSON, an argument of ops."""
        return _text(self)

    def __reduce__(self):
        return Encoding.parse, (self.text,)

    # -- what backends read -------------------------------------------------------------------------------

    @cached_property
    def unbiased(self) -> bool:
        """True if codes are drawn at random, which needs a seed."""
        return self.knots is not None

    @cached_property
    def is_step_at_zero(self) -> bool:
        """True if, for inputs of 16 and 32 bits, code and value are 0 for x <= 0 and 1 for x > 0."""
        if self.unbiased or self.breaks32.tolist() != [0.0]:
            return False
        return self.levels.tolist() == [0.0, 1.0] and self.codes.tolist() == [0, 1]

    @cached_property
    def initial(self) -> int:
        return int(gray(self.codes[0]))

    @cached_property
    def breaks64(self) -> np.ndarray:
        """The breaks for float64 inputs, finite, adjusted so that x is beyond a break if x > break."""
        return _strict(self.breaks, self.closed)

    @cached_property
    def flips(self) -> np.ndarray:
        """The bits of the code that change at each break, (M-1,) uint8."""
        codes = gray(self.codes)
        return (codes[1:] ^ codes[:-1]).astype(np.uint8)

    @cached_property
    def breaks32(self) -> np.ndarray:
        return _strict(round_breaks(self.breaks, self.closed), self.closed)

    @cached_property
    def lut64(self) -> np.ndarray:
        """The level of each code, (2**bits,) float64; 0 for codes that do not occur."""
        lut = np.zeros(1 << self.bits)
        lut[gray(np.arange(len(self.levels)))] = self.levels
        return lut

    @cached_property
    def lut32(self) -> np.ndarray:
        """The levels, rounded to nearest float32, as in `lut64`."""
        return self.lut64.astype(np.float32)

    @cached_property
    def draw(self) -> Draw | None:
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
    """Return breaks adjusted so that x is beyond a break if x > break."""
    left = np.array([side == "left" for side in closed], bool)
    with np.errstate(over="ignore"):
        below = np.nextafter(limits, limits.dtype.type(-np.inf))
    return np.maximum(np.where(left, below, limits), np.finfo(limits.dtype).min)


def _text(source) -> str:
    document = {
        # A table without error may have fewer levels than the user asked for. Its codes then have fewer bits.
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


@constant
def mask_text(factor: float) -> str:
    """Return the text of an encoding that packs a 0/1 mask and decodes it as 0 and `factor`."""
    return _mask_text(factor)


@lru_cache(maxsize=256)
def _mask_text(factor: float) -> str:
    document = {"bits": 1, "levels": [0.0, factor], "breaks": [0.5], "codes": [0, 1]}
    return json.dumps(document, separators=(",", ":"))
