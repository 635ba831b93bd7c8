"""The fewest bits with which the rounding error of a saved tensor stays within a bound.

If sample n has b_n bits, the mean squared error is at most

    sum_n squares_n largest_distortion(kind, b_n) / (number of elements of the tensor)
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

from fewbit.config import MIN_BITS
from fewbit.runtime.format.distortion import BITS, largest_distortion
from fewbit.runtime.probes.variance_probe import SPREAD

TOLERANCE = 1e-9
"""The relative excess over a limit that is ignored as a rounding error of float64."""


def least_average(squares, samples: int, elements: int, limit: float, kind: str) -> float | None:
    """Return the lowest average number of bits with which the mean squared error is at most `limit`, or None.

    `squares` has one number for each part of `sizes(samples)`, in rising order. Without `samples`, all elements have
    the same whole number of bits.
    """
    parts, noise = sizes(samples), _noise(kind)
    allowed = limit * elements
    error = noise[0] * sum(size * square for size, square in zip(parts, squares, strict=False))
    total = MIN_BITS * sum(parts)
    steps = [
        (squares[part] * (before - after), -part, size)
        for part, size in enumerate(parts)
        for before, after in pairwise(noise)
    ]
    # Each further bit of a part gains less than the bit before, so sorting keeps the steps of a part in order.
    steps.sort(reverse=True)
    for gain, _, size in steps:
        if error <= allowed * (1 + TOLERANCE):
            break
        error -= gain * size
        total += size
    return total / sum(parts) if error <= allowed * (1 + TOLERANCE) else None


@cache
def _noise(kind: str) -> tuple[float, ...]:
    """Return the squared error divided by squares_n for 1 to 8 bits."""
    return tuple(largest_distortion(kind, bits) for bits in BITS)


def sizes(samples: int) -> list[int]:
    """Return the number of samples in each of at most SPREAD parts; [1] if `samples` is 0."""
    count = min(samples, SPREAD)
    ends = [round(i * samples / count) for i in range(count + 1)] if count else [0, 1]
    return [b - a for a, b in pairwise(ends)]
