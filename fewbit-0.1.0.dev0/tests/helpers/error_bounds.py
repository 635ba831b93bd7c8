"""Error bounds of docs/concepts/theory/ac_gc.md that no policy evaluates: oracles for the derivations there.

The formulas that the error-bound policy uses are in `fewbit.policies.error_bound.formulas`, which also describes the
notation. For each kind of layer `..._d` bounds the squared gradient error for given errors of the saved tensor, and
`..._error` returns the errors with which this bound is e2 V2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbit.errors import InputError
from fewbit.policies.error_bound.formulas import (
    Convolution,
    check_groups,
    convolution_d,
    norm_input_coefficients,
    polynomial_error,
    quotient,
    root,
    square,
    squares,
    tolerance,
    whole,
)

# -- linear layers and convolutions: sections 3 to 5 ---------------------------------------------------------


def linear_d(dx2, rows: int, features: int, grad2, expectation: bool = False) -> float:
    """Return D of a linear layer's weight (section 3), in units of the squared gradient.

    It is rows |g|^2 sum dx2 in the worst case, for which the mean squared error of each feature is enough, and
    |g|^2 sum dx2 in expectation.

    Args:
        dx2: squared errors of the elements: a float, or (features,).
        rows: the product of all sizes of the input but the last.
        features: the last size of the input.
        grad2: |g|^2, where g is the gradient of the output.
        expectation: whether the bound is in expectation.
    """
    return convolution_d(dx2, _as_convolution(rows, features), grad2, expectation)


def linear_error(
    rows: int, features: int, grad2, e2: float, v2: float, expectation: bool = False
) -> float:
    """Return dx2 of all elements with which `linear_d` is e2 v2, where v2 is |grad of the weight|^2."""
    return convolution_error(_as_convolution(rows, features), grad2, e2, v2, expectation)


def _as_convolution(rows: int, features: int) -> Convolution:
    return Convolution(channels=features, elements=rows, filter=(), stride=(), dilation=())


def convolution_error(
    layer: Convolution, grad2, e2: float, v2: float, expectation: bool = False
) -> float | Tensor:
    """Return dx2 with which `convolution_d` is e2 v2.

    Args:
        layer: the convolution.
        grad2: |g|^2, where g is the gradient of the output: a float, or (groups,).
        e2: the relative error that is allowed.
        v2: |grad of the weight|^2.
        expectation: whether the bound is in expectation.

    Returns:
        (channels,) if grad2 is (groups,), else a float for all elements; infinite if grad2 is 0.
    """
    allowed, grad2 = tolerance(e2, v2), squares("grad2", grad2)
    weight = layer.weight(expectation)
    per_group = layer.channels // layer.groups
    if not isinstance(grad2, Tensor):
        return quotient(allowed, weight * per_group * square("grad2", grad2))
    check_groups(grad2, layer)
    return quotient(allowed, layer.channels * weight * grad2).repeat_interleave(per_group)


# -- norms: section 6 ----------------------------------------------------------------------------------------


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


# -- attention: section 7 ------------------------------------------------------------------------------------
#
# O = P v with P = softmax(scale q k^T + mask), which the backward pass computes again from the saved q, k and v. With the
# gradient G of O, Z = G v^T and dS = P (Z - rowsum(P Z)), elementwise,
#
#     grad v = P^T G        grad q = scale dS k        grad k = scale dS^T q
#
# None of these is linear in q and k. The bounds follow from two facts about the Jacobian J of a row's softmax with scores s.
# If lambda is no less than |J| on the way from p to p^, then |p^ - p| <= lambda |s^ - s| and
# |(J^ - J) z| <= lambda (max z - min z) |s^ - s|. lambda is 1/2 for any p, and max p exp(2 a) for a row whose scores err by
# at most a. The bounds hold for errors of any size, and are loose. Attention with dropout has no bound here.

_HALVINGS = 200


@dataclass(frozen=True)
class AttentionNorms:
    """The norms that the bound depends on; float64 tensors over the heads of all samples.

    Args:
        queries: L, the number of queries.
        keys: S, the number of keys.
        features: E, the features of queries and keys.
        value_features: Ev, the features of values.
        scale: the factor of the scores.
        query: (heads,), the largest singular value of q.
        key: (heads,), the largest singular value of k.
        grad: (heads,), the largest singular value of G.
        key_f: (heads,), the Frobenius norm of k.
        scores_f: (heads,), the Frobenius norm of dS.
        key_most: (heads,), the largest norm of a row of k.
        query_rows: (heads, L), the norms of q's rows.
        grad_rows: (heads, L), the norms of G's rows.
        spread: (heads, L), max - min of each row of Z.
        peak: (heads, L), the largest probability of each row.
    """

    queries: int
    keys: int
    features: int
    value_features: int
    scale: float
    query: Tensor
    key: Tensor
    grad: Tensor
    key_f: Tensor
    scores_f: Tensor
    key_most: Tensor
    query_rows: Tensor
    grad_rows: Tensor
    spread: Tensor
    peak: Tensor


def attention_norms(query, key, value, grad, scale=None, mask=None) -> AttentionNorms:
    """Return the norms of all heads, computed in float64.

    Heads that share keys must be given as one head with all their queries. Any size may be 0; empty tensors have norms
    of 0.

    Args:
        query: (..., L, E).
        key: (..., S, E).
        value: (..., S, Ev).
        grad: (..., L, Ev), the gradient of the output.
        scale: the factor of the scores; None for 1 / sqrt(E).
        mask: a floating or boolean mask as in torch, or None. Rows that are masked throughout do not count.

    Raises:
        InputError: the tensors do not have the same heads.
    """
    heads = query.shape[:-2]
    if any(tensor.shape[:-2] != heads for tensor in (key, value, grad)):
        raise InputError(
            "expected query, key, value and grad of the same heads, got shapes "
            f"{[tuple(tensor.shape) for tensor in (query, key, value, grad)]}"
        )
    q, k, v, g = (x.detach().double().flatten(0, -3) if heads else x.detach().double()[None]
                  for x in (query, key, value, grad))  # fmt: skip
    scale = 1.0 / math.sqrt(q.shape[-1] or 1) if scale is None else float(scale)
    z = g @ v.mT
    added = _added(mask, (*heads, *z.shape[-2:]), z)
    p = torch.softmax(scale * (q @ k.mT) + added, -1).nan_to_num()
    seen = torch.isfinite(added)
    low = -_most(-z.masked_fill(~seen, math.inf))
    high = _most(z.masked_fill(~seen, -math.inf))
    slopes = p * (z - (p * z).sum(-1, keepdim=True))
    return AttentionNorms(
        queries=q.shape[-2],
        keys=k.shape[-2],
        features=q.shape[-1],
        value_features=v.shape[-1],
        scale=abs(scale),
        query=_largest_singular(q),
        key=_largest_singular(k),
        grad=_largest_singular(g),
        key_f=torch.linalg.matrix_norm(k),
        scores_f=torch.linalg.matrix_norm(slopes),
        key_most=_most(k.norm(dim=-1)),
        query_rows=q.norm(dim=-1),
        grad_rows=g.norm(dim=-1),
        spread=(high - low).clamp(min=0.0),
        peak=_most(p),
    )


def _most(x: Tensor) -> Tensor:
    """Return the largest entries in the last dimension; 0 if it is empty."""
    return x.amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def _largest_singular(x: Tensor) -> Tensor:
    """Return the largest singular value of each matrix; 0 of an empty one."""
    return torch.linalg.matrix_norm(x, 2) if x.numel() else x.new_zeros(len(x))


def _added(mask, shape, like) -> Tensor:
    """Return the mask as numbers that are added to the scores, (heads, L, S)."""
    if mask is None:
        return torch.zeros_like(like)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, -math.inf)
    return mask.detach().to(like).expand(shape).reshape(like.shape)


def attention_d(
    dx2: float, norms: AttentionNorms, expectation: bool = False
) -> tuple[float, float, float]:
    """Return D of the gradients of query, key and value, summed over heads: the smaller D of the two values of lambda.

    The bound in expectation is for independent errors in q, k and v with mean 0, of which none is larger than 2 dx, as
    stochastic rounding has them with dx2 = step^2 / 4.

    Args:
        dx2: the squared error of each element of q, k and v; in the worst case the largest, not the mean.
        norms: the norms of the heads.
        expectation: whether the bound is in expectation.
    """
    dx, bound = math.sqrt(square("dx2", dx2)), _in_expectation if expectation else _worst
    half = torch.full_like(norms.peak, 0.5)
    moved = norms.peak * torch.exp(2.0 * _scores_most(2.0 * dx if expectation else dx, norms))
    slopes = half, torch.where(norms.peak < 0.5, moved, half)
    sums = [
        [errors.square().sum().item() for errors in bound(dx, slope, norms)] for slope in slopes
    ]
    # exp overflows far from any answer; the other D is finite.
    return tuple(a if math.isnan(b) else min(a, b) for a, b in zip(*sums, strict=True))


def _scores_most(dx: float, n: AttentionNorms) -> Tensor:
    """Return the largest error of a score in each row, (heads, L), if no element errs by more than dx."""
    row = math.sqrt(n.features) * dx
    return n.scale * (row * n.key_most[:, None] + n.query_rows * row + row * row)


def _worst(dx: float, slope: Tensor, n: AttentionNorms):
    """Return bounds of the norms of the three gradients' errors, (heads,) each. slope: lambda of each row."""
    row = math.sqrt(n.features) * dx  # the error of a row of q or k
    q, k = math.sqrt(n.queries) * row, math.sqrt(n.keys) * row
    v = math.sqrt(n.keys * n.value_features) * dx

    def scores(weight):
        """Return a bound on the errors of the scores, with rows times weight."""
        of_query = torch.minimum(_norm(weight * n.query_rows), _most(weight) * n.query)
        return n.scale * (_norm(weight) * row * (n.key + k) + of_query * k)

    of_grad = torch.minimum(_norm(slope * n.grad_rows), _most(slope) * n.grad)
    slopes = of_grad * v + scores(slope * n.spread)
    of_query = n.scale * (slopes * (n.key + k) + n.scores_f * k)
    of_key = n.scale * (slopes * (n.query + q) + n.scores_f * q)
    return of_query, of_key, n.grad * scores(slope)


