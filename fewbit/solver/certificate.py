"""What a certificate of an approximate f' says of the exact one.

Let g be within delta of f' on the domain and W the weight's mass. For every step function q the norms of
f' - q and g - q differ by at most delta sqrt(W), so that the error of a table and the optimum, both made
with g, hold for f' once their roots are moved by that much. The same holds for objective unbiased, where only
the distance between the stand-in and f' depends on f'. Greatest deviations (minimax) move by delta itself.
"""

from __future__ import annotations

import math

# A turn of g by less than two deltas is not told from rounding, so that the monotone function for which the bound is
# proven is within three of f'.
_DELTAS = 3.0


def widened(error, bound, *, accuracy, mass, objective):
    """Return ``(error, bound)`` that hold for f', from those of a g that is within ``accuracy`` of it."""
    if accuracy == 0:
        return error, bound
    if objective == "minimax":
        reach = _DELTAS * accuracy
        return error + reach, max(bound - reach, 0.0)
    reach = _DELTAS * accuracy * math.sqrt(mass)
    return (math.sqrt(error) + reach) ** 2, max(math.sqrt(bound) - reach, 0.0) ** 2
