"""The fewest bits with which the error of a variable is within a bound.

Stochastic rounding in steps of s has variances of at most s^2 / 4. Of samples with squares_n = sum over groups of
length * range^2 and b_n bits the mean squared error of an element is therefore at most

    sum_n squares_n / 4 / (2^b_n - 1)^2 / elements
"""

from __future__ import annotations

from itertools import pairwise

from fewbit.config import MAX_BITS, MIN_BITS
from fewbit.runtime.saved.probe import SPREAD

NOISE = [0.25 / (2.0**bits - 1) ** 2 for bits in range(MIN_BITS, MAX_BITS + 1)]
"""Of squares: by bits, from MIN_BITS to MAX_BITS."""
TOLERANCE = 1e-9
"""Of sums in float64."""


def least_average(squares, samples: int, elements: int, limit: float) -> float | None:
    """The least average of bits, shared between samples, with which the mean squared error is at most `limit`.

    squares: SPREAD values in rising order, each the mean of as many samples; the values themselves of fewer samples;
    the first that of the whole tensor where samples is 0, that is, where they do not share bits: then the average is
    whole. None where MAX_BITS bits are not enough.
    """
    parts = sizes(samples)
    allowed = limit * elements
    error = NOISE[0] * sum(size * each for size, each in zip(parts, squares, strict=False))
    total = MIN_BITS * sum(parts)
    steps = [
        (squares[part] * (before - after), -part, size)
        for part, size in enumerate(parts)
        for before, after in pairwise(NOISE)
    ]
    steps.sort(
        reverse=True
    )  # each gains less than those before it of its part, as all of its noise fell
    for gain, _, size in steps:
        if error <= allowed * (1 + TOLERANCE):
            break
        error -= gain * size
        total += size
    return total / sum(parts) if error <= allowed * (1 + TOLERANCE) else None


def sizes(samples: int) -> list[int]:
    """How many samples each part of a spread stands for (`runtime/saved/probe.py`); of none one."""
    count = min(samples, SPREAD)
    ends = [round(i * samples / count) for i in range(count + 1)] if count else [0, 1]
    return [b - a for a, b in pairwise(ends)]
