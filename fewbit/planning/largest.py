"""The search for the largest size with which a training step fits."""

from __future__ import annotations

from collections.abc import Callable

MOST_GROWTH = 64
"""The largest factor by which a size grows at once."""


def largest(
    peak: Callable[[int], int | None],
    start: int,
    first: int,
    capacity: int,
    most: int | None = None,
) -> int:
    """Return the largest size whose peak is at most the capacity; 0 if size 1 does not fit.

    The search tries the size at which a line through two peaks reaches the capacity, and after four peaks halves the interval in every
    second step.

    Args:
        peak: returns the bytes for a size, which should grow with it, or None if the step does not run.
        start: a size of at least 1 whose peak is known.
        first: the peak of this size in bytes.
        capacity: the bytes of the device.
        most: the largest size that is allowed, at least `start`, or None.
    """
    low, high = (start, None) if first <= capacity else (0, start)  # `low` fits, `high` does not
    known, rounds = {start: first}, 0
    while low != most and (high is None or high - low > 1):
        rounds += 1
        size = _next(known, low, high, capacity, rounds)
        if most is not None:
            size = min(size, most)
        found = peak(size)
        if found is not None:
            known[size] = found
        if found is not None and found <= capacity:
            low = size
        else:
            high = size
    return low


def _next(known: dict[int, int], low: int, high: int | None, capacity: int, rounds: int) -> int:
    guess = _crossing(known, low, high, capacity)
    if high is None:
        return max(low + 1, min(guess or 2 * low, MOST_GROWTH * low))
    if guess is None or (rounds > 4 and rounds % 2 == 0):
        guess = (low + high) // 2
    return max(low + 1, min(guess, high - 1))


def _crossing(known: dict[int, int], low: int, high: int | None, capacity: int) -> int | None:
    """Return the size at which a line through the two nearest peaks reaches the capacity, or None."""
    sizes = sorted(known)
    if high in known and low in known:
        first, second = low, high
    else:
        # The two largest sizes that fit, or the two smallest that do not.
        near = [size for size in sizes if size <= low][-2:] or sizes[:2]
        if len(near) < 2:
            return None
        first, second = near
    slope = (known[second] - known[first]) / (second - first)
    if slope <= 0:
        return None
    return int(first + (capacity - known[first]) / slope)
