"""Bits for compressed tensors under a budget: Prob. (10) of ActNN (section 4.2).

    min  sum_i  w_i / (2^b_i - 1)^2     such that     sum_i  d_i b_i <= budget,   least <= b_i <= most

w_i is the sensitivity of tensor i, the variance of the gradient that rounding it adds times (2^b_i - 1)^2, and d_i
the number of its elements. At 1 bit the variance may be given apart, as there it is least like that.
"""

from __future__ import annotations

import numpy as np

from fewbit.config import MAX_BITS, MIN_BITS
from fewbit.errors import InputError


def allocate(sensitivity, elements, budget: int, least=MIN_BITS, most=MAX_BITS, at_one=None):
    """Bits for each tensor, uint8 (n,), by ActNN's greedy algorithm: O(n log n).

    sensitivity: (n,) floats, 0 or more, finite. elements: (n,) integers, 0 or more. budget: bits in all. at_one:
    (n,) floats, the variance that a tensor adds at 1 bit (its sensitivity).

    All start at `most`, and whichever tensor's variance rises least per element gives up a bit until the budget is
    met; what the last one gave too much goes to those that gain most. Optimal where all are of one size and at_one is at
    least .21 of the sensitivity: noise then falls ever more slowly with bits. Raises InputError for other values, and for
    a budget below least * sum(elements).
    """
    sensitivity = np.ascontiguousarray(sensitivity, dtype=np.float64)
    at_one = sensitivity if at_one is None else np.ascontiguousarray(at_one, dtype=np.float64)
    elements = np.ascontiguousarray(elements, dtype=np.int64)
    if not sensitivity.shape == at_one.shape == elements.shape or sensitivity.ndim != 1:
        raise InputError(
            "expected as many sensitivities as numbers of elements, in one dimension each, got shapes "
            f"{sensitivity.shape} and {elements.shape}"
        )
    for values in (sensitivity, at_one):
        is_good = np.isfinite(values) & (values >= 0)
        if not is_good.all():
            raise InputError(
                f"expected finite sensitivities of 0 or more, got {values[~is_good][0]}"
            )
    if (elements < 0).any():
        raise InputError(f"expected numbers of elements of 0 or more, got {elements.min()}")
    if not 1 <= least <= most <= 8:
        raise InputError(f"expected 1 <= least <= most <= 8, got {least} and {most}")
    total = int(elements.sum())
    if budget < least * total:
        raise InputError(
            f"expected a budget from {least * total} to {most * total} bits for {total} elements, "
            f"got {budget}"
        )
    return _allocate(sensitivity, at_one, elements, min(int(budget), most * total), least, most)


def variance(sensitivity, bits) -> float:
    """What is minimized: sum of w / (2^b - 1)^2."""
    return float(np.sum(np.asarray(sensitivity) * _NOISE[np.asarray(bits)]))


_NOISE = np.array([np.inf, *(1.0 / (2.0**bits - 1) ** 2 for bits in range(1, 9))])


def _allocate(sensitivity, at_one, elements, budget, least, most):
    try:
        from fewbit import _kernels
    except ImportError:
        return reference(sensitivity, at_one, elements, budget, least, most)
    bits = np.empty(len(elements), np.uint8)
    given = (
        (array.ctypes.data, array.size, _kernels.DTYPES.index(array.dtype.name), -1)
        for array in (sensitivity, at_one, elements, bits)
    )
    *given, to = given
    _kernels.allocate(*given, budget, least, most, to)
    return bits


def reference(sensitivity, at_one, elements, budget, least, most):
    """What the compiled kernel computes, without a heap: the moves of one tensor come in rising order of loss,
    so that taking them off a heap one by one is taking them in sorted order (at_one of .21 sensitivities and more)."""
    n = len(elements)
    steps = np.arange(most, least, -1)
    variances = sensitivity[:, None] / (2.0 ** np.arange(1, 9) - 1) ** 2
    variances[:, 0] = at_one
    losses = variances[:, steps - 2] - variances[:, steps - 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        keys = losses / elements[:, None]
    moves = np.repeat(np.arange(n), len(steps))
    order = np.lexsort((moves, keys.ravel()))
    order = order[elements[moves[order]] > 0]
    freed = np.cumsum(elements[moves[order]])
    excess = most * int(elements.sum()) - budget
    count = int(np.searchsorted(freed, excess)) + 1 if excess > 0 else 0
    bits = (most - np.bincount(moves[order[:count]], minlength=n)).astype(np.uint8)
    left = budget - int((elements * bits).sum())
    taken = order[:count]
    # Of what was given up the last would gain most; of equals the first in the list.
    for move in taken[np.lexsort((moves[taken], -keys.ravel()[taken]))]:
        i = moves[move]
        can_rise = elements[i] <= left and bits[i] == most - 1 - move % len(steps)
        if can_rise:
            bits[i] += 1
            left -= elements[i]
    return bits