def _in_expectation(dx: float, slope: Tensor, n: AttentionNorms):
    """Return bounds of the root mean squares of the three gradients' errors, (heads,) each."""
    row = 2.0 * math.sqrt(n.features) * dx
    q, k = math.sqrt(n.queries) * row, math.sqrt(n.keys) * row
    squares = n.key_f[:, None] ** 2 + n.keys * (n.query_rows**2 + n.features * dx * dx)
    rows = n.scale * dx * squares.sqrt()  # the errors of a row's scores
    of_grad = _norm(slope * n.grad_rows) * math.sqrt(n.keys) * dx
    slopes = of_grad + _norm(slope * n.spread * rows)
    direct = n.scores_f * math.sqrt(n.features) * dx
    of_query = n.scale * (slopes * (n.key + k) + direct)
    of_key = n.scale * (slopes * (n.query + q) + direct)
    return of_query, of_key, n.grad * _norm(slope * rows)


def _norm(rows: Tensor) -> Tensor:
    return rows.norm(dim=-1)


def attention_error(
    norms: AttentionNorms, e2: float, v2: tuple[float, float, float], expectation: bool = False
) -> float:
    """Return the largest dx2 with which no D of `attention_d` exceeds its e2 v2, to a relative 1e-12.

    Args:
        norms: the norms of the heads.
        e2: the relative error that is allowed.
        v2: the squared norms of the exact gradients of query, key and value.
        expectation: whether the bound is in expectation.

    Returns:
        dx2; 0 if a squared norm is 0 and its D is not.
    """
    allowed = [tolerance(e2, norm2) for norm2 in v2]

    def is_enough(dx2):
        return all(
            d <= a for d, a in zip(attention_d(dx2, norms, expectation), allowed, strict=True)
        )

    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):  # D rises with dx2, so find a value beyond the answer, then halve
        if not is_enough(high):
            break
        low, high = high, 4.0 * high
    else:
        return math.inf
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high) if low > 0 else high / 16.0
        if middle < 1e-300:
            return 0.0
        low, high = (middle, high) if is_enough(middle) else (low, middle)
        if low > 0 and high <= low * (1 + 1e-12):
            break
    return low


