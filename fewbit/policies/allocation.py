"""The division of a budget of bits among tensors: the optimization problem (10) of the paper ActNN (section 4.2).

    min  sum_i  w_i / (2^b_i - 1)^2     such that     sum_i  d_i b_i <= budget,   least <= b_i <= most

Here b_i is the number of bits per element of tensor i, and d_i is the number of its elements. The sensitivity w_i is
the variance that rounding tensor i adds to the gradient, times (2^b_i - 1)^2. The variance at 1 bit can be given
separately, because it departs most from this formula.
"""

from __future__ import annotations

import numpy as np

from fewbit.config import MAX_BITS, MIN_BITS
from fewbit.errors import InputError


def allocate(sensitivity, elements, budget: int, least=MIN_BITS, most=MAX_BITS, at_one=None):
    """Return the bits of each tensor by ActNN's greedy algorithm, in O(n log n).

    All tensors start at `most` bits. In each step the tensor whose variance rises least per element loses a bit, until
    the budget is met. If the last step takes more bits than needed, the bits that are left over go to the tensors whose
    variance falls most. The result is optimal if all tensors have the same size and `at_one` is at least .21 of the
    sensitivity, because each further bit of a tensor then reduces the variance by less than the bit before.

    Args:
        sensitivity: (n,) finite floats, 0 or more: the w of each tensor.
        elements: (n,) integers, 0 or more: the number of elements of each tensor.
        budget: the number of bits of all elements together.
        least: the fewest bits per element of a tensor.
        most: the most bits per element of a tensor.
        at_one: (n,) finite floats: the variance that rounding each tensor to 1 bit adds. None: equal to the
            sensitivity.

    Returns:
        (n,) uint8, the bits per element of each tensor.

    Raises:
        InputError: an argument is not as described here, or the budget is below least * sum(elements).
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
    """Return the variance that `allocate` minimizes: the sum of sensitivity / (2^bits - 1)^2 over all tensors."""
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
    """Return the result of `allocate`, computed with NumPy, as a substitute for the compiled kernel.

    The arguments are those of `allocate`. A step of the algorithm takes one bit from one tensor. If the variance
    at 1 bit (`at_one`) is at least .21 of the sensitivity, each further bit that a tensor loses adds more variance than
    the bit before. The greedy algorithm then takes the steps in the order of the variance that they add per element. So
    this function sorts all steps; the compiled kernel finds the next step with a heap.
    """
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
    # Bits are given back to the steps that were taken last, because they reduce the variance most. Of equal steps the
    # first in the list comes first.
    for move in taken[np.lexsort((moves[taken], -keys.ravel()[taken]))]:
        i = moves[move]
        can_rise = elements[i] <= left and bits[i] == most - 1 - move % len(steps)
        if can_rise:
            bits[i] += 1
            left -= elements[i]
    return bits
