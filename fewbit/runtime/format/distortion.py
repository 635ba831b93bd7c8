"""The factor `distortion` of the variance of rounding, distortion * squares (docs/concepts/theory/rounding.md)."""

from __future__ import annotations

import math
from functools import cache

from fewbit.catalog.normal_levels import normal_error
from fewbit.config import MAX_BITS, MIN_BITS, UNIFORM

BITS = range(MIN_BITS, MAX_BITS + 1)
_SCALE_VARIANCE = 2.0**-14 * (3 / (8 * math.log(2))) / 6
"""The variance of the random rounding of a scale to bfloat16, divided by the squared scale, on average."""


def distortion(kind: str, bits: float) -> float:
    """Return the variance of rounding, divided by `squares`, for 1 to 8 bits.

    If `bits` is not a whole number, some samples have the next lower and others the next higher one.
    """
    return _between(_distortions(kind), bits)


def relative_distortion(kind: str, bits: float) -> float:
    """Return the variance of rounding to `bits`, relative to 1 bit."""
    return distortion(kind, bits) / distortion(kind, MIN_BITS)


def largest_distortion(kind: str, bits: int) -> float:
    """Return an upper bound on the distortion for any data."""
    return _step2(bits) / 4.0 if kind == UNIFORM else distortion(kind, bits)


@cache
def _distortions(kind: str) -> tuple[float, ...]:
    if kind == UNIFORM:
        return tuple(_step2(bits) / 6.0 for bits in BITS)
    errors = map(normal_error, BITS)
    return tuple(error / (1.0 - error) + _SCALE_VARIANCE for error in errors)


def _step2(bits: int) -> float:
    """Return the squared step of a uniform copy, divided by the squared range of its group."""
    return 1.0 / (2.0**bits - 1.0) ** 2


def _between(values: tuple[float, ...], bits: float) -> float:
    below = min(int(bits), MAX_BITS - 1)
    share = bits - below
    lower, upper = values[below - MIN_BITS], values[below + 1 - MIN_BITS]
    return lower + share * (upper - lower) if share else lower
