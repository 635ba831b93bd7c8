"""The factor `distortion` of the variance of rounding: variance = distortion * squares (docs/concepts/theory/rounding.md).

In a uniform copy, an element's variance is on average step^2 / 6, and never above step^2 / 4. In a rotated or masked
copy it is D / (1 - D) (EDEN, Vargaftik et al., ICML 2022) with the least squared error D of levels for a normal
distribution, and a little for the rounding of the scale.
"""

from __future__ import annotations

import math
from functools import cache

from fewbit.catalog.normal_levels import normal_error
from fewbit.config import MAX_BITS, MIN_BITS, UNIFORM

BITS = range(MIN_BITS, MAX_BITS + 1)
"""The possible numbers of bits per element."""
_SCALE_VARIANCE = 2.0**-14 * (3 / (8 * math.log(2))) / 6
"""The variance of the random rounding of a scale to bfloat16, divided by the squared scale.

A scale m 2^e, with m from 1 to 2, has steps of 2^(e - 7), a sixth of whose square is the variance. The mean of 1 / m^2
is 3 / (8 ln 2) if the logarithm of m is spread evenly.
"""


def distortion(kind: str, bits: float) -> float:
    """Return the factor by which `squares` has to be multiplied to get the variance of rounding.

    If `bits`, 1 to 8, is not a whole number, some samples have the next lower and others the next higher one.
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