# -- pointwise functions: section 8 --------------------------------------------------------------------------


CURVATURE = {
    "gelu": math.sqrt(2.0 / math.pi),
    "silu": 0.5,
    "sigmoid": 1.0 / (6.0 * math.sqrt(3.0)),
    "tanh": 4.0 / (3.0 * math.sqrt(3.0)),
    "softplus": 0.25,
}
"""max |f''| of smooth functions, in exact form; at x = 0 for gelu, silu and softplus."""


def pointwise_d(dx2: float, curvature: float, grad2: float) -> float:
    """Return D of the input's gradient if x is saved: curvature^2 |g|^2 dx2, in the worst case and in expectation.

    The mean of the errors need not be 0 for the bound in expectation.

    Args:
        dx2: the largest squared error of an element, not the mean.
        curvature: the largest change of f' per unit of x; max |f''| if f' has no jumps.
        grad2: |g|^2, where g is the gradient of the result.
    """
    return square("curvature", curvature) ** 2 * square("grad2", grad2) * square("dx2", dx2)


def pointwise_error(curvature: float, grad2: float, e2: float, v2: float) -> float:
    """Return dx2 with which `pointwise_d` is e2 v2, where v2 is |grad of the input|^2."""
    return quotient(tolerance(e2, v2), square("curvature", curvature) ** 2 * square("grad2", grad2))


def table_d(largest: float, grad2: float) -> float:
    """Return D of the input's gradient if a table stands for f': largest^2 |g|^2, in the worst case.

    Args:
        largest: max |q - f'| over the data, for example from `largest_table_error`.
        grad2: |g|^2, where g is the gradient of the result.
    """
    return square("largest", largest) ** 2 * square("grad2", grad2)
