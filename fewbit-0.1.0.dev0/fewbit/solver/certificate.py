"""Widen an error and a lower bound, computed for an approximation g of f', so that they hold for f' itself.

Let |f' - g| be at most delta on the domain, and W the integral of the weight w. The error of a step function q is the
square of the norm of f' - q, that is, the integral of (f' - q)**2 w. For every q the norms of f' - q and g - q differ
by at most delta sqrt(W). So an error and a lower bound that were computed for g become valid for f' if the square root
of the error is raised by delta sqrt(W), and the square root of the bound is lowered by delta sqrt(W). The same is true
for objective "unbiased", because there the error depends on f' only through the distance between f' and the piecewise
linear function that replaces f'. For objective "minimax", the error is raised and the bound is lowered by delta.

The code raises and lowers by three times as much, because the solver ignores small changes of direction of g.
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
