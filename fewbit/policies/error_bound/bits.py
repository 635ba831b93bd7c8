"""The fewest bits with which the rounding error of a saved tensor stays within a bound.

The elements of a sample are quantized in groups, each with its own range. Stochastic rounding in steps of s adds a
variance of at most s^2 / 4 to an element. Let sample n be rounded to b_n bits, and let squares_n be the sum of (number
of elements) * range^2 over the sample's groups. Then the mean squared error of the tensor's elements is at most

    sum_n squares_n / 4 / (2^b_n - 1)^2 / (number of elements of the tensor)
"""

from __future__ import annotations

from itertools import pairwise

from fewbit.config import MAX_BITS, MIN_BITS
from fewbit.runtime.probes.variance_probe import SPREAD

NOISE = [0.25 / (2.0**bits - 1) ** 2 for bits in range(MIN_BITS, MAX_BITS + 1)]
"""The largest squared error divided by squares_n, for each number of bits from MIN_BITS to MAX_BITS."""
TOLERANCE = 1e-9
"""The relative excess over a limit that is ignored, because float64 sums have rounding errors."""


def least_average(squares, samples: int, elements: int, limit: float) -> float | None:
    """Return the lowest average number of bits with which the mean squared error is at most `limit`.

    Args:
        squares: the numbers squares_n, in rising order. If there are more than SPREAD samples, the samples are divided
            into SPREAD (16) parts of nearly equal size, and `squares` contains the mean of each part. If `samples` is
            0, the first number is the sum for the whole tensor, and the others are not used.
        samples: the number of samples, among which the bits are divided. If it is 0, all elements have the same whole
            number of bits.
        elements: the number of elements of the tensor.
        limit: the largest mean squared error of the elements that is allowed.

    Returns:
        The average, or None if MAX_BITS bits are not enough.
    """
    parts = sizes(samples)
    allowed = limit * elements
    error = NOISE[0] * sum(size * square for size, square in zip(parts, squares, strict=False))
    total = MIN_BITS * sum(parts)
    steps = [
        (squares[part] * (before - after), -part, size)
        for part, size in enumerate(parts)
        for before, after in pairwise(NOISE)
    ]
    # Each further bit of a part gains less than the bit before, so sorting keeps the steps of a part in order.
    steps.sort(reverse=True)
    for gain, _, size in steps:
        if error <= allowed * (1 + TOLERANCE):
            break
        error -= gain * size
        total += size
    return total / sum(parts) if error <= allowed * (1 + TOLERANCE) else None


def sizes(samples: int) -> list[int]:
    """Return the number of samples in each part, if `samples` samples are divided into at most SPREAD (16) parts.

    If `samples` is 0, the whole tensor is one part, and the result is [1].
    """
    count = min(samples, SPREAD)
    ends = [round(i * samples / count) for i in range(count + 1)] if count else [0, 1]
    return [b - a for a, b in pairwise(ends)]
