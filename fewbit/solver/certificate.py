"""Make a certificate for an approximate f' hold for the exact f'.

Let g be within delta of f' on the domain and W the weight's mass. For every step function q the norms of f' - q and g -
q differ by at most delta sqrt(W), so error and lower bound, both computed for g, hold for f' after their square roots
are moved by that much. The same holds for objective "unbiased", in which f' enters only through the distance between f'
and the piecewise linear function that replaces f'. Largest deviations (minimax) move by delta.
"""

from __future__ import annotations

import math

# The solver ignores changes of direction of g by less than two deltas. So the lower bound is proven for a function,
# monotone in each cell, that can differ from f' by up to three deltas.
_DELTAS = 3.0


def widened(error, bound, *, accuracy, mass, objective):
    """Return an error and a lower bound that hold for f', from those of an approximation g.

    Args:
        error: The error computed for g.
        bound: The lower bound computed for g.
        accuracy: The largest |f' - g| on the domain.
        mass: The integral of the weight over the domain.
        objective: "mse", "unbiased" or "minimax".

    Returns:
        The error and the lower bound for f'.
    """
    if accuracy == 0:
        return error, bound
    if objective == "minimax":
        reach = _DELTAS * accuracy
        return error + reach, max(bound - reach, 0.0)
    reach = _DELTAS * accuracy * math.sqrt(mass)
    return (math.sqrt(error) + reach) ** 2, max(math.sqrt(bound) - reach, 0.0) ** 2
