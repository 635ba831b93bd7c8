"""The largest error of a saved tensor within AC-GC's bound e2 V^2, and the fewest bits within it (docs/concepts/theory/ac_gc.md).

If sample n has b_n bits, the mean squared error of rounding is at most

    sum_n squares_n largest_distortion(kind, b_n) / (number of elements of the tensor)
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

from fewbit.config import MIN_BITS
from fewbit.errors import InputError
from fewbit.runtime.format.distortion import BITS, largest_distortion
from fewbit.runtime.probes.variance_probe import SPREAD

TOLERANCE = 1e-9
"""The relative excess over a limit that is ignored as a rounding error of float64."""


def tolerance(e2: float, v2: float) -> float:
    """Return e2 V^2, which AC-GC's formula (6) allows as a squared gradient error; 0 if a factor is 0."""
    e2, v2 = square("e2", e2), square("v2", v2)
    return e2 * v2 if e2 and v2 else 0.0


def square(name: str, value: float) -> float:
    """Return the value as a float. Raise InputError if it is negative or NaN."""
    value = float(value)
    if not value >= 0:
        raise InputError(f"expected {name} of 0 or more, got {value}")
    return value


def quotient(allowed: float, cost: float) -> float:
    """Return allowed / cost; infinity if `cost` is 0."""
    if cost == math.inf:
        return 0.0
    return allowed / cost if cost > 0 else math.inf


def polynomial_error(allowed: float, first: float, second: float) -> float:
    """Solve (first dx + second dx^2)^2 = allowed for dx, and return dx^2; infinity if both coefficients are 0."""
    target = math.sqrt(allowed)
    if target in (0.0, math.inf):
        return quotient(target, first + second)
    dx = quotient(2.0 * target, first + math.sqrt(first * first + 4.0 * target * second))
    return dx * dx


def least_average(squares, samples: int, limit: float, kind: str) -> float | None:
    """Return the lowest average number of bits with which the mean squared error is at most `limit`, or None.

    `squares` has the mean squares_n of each part of `sizes(samples)`, divided by the number of elements of a sample, in
    rising order. Without `samples`, the tensor counts as one sample.
    """
    parts, noise = sizes(samples), _noise(kind)
    allowed = limit * sum(parts)
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
