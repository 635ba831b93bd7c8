"""The gradients of attention, computed from blocks of the matrix of probabilities."""

from __future__ import annotations

import math

import torch

from fewbit.runtime.interop.tensor_kinds import is_plain

_BLOCK = 2**17
"""The number of probabilities in a block for each thread, so that they stay in the thread's caches."""
_BLOCK_QUERIES = 128
"""The number of queries in a block. Causal attention leaves out the keys after the last of them."""


def fits(query, key, value, grad, is_cast: bool = False) -> bool:
    """Return whether `gradients` supports these tensors, and is faster than torch's own function.

    `is_cast` says whether autocast gave the attention's inputs one dtype, that of `grad`.
    """
    if not is_plain(grad):  # then the others, which fewbit has dequantized, are plain too
        return False
    dtype = grad.dtype
    for x in (query, key, value, grad):
        if not x.is_cpu or (x.dtype is not dtype and not is_cast):
            return False
    is_usual = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    count = math.prod(query.shape[:-1]) * key.shape[-2]
    return is_usual and count > 0 and are_products_fast(dtype)


def are_products_fast(dtype) -> bool:
    """Return whether the products of blocks have been compared with torch's own function."""
    if dtype is torch.bfloat16:
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype is torch.float32 and torch.backends.mkl.is_available()


def gradients(query, key, value, grad, is_causal: bool, scale: float | None):
    """Return the gradients of query, key and value, computed from blocks of the matrix of probabilities.

    With the scores S, the probabilities P and the gradient g of the result,

        S = scale q transpose(k)     P = softmax(S)     D = g transpose(v)     T = P (D - sum(P D))
        gradient of q = scale T k    gradient of k = scale transpose(T) q      gradient of v = transpose(P) g

    P D and P (D - ...) are products of elements, and the sum runs over the keys of a query. The tensors are on the CPU:
    query (..., L, E), key (..., S, E), value (..., S, Ev) and grad (..., L, Ev), float32 or bfloat16. Products other
    than S are computed in the dtype of grad.
    """
    if scale is None:
        scale = 1 / math.sqrt(max(query.shape[-1], 1))  # without entries, all scores are 0
    inputs = query, key, value
    heads, length, keys = math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2]
    q, k, v, g = [x.to(grad.dtype).reshape(heads, *x.shape[-2:]) for x in (*inputs, grad)]
    size = min(length, _BLOCK_QUERIES) * keys
    step = max(1, _BLOCK * torch.get_num_threads() // size)
    is_one = heads <= step and length <= _BLOCK_QUERIES
    if is_one and not (is_causal and keys > length):
        p, t = _block(q, k, v, g, 0 if is_causal else None, scale)
        of_q = _product(torch.zeros_like(q), t, k, scale)
        found = of_q, _product(torch.zeros_like(k), t.mT, q, scale), torch.bmm(p.mT, g)
    else:
        found = _by_blocks(q, k, v, g, is_causal, scale, step)
    pairs = zip(found, inputs, strict=True)
    return [x.view(like.shape).to(like.dtype) for x, like in pairs]


def _by_blocks(q, k, v, g, is_causal: bool, scale: float, step: int):
    """Compute the gradients from blocks of `step` heads and `_BLOCK_QUERIES` queries."""
    of_q, of_k, of_v = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    heads, length, _ = q.shape
    for head in range(0, heads, step):
        some = slice(head, head + step)
        sum_k = torch.zeros_like(k[some], dtype=torch.float32)
        sum_v = torch.zeros_like(v[some], dtype=torch.float32)
        for first in range(0, length, _BLOCK_QUERIES):
            rows = slice(first, min(first + _BLOCK_QUERIES, length))
            keys = min(rows.stop, k.shape[1]) if is_causal else k.shape[1]
            q_, g_, k_, v_ = q[some, rows], g[some, rows], k[some, :keys], v[some, :keys]
            p, t = _block(q_, k_, v_, g_, first if is_causal else None, scale)
            _add_product(sum_v[:, :keys], p.mT, g_)
            _product(of_q[some, rows], t, k_, scale)
            _add_product(sum_k[:, :keys], t.mT, q_, scale)
        of_k[some], of_v[some] = sum_k, sum_v
    return of_q, of_k, of_v


def _block(q, k, v, g, first: int | None, scale: float):
    """Return P and T of a block. `first` is the position of its first query, or None if attention is not causal."""
    mask = q.new_zeros(q.shape[1], k.shape[1], dtype=torch.float32)
    if first is not None:
        mask = mask.fill_(-math.inf).triu_(first + 1)
    # Scores can be large, so their exponentials need the precision of float32.
    factors = mask, q.float(), k.float().mT
    scores = torch.baddbmm(*factors, beta=int(first is not None), alpha=scale)
    p = torch.softmax(scores, -1).to(g.dtype)
    return p, torch._softmax_backward_data(torch.bmm(g, v.mT), p, -1, p.dtype)


def _product(out, a, b, scale: float):
    """Write scale * a b to `out`, which must be 0: with scale 0, products of bfloat16 do not write to it."""
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _add_product(total, a, b, factor: float = 1.0) -> None:
    """Add factor * a b to `total`, which is float32, so that sums of bfloat16 products do not lose precision."""
    if a.dtype is total.dtype:
        total.baddbmm_(a, b, alpha=factor)
    else:
        total.add_(torch.bmm(a, b), alpha=factor)
