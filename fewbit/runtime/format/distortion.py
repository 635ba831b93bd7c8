"""The variance that rounding to a number of bits adds to a tensor, for each kind of quantized copies.

The function `squares` (`runtime/ops/quantizer_ops.py`) returns one number for each sample of a tensor. This number
depends on the data and not on the bits. The *distortion* depends on the kind of the copy and on the bits, and not on
the data. The product of both is the variance of rounding, summed over the elements of the sample:

    variance = distortion(kind, bits) * squares

In a *uniform* copy, `squares` is the sum over groups of (number of elements) * range^2. The range of a group is divided
into equal steps of range / (2^bits - 1). An element that lies the fraction f of a step above the lower end of its step
is rounded up with probability f, so it gets the variance f (1 - f) step^2. If f is spread evenly, this variance is
step^2 / 6 on average. It is never above step^2 / 4.

In a *rotated* copy, `squares` is the sum over groups of |x - mean|^2, where x - mean is the group minus its mean. A
rotation makes the elements look normal. Each element is replaced by the nearest level of the table that has the least
squared error D for a normal distribution. A scale then makes the restored group right in expectation. This leaves the
variance D / (1 - D) (EDEN, Vargaftik et al., ICML 2022). The random rounding of the scale to bfloat16 adds a little
variance, which matters from 7 bits on. The actual variance differs a little from the sum of both. Rotated numbers have
shorter tails than normal numbers, so the variance of a group of n elements is lower by up to the share 4.5 / n. The
levels are rounded to multiples of a power of two, which adds at most 0.11 % (docs/concepts/theory/rounding.md). In a *masked*
copy, the distortion is that of rotated copies.

Ranges and means are those that are stored, in bfloat16, so `squares` has what their rounding adds for data far from zero.
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

A scale m 2^e, with m from 1 to 2, is rounded in steps of 2^(e - 7). The mean variance is a sixth of the squared step if
the positions of scales within a step are spread evenly. The mean of 1 / m^2 is 3 / (8 ln 2) if the logarithm of m is
spread evenly.
"""


def distortion(kind: str, bits: float) -> float:
    """Return the factor by which `squares` has to be multiplied to get the variance of rounding.

    Args:
        kind: the kind of the copy, one of `fewbit.config.KINDS`.
        bits: the bits per element, 1 to 8. If this is not a whole number, some samples have the next lower and others
            the next higher whole number of bits. The result is then the average of their distortions.
    """
    return _between(_distortions(kind), bits)


def relative_distortion(kind: str, bits: float) -> float:
    """Return the variance of rounding to `bits`, divided by the variance of rounding to 1 bit.

    Args:
        kind: the kind of the copy, one of `fewbit.config.KINDS`.
        bits: the bits per element, 1 to 8, as in `distortion`.
    """
    return distortion(kind, bits) / distortion(kind, MIN_BITS)


def largest_distortion(kind: str, bits: int) -> float:
    """Return an upper bound on the distortion for any data.

    Uniform copies reach the bound if every element lies in the middle between the values of two neighboring codes.
    Rotated copies have the same distortion for all data, so their bound is `distortion`.

    Args:
        kind: the kind of the copy, one of `fewbit.config.KINDS`.
        bits: the bits per element, a whole number from 1 to 8.
    """
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
    """Interpolate linearly between the values for whole numbers of bits."""
    below = min(int(bits), MAX_BITS - 1)
    share = bits - below
    lower, upper = values[below - MIN_BITS], values[below + 1 - MIN_BITS]
    return lower + share * (upper - lower) if share else lower
