"""Error bounds of batch, layer, group and RMS norm: docs/theory/ac_gc.md, section 6.

What is kept, and errs, is the normalized input x~ (docs/decisions/0007). A norm works on sets of M elements that share
a mean and a deviation s: a batch norm's channels, a layer or RMS norm's rows, a group norm's groups of a sample.
With g the gradient of the output and g' = g times the weight,

    grad weight = sum g x~        grad x = (g' - mean(g') - x~ mean(x~ g')) / s

The input's is quadratic in x~, and its error goes on to all layers below. Two sums over the sets measure it:
scaled2, of |g'|^2 / s^2, and alignment2, of (x~ . g')^2 / s^2, which is between 0 and M scaled2. Of a batch norm
x~ . g' is the weight times its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbit.policies.error_bound.formulas.shares import (
    polynomial_error,
    quotient,
    root,
    squares,
    tolerance,
    whole,
)

KURTOSIS = 4.0 / 3.0
"""E dx^4 <= KURTOSIS dx2^2 for stochastic rounding, dx2 = step^2 / 4 (docs/theory/ac_gc.md, section 1)."""


def norm_squares(normalized: Tensor, weighted: Tensor, rstd: Tensor, dims) -> tuple[Tensor, Tensor]:
    """(scaled2, alignment2) of each set, float64 in the shape of rstd.

    normalized: x~; weighted: g', of x~'s shape; rstd: 1 / s, which broadcasts to them; dims: those of a set. Their sums
    over all sets are what the bounds take; a batch norm's can be taken by channel.
    """
    x, g, rstd = normalized.double(), weighted.double(), rstd.double()
    scaled2 = (g.square().sum(dims, keepdim=True) * rstd.square()).reshape(rstd.shape)
    aligned = ((x * g).sum(dims, keepdim=True) * rstd).reshape(rstd.shape)
    return scaled2, aligned.square()


def norm_input_d(dx2, size: int, scaled2, alignment2=None, expectation: bool = False) -> float:
    """D of a norm's input gradient: (first dx + second dx2)^2, summed over channels if values are (C,).

    size: M. scaled2, alignment2: see the module; alignment2 defaults to M scaled2, its largest value. Worst-case: only
    the mean of the squared errors of each set matters. In expectation: for one copy or two, and of
    errors with E dx^4 <= 4/3 dx2^2 as stochastic rounding has them, dx2 being step^2 / 4.
    """
    dx2 = squares("dx2", dx2)
    first, second = norm_input_coefficients(size, scaled2, alignment2, expectation)
    d = (first * root(dx2) + second * dx2) ** 2
    return d.sum().item() if isinstance(d, Tensor) else d


def norm_input_error(
    size: int, scaled2, alignment2, e2: float, v2: float, expectation: bool = False
) -> float | Tensor:
    """dx2 with which `norm_input_d` is e2 v2, v2 = |grad of the input|^2.

    (C,) if scaled2 is: each channel then has an equal share of e2 v2. alignment2 may be None.
    """
    first, second = norm_input_coefficients(size, scaled2, alignment2, expectation)
    parts = len(first) if isinstance(first, Tensor) else 1
    return polynomial_error(tolerance(e2, v2) / parts, first, second)


def norm_input_coefficients(size: int, scaled2, alignment2=None, expectation: bool = False):
    """(first, second) of D = (first dx + second dx2)^2, as `norm_input_d` has it; (C,) if scaled2 is."""
    whole("size", size)
    scaled2 = squares("scaled2", scaled2)
    alignment2 = size * scaled2 if alignment2 is None else squares("alignment2", alignment2)
    if not expectation:
        return root(alignment2 / size) + root(scaled2), root(scaled2)
    cross = 2.0 * root(alignment2 * scaled2 / size)
    first = root((scaled2 + alignment2 + cross) / size)
    return first, root(scaled2 * (size - 1 + KURTOSIS)) / size


def norm_weight_d(dx2, summands: int, grad2, expectation: bool = False) -> float:
    """D of a norm's weight. Worst-case: summands |g|^2 dx2; in expectation: |g|^2 dx2; summed over channels.

    summands: how many elements an entry of the weight's gradient is a sum of: N H W of a batch or group
    norm, the rows of a layer or RMS norm. grad2: |g|^2, g the gradient of the output (without the weight), or (C,) of
    channels. Worst-case: only the mean of the squared errors over those summands matters.
    """
    d = squares("dx2", dx2) * squares("grad2", grad2)
    d = d.sum().item() if isinstance(d, Tensor) else d
    return d if expectation else whole("summands", summands) * d


def norm_weight_error(
    summands: int, grad2, e2: float, v2: float, expectation: bool = False
) -> float | Tensor:
    """dx2 with which `norm_weight_d` is e2 v2, v2 = |grad of the weight|^2; (C,) if grad2 is."""
    grad2 = squares("grad2", grad2)
    parts = len(grad2) if isinstance(grad2, Tensor) else 1
    cost = parts * grad2 if expectation else parts * whole("summands", summands) * grad2
    return quotient(tolerance(e2, v2), cost)


def norm_error(of_input, of_weight) -> float | Tensor:
    """The smaller of the two, elementwise: with it both gradients keep to their bounds."""
    if isinstance(of_input, Tensor) or isinstance(of_weight, Tensor):
        pair = (torch.as_tensor(each, dtype=torch.float64) for each in (of_input, of_weight))
        return torch.minimum(*pair)
    return min(of_input, of_weight)
