"""Error bounds of batch, layer, group and RMS norm: docs/theory/ac_gc.md, section 6.

A norm saves its normalized input x~ with errors (docs/decisions/0007). It works on sets of M elements that share a mean
and a deviation s: a batch norm's channels, a layer or RMS norm's rows, a group norm's groups of a sample. With the
gradient g of the output and g' = g times the weight,

    grad weight = sum g x~        grad x = (g' - mean(g') - x~ mean(x~ g')) / s

The input's gradient is quadratic in x~, and its error goes on to all layers below. It depends on two sums over the sets:
scaled2 is the sum of |g'|^2 / s^2, and alignment2 the sum of (x~ . g')^2 / s^2, which is between 0 and M scaled2. In a
batch norm x~ . g' is the weight times its gradient.
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
"""E dx^4 <= KURTOSIS dx2^2 for stochastic rounding with dx2 = step^2 / 4 (docs/theory/ac_gc.md, section 1)."""


def norm_squares(normalized: Tensor, weighted: Tensor, rstd: Tensor, dims) -> tuple[Tensor, Tensor]:
    """Return (scaled2, alignment2) of each set, float64 in the shape of rstd.

    The bounds take their sums over all sets. For a batch norm they also take the values of each channel.

    Args:
        normalized: x~.
        weighted: g', of x~'s shape.
        rstd: 1 / s, in a shape that broadcasts to x~'s.
        dims: the dimensions of a set.
    """
    x, g, rstd = normalized.double(), weighted.double(), rstd.double()
    scaled2 = (g.square().sum(dims, keepdim=True) * rstd.square()).reshape(rstd.shape)
    aligned = ((x * g).sum(dims, keepdim=True) * rstd).reshape(rstd.shape)
    return scaled2, aligned.square()


def norm_input_d(dx2, size: int, scaled2, alignment2=None, expectation: bool = False) -> float:
    """Return D of a norm's input gradient: (first dx + second dx2)^2, summed over channels.

    In the worst case the mean squared error of each set is enough. The bound in expectation holds for one copy or two,
    and for errors with E dx^4 <= 4/3 dx2^2, as stochastic rounding has them with dx2 = step^2 / 4.

    Args:
        dx2: squared errors of the elements: a float, or (channels,).
        size: M, the elements of a set.
        scaled2: see the module; a float, or (channels,).
        alignment2: see the module; None for M scaled2, its largest value.
        expectation: whether the bound is in expectation.
    """
    dx2 = squares("dx2", dx2)
    first, second = norm_input_coefficients(size, scaled2, alignment2, expectation)
    d = (first * root(dx2) + second * dx2) ** 2
    return d.sum().item() if isinstance(d, Tensor) else d


def norm_input_error(
    size: int, scaled2, alignment2, e2: float, v2: float, expectation: bool = False
) -> float | Tensor:
    """Return dx2 with which `norm_input_d` is e2 v2, where v2 is |grad of the input|^2.

    It is (channels,) if scaled2 is. Each channel then has an equal share of e2 v2.
    """
    first, second = norm_input_coefficients(size, scaled2, alignment2, expectation)
    parts = len(first) if isinstance(first, Tensor) else 1
    return polynomial_error(tolerance(e2, v2) / parts, first, second)


def norm_input_coefficients(size: int, scaled2, alignment2=None, expectation: bool = False):
    """Return (first, second) of D = (first dx + second dx2)^2 in `norm_input_d`; (channels,) each if scaled2 is."""
    whole("size", size)
    scaled2 = squares("scaled2", scaled2)
    alignment2 = size * scaled2 if alignment2 is None else squares("alignment2", alignment2)
    if not expectation:
        return root(alignment2 / size) + root(scaled2), root(scaled2)
    cross = 2.0 * root(alignment2 * scaled2 / size)
    first = root((scaled2 + alignment2 + cross) / size)
    return first, root(scaled2 * (size - 1 + KURTOSIS)) / size


def norm_weight_d(dx2, summands: int, grad2, expectation: bool = False) -> float:
    """Return D of a norm's weight, summed over channels.

    It is summands |g|^2 dx2 in the worst case, for which the mean squared error of the summands is enough, and |g|^2 dx2
    in expectation.

    Args:
        dx2: squared errors of the elements: a float, or (channels,).
        summands: the number of elements that are summed up in an entry of the weight's gradient: N H W of a batch or
            group norm, the rows of a layer or RMS norm.
        grad2: |g|^2, where g is the gradient of the output (without the weight): a float, or (channels,).
        expectation: whether the bound is in expectation.
    """
    d = squares("dx2", dx2) * squares("grad2", grad2)
    d = d.sum().item() if isinstance(d, Tensor) else d
    return d if expectation else whole("summands", summands) * d


def norm_weight_error(
    summands: int, grad2, e2: float, v2: float, expectation: bool = False
) -> float | Tensor:
    """Return dx2 with which `norm_weight_d` is e2 v2, where v2 is |grad of the weight|^2; (channels,) if grad2 is."""
    grad2 = squares("grad2", grad2)
    parts = len(grad2) if isinstance(grad2, Tensor) else 1
    cost = parts * grad2 if expectation else parts * whole("summands", summands) * grad2
    return quotient(tolerance(e2, v2), cost)


def norm_error(of_input, of_weight) -> float | Tensor:
    """Return the smaller of two errors, elementwise, with which both gradients keep to their bounds."""
    if isinstance(of_input, Tensor) or isinstance(of_weight, Tensor):
        pair = (torch.as_tensor(error, dtype=torch.float64) for error in (of_input, of_weight))
        return torch.minimum(*pair)
    return min(of_input, of_weight)
