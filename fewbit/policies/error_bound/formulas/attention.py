"""Error bounds of what attention keeps, query, key and value: docs/theory/ac_gc.md, section 7.

O = P v, P = softmax(scale q k^T + mask), computed again from what is kept. With G the gradient of O,
Z = G v^T and dS = P (Z - rowsum(P Z)), elementwise,

    grad v = P^T G        grad q = scale dS k        grad k = scale dS^T q

None of them is linear in q and k. The bounds rest on two facts about the Jacobian J of a row's softmax: with lambda no
less than |J| on the way from p to p^, |p^ - p| <= lambda |s^ - s| and |(J^ - J) z| <= lambda (max z - min z) |s^ - s|,
s being the scores. lambda is 1/2 for any p, and for a row whose scores err by at most a, max p exp(2 a). They
hold however large the errors are, and are loose. There is no bound here for attention with dropout.
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
    """What the bound depends on; float64 tensors, heads of all samples in a row.

    queries L, keys S, features E, value_features Ev: sizes. Of each head, (heads,): query, key, grad: the largest
    singular values of q, k, G; key_f, scores_f: the Frobenius norms of k and dS; key_most: the largest norm of a
    row of k. Of each row, (heads, L): query_rows, grad_rows: the norms of q's and G's rows; spread: max - min
    of Z's; peak: the largest probability.
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
    """The norms of all heads, computed in float64.

    query: (..., L, E); key: (..., S, E); value: (..., S, Ev); grad: (..., L, Ev), the gradient of the output. scale:
    1 / sqrt(E) by default. mask: floating or boolean as torch's, or None; rows that are masked throughout do not
    count. Any size may be 0: what is empty has norms of 0. Heads that share keys go in as one head with all their queries. Raises InputError for other shapes.
    """
    heads = query.shape[:-2]
    if any(each.shape[:-2] != heads for each in (key, value, grad)):
        raise InputError(
            "expected query, key, value and grad of the same heads, got shapes "
            f"{[tuple(each.shape) for each in (query, key, value, grad)]}"
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
    """The largest entries in the last dimension; 0 where it is empty."""
    return x.amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def _largest_singular(x: Tensor) -> Tensor:
    """Of each matrix; 0 of an empty one."""
    return torch.linalg.matrix_norm(x, 2) if x.numel() else x.new_zeros(len(x))


def _added(mask, shape, like) -> Tensor:
    """The mask as what is added to the scores, (heads, L, S)."""
    if mask is None:
        return torch.zeros_like(like)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, -math.inf)
    return mask.detach().to(like).expand(shape).reshape(like.shape)


def attention_d(
    dx2: float, norms: AttentionNorms, expectation: bool = False
) -> tuple[float, float, float]:
    """D of the gradients of (query, key, value), summed over heads, if all elements of q, k and v err by dx2.

    Worst-case: for every element, not their mean. In expectation: of independent errors in q, k and v with mean 0,
    none larger than 2 dx, as stochastic rounding has them, dx2 being step^2 / 4. Of the D of both lambda
    the smaller is taken.
    """
    dx, of_each = math.sqrt(square("dx2", dx2)), _in_expectation if expectation else _worst
    half = torch.full_like(norms.peak, 0.5)
    moved = norms.peak * torch.exp(2.0 * _scores_most(2.0 * dx if expectation else dx, norms))
    bounded = [
        of_each(dx, each, norms) for each in (half, torch.where(norms.peak < 0.5, moved, half))
    ]
    of_both = [[each.square().sum().item() for each in one] for one in bounded]
    # Far from any answer exp overflows; the other D is finite.
    return tuple(a if math.isnan(b) else min(a, b) for a, b in zip(*of_both, strict=True))


def _scores_most(dx: float, n: AttentionNorms) -> Tensor:
    """(heads, L): the most by which a score of each row errs, where no element errs by more than dx."""
    row = math.sqrt(n.features) * dx
    return n.scale * (row * n.key_most[:, None] + n.query_rows * row + row * row)


def _worst(dx: float, slope: Tensor, n: AttentionNorms):
    """Bounds of the three gradient errors' norms, by head. slope: lambda of each row."""
    row = math.sqrt(n.features) * dx  # the error of a row of q or k
    q, k = math.sqrt(n.queries) * row, math.sqrt(n.keys) * row
    v = math.sqrt(n.keys * n.value_features) * dx

    def scores(weight):
        """Of the errors of the scores, their rows times weight."""
        of_query = torch.minimum(_norm(weight * n.query_rows), _most(weight) * n.query)
        return n.scale * (_norm(weight) * row * (n.key + k) + of_query * k)

    of_grad = torch.minimum(_norm(slope * n.grad_rows), _most(slope) * n.grad)
    slopes = of_grad * v + scores(slope * n.spread)
    of_query = n.scale * (slopes * (n.key + k) + n.scores_f * k)
    of_key = n.scale * (slopes * (n.query + q) + n.scores_f * q)
    return of_query, of_key, n.grad * scores(slope)


def _in_expectation(dx: float, slope: Tensor, n: AttentionNorms):
    """The same of their root mean squares."""
    row = 2.0 * math.sqrt(n.features) * dx
    q, k = math.sqrt(n.queries) * row, math.sqrt(n.keys) * row
    each = n.key_f[:, None] ** 2 + n.keys * (n.query_rows**2 + n.features * dx * dx)
    rows = n.scale * dx * each.sqrt()  # of the errors of a row's scores
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
    """The largest dx2 with which no D of `attention_d` exceeds its e2 v2, to a relative 1e-12.

    v2: the squared norms of the exact gradients of (query, key, value). 0 if one of them is 0 and its D is not.
    """
    allowed = [tolerance(e2, each) for each in v2]

    def is_enough(dx2):
        return all(
            d <= a for d, a in zip(attention_d(dx2, norms, expectation), allowed, strict=True)
        )

    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):  # D rises with dx2: first beyond the answer, then halve
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
