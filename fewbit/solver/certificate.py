"""Widen an error and a lower bound, computed for an approximation g of f', so that they hold for f' itself.

If |f' - g| <= delta, then for every q the norms of f' - q and g - q differ by at most delta sqrt(W), with W the integral of w.
The code uses 3 delta, because the solver ignores small changes of direction of g.
"""

from __future__ import annotations

import math

# The solver ignores changes of direction of g by less than two deltas. So the lower bound is proven for a function,
# monotone in each cell, that can differ from f' by up to three deltas.
_DELTAS = 3.0


def widened(error, bound, *, accuracy, mass, objective):
    """Return (error, lower bound) for f', from those of an approximation that differs from f' by at most `accuracy`.

    `mass` is the integral of the weight over the domain.
    """
    if accuracy == 0:
        return error, bound
    if objective == "minimax":
        reach = _DELTAS * accuracy
        return error + reach, max(bound - reach, 0.0)
    reach = _DELTAS * accuracy * math.sqrt(mass)
    return (math.sqrt(error) + reach) ** 2, max(math.sqrt(bound) - reach, 0.0) ** 2
