"""Error bounds of what attention keeps, query, key and value: docs/theory/ac_gc.md, section 7.

O = P v, P = softmax(scale q k^T + mask), computed again from what is kept. With G the gradient of O,
Z = G v^T and dS = P (Z - rowsum(P Z)), elementwise,

    grad v = P^T G        grad q = scale dS k        grad k = scale dS^T q

None of them is linear in q and k. The bounds rest on two facts about a row's softmax p with Jacobian J(p): |J| <= 1/2,
and |(J(p^) - J(p)) z| <= 1/2 (max z - min z) |difference of scores|. They hold however large the errors are, and are
loose. There is no bound here for attention with dropout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbit.compress.error_bounds.shares import square, tolerance
from fewbit.errors import InputError

_HALVINGS = 200


@dataclass(frozen=True)
class AttentionNorms:
    """What the bound depends on; the norms are float64 tensors of one value a head (heads of all samples in a row).

    queries L, keys S, features E, value_features Ev: sizes. query, key, grad: the largest singular values of q, k, G.
    query_f, key_f, grad_f, scores_f: the Frobenius norms of q, k, G and dS. With R_i the max - min of row i of Z,
    spread is the largest R_i, spread2 the sum of R_i^2, and spread_query2 that of R_i^2 |q_i|^2.
    """

    queries: int
    keys: int
    features: int
    value_features: int
    scale: float
    query: Tensor
    key: Tensor
    grad: Tensor
    query_f: Tensor
    key_f: Tensor
    grad_f: Tensor
    scores_f: Tensor
    spread: Tensor
    spread2: Tensor
    spread_query2: Tensor


def attention_norms(query, key, value, grad, scale=None, mask=None) -> AttentionNorms:
    """The norms of all heads, computed in float64.

    query: (..., L, E); key: (..., S, E); value: (..., S, Ev); grad: (..., L, Ev), the gradient of the output. scale:
    1 / sqrt(E) by default. mask: floating or boolean as torch's, or None; rows that are masked throughout do not
    count. Heads that share keys go in as one head with all their queries. Raises InputError for other shapes.
    """
    heads = query.shape[:-2]
    if any(each.shape[:-2] != heads for each in (key, value, grad)):
        raise InputError(
            "expected query, key, value and grad of the same heads, got shapes "
            f"{[tuple(each.shape) for each in (query, key, value, grad)]}"
        )
    q, k, v, g = (x.detach().double().flatten(0, -3) if heads else x.detach().double()[None]
                  for x in (query, key, value, grad))  # fmt: skip
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    z = g @ v.mT
    added = _added(mask, (*heads, *z.shape[-2:]), z)
    p = torch.softmax(scale * (q @ k.mT) + added, -1).nan_to_num()
    seen = torch.isfinite(added)
    low = z.masked_fill(~seen, math.inf).amin(-1)
    high = z.masked_fill(~seen, -math.inf).amax(-1)
    spread2 = (high - low).clamp(min=0.0).square()
    slopes = p * (z - (p * z).sum(-1, keepdim=True))
    return AttentionNorms(
        queries=q.shape[-2],
        keys=k.shape[-2],
        features=q.shape[-1],
        value_features=v.shape[-1],
        scale=abs(scale),
        query=torch.linalg.matrix_norm(q, 2),
        key=torch.linalg.matrix_norm(k, 2),
        grad=torch.linalg.matrix_norm(g, 2),
        query_f=torch.linalg.matrix_norm(q),
        key_f=torch.linalg.matrix_norm(k),
        grad_f=torch.linalg.matrix_norm(g),
        scores_f=torch.linalg.matrix_norm(slopes),
        spread=spread2.amax(-1).sqrt(),
        spread2=spread2.sum(-1),
        spread_query2=(spread2 * q.square().sum(-1)).sum(-1),
    )


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

    Worst-case: of the squared errors only the mean over each head's q, k and v matters. In expectation: of independent
    errors in q, k and v with mean 0, none larger than 2 dx, as stochastic rounding has them, dx2 being step^2 / 4.
    """
    of_each = _in_expectation if expectation else _worst
    return tuple((each**2).sum().item() for each in of_each(square("dx2", dx2), norms))


def _worst(dx2: float, n: AttentionNorms):
    """Bounds of the three gradient errors' norms, by head. Error norms of q, k and v in a head: q, k, v."""
    q = math.sqrt(dx2 * n.queries * n.features)
    k = math.sqrt(dx2 * n.keys * n.features)
    v = math.sqrt(dx2 * n.keys * n.value_features)
    scores = n.scale * (q * n.key + n.query * k + q * k)
    slopes = 0.5 * (n.grad * v + n.spread * scores)
    of_query = n.scale * (slopes * (n.key + k) + n.scores_f * k)
    of_key = n.scale * (slopes * (n.query + q) + n.scores_f * q)
    return of_query, of_key, 0.5 * n.grad * scores


def _in_expectation(dx2: float, n: AttentionNorms):
    """The same of their root mean squares."""
    of_keys = n.key_f**2 + dx2 * n.keys * n.features
    scores = n.scale * torch.sqrt(dx2 * (n.queries * of_keys + n.keys * n.query_f**2))
    spread = n.scale * torch.sqrt(dx2 * (n.spread2 * of_keys + n.keys * n.spread_query2))
    slopes = 0.5 * (n.grad_f * math.sqrt(dx2 * n.keys) + spread)
    q = 2.0 * math.sqrt(dx2 * n.queries * n.features)
    k = 2.0 * math.sqrt(dx2 * n.keys * n.features)
    direct = n.scores_f * math.sqrt(dx2 * n.features)
    of_query = n.scale * (slopes * (n.key + k) + direct)
    of_key = n.scale * (slopes * (n.query + q) + direct)
    return of_query, of_key, 0.5 * n.grad * scores


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
