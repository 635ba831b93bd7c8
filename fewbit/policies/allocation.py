"""The division of a budget of bits among tensors: the optimization problem (10) of the paper ActNN (section 4.2).

    min  sum_i  v_i(b_i)     such that     sum_i  d_i b_i <= budget,   1 <= b_i <= 8

Tensor i has d_i elements, and rounding it to b bits adds the variance v_i(b) to the gradient.
"""

from __future__ import annotations

import numpy as np

from fewbit.config import MAX_BITS, MIN_BITS
from fewbit.errors import InputError

_LARGE = 16
"""A tensor is large if it has more than this share of all elements: one in `_LARGE`."""


def allocate(variances, elements, budget: int):
    """Return the bits of each tensor, (n,) uint8, by ActNN's greedy algorithm, in O(n log n).

    All tensors start at 8 bits. In each step the tensor whose variance rises least per element loses a bit, until
    the budget is met. Bits that are left over go to the tensors whose variance falls most. Since one bit of a large
    tensor may be much more than the budget needs, the algorithm also runs with each number of bits of one large tensor.

    Args:
        variances: (n, 8) finite floats, 0 or more: [i, b - 1] is the variance that rounding tensor i to b bits adds.
        elements: (n,) integers, 0 or more.
        budget: the number of bits of all elements together.

    Raises:
        InputError: an argument is not as described, or the budget is below sum(elements).
    """
    variances = np.ascontiguousarray(variances, dtype=np.float64)
    elements = np.ascontiguousarray(elements, dtype=np.int64)
    if elements.ndim != 1 or variances.shape != (len(elements), MAX_BITS):
        raise InputError(
            f"expected {MAX_BITS} variances for each number of elements, in one row each, got shapes "
            f"{variances.shape} and {elements.shape}"
        )
    is_good = np.isfinite(variances) & (variances >= 0)
    if not is_good.all():
        raise InputError(f"expected finite variances of 0 or more, got {variances[~is_good][0]}")
    if (elements < 0).any():
        raise InputError(f"expected numbers of elements of 0 or more, got {elements.min()}")
    total = int(elements.sum())
    if budget < MIN_BITS * total:
        raise InputError(
            f"expected a budget from {MIN_BITS * total} to {MAX_BITS * total} bits for {total} elements, "
            f"got {budget}"
        )
    budget = min(int(budget), MAX_BITS * total)
    best = _allocate(variances, elements, budget)
    for large in np.flatnonzero(elements * _LARGE > total):
        others = np.delete(variances, large, 0), np.delete(elements, large)
        for bits in range(MIN_BITS, MAX_BITS + 1):
            left = budget - bits * elements[large]
            if left >= MIN_BITS * others[1].sum():
                found = np.insert(_allocate(*others, left), large, bits)
                best = min(best, found, key=lambda each: variance(variances, each))
    return best


def variance(variances, bits) -> float:
    """Return the sum over all tensors of the variance at their bits."""
    column = np.asarray(bits, dtype=np.int64)[:, None] - MIN_BITS
    return float(np.take_along_axis(np.asarray(variances), column, 1).sum())


def _allocate(variances, elements, budget, least=MIN_BITS, most=MAX_BITS):
    try:
        from fewbit import _kernels
    except ImportError:
        return reference(variances, elements, budget, least, most)
    bits = np.empty(len(elements), np.uint8)
    given = (
        (array.ctypes.data, array.size, _kernels.DTYPES.index(array.dtype.name), -1)
        for array in (variances, elements, bits)
    )
    *given, to = given
    _kernels.allocate(*given, budget, least, most, to)
    return bits


def reference(variances, elements, budget, least, most):
    """Return the result of `allocate`'s greedy algorithm, by sorting all steps, without the compiled kernel."""
    n = len(elements)
    steps = np.arange(most, least, -1)
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
    # Bits are given back to the steps that were taken last, because they reduce the variance most. Of equal steps that
    # of the first tensor comes first, and of the steps of one tensor that at the fewest bits.
    for move in taken[np.lexsort((-taken, moves[taken], -keys.ravel()[taken]))]:
        i = moves[move]
        can_rise = elements[i] <= left and bits[i] == most - 1 - move % len(steps)
        if can_rise:
            bits[i] += 1
            left -= elements[i]
    return bits
