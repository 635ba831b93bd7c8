"""Error bounds of attention's query, key and value: docs/theory/ac_gc.md, section 7.

O = P v with P = softmax(scale q k^T + mask), which the backward pass computes again from the saved q, k and v. With the
gradient G of O, Z = G v^T and dS = P (Z - rowsum(P Z)), elementwise,

    grad v = P^T G        grad q = scale dS k        grad k = scale dS^T q

None of these is linear in q and k. The bounds follow from two facts about the Jacobian J of a row's softmax with scores s.
If lambda is no less than |J| on the way from p to p^, then |p^ - p| <= lambda |s^ - s| and
|(J^ - J) z| <= lambda (max z - min z) |s^ - s|. lambda is 1/2 for any p, and max p exp(2 a) for a row whose scores err by
at most a. The bounds hold for errors of any size, and are loose. Attention with dropout has no bound here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbit.errors import InputError
from fewbit.policies.error_bound.formulas.shares import square, tolerance

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
