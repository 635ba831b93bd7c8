"""The gradients of attention, computed from blocks of the matrix of probabilities."""

from __future__ import annotations

import math

import torch

from fewbit.runtime.interop.tensor_kinds import is_plain

_BLOCK = 2**17
"""The number of probabilities in a block for each thread, so that they stay in the thread's caches."""
_BLOCK_QUERIES = 128
"""The number of queries in a block. Causal attention leaves out the keys after the last of them."""


def fits(query, key, value, grad) -> bool:
    """Return whether `gradients` supports these tensors."""
    if not is_plain(grad):  # then the others, which fewbit has dequantized, are plain too
        return False
    for x in (query, key, value, grad):
        if not x.is_cpu or x.dtype is not torch.float32:
            return False
    is_usual = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    count = math.prod(query.shape[:-1]) * key.shape[-2]
    # The block's products have been compared with torch's own function only with MKL.
    return is_usual and count > 0 and torch.backends.mkl.is_available()


def gradients(query, key, value, grad, is_causal: bool, scale: float | None):
    """Return the gradients of query, key and value, computed from blocks of the matrix of probabilities.

    With the scores S, the probabilities P and the gradient g of the result,

        S = scale q transpose(k)     P = softmax(S)     D = g transpose(v)     T = P (D - sum(P D))
        gradient of q = scale T k    gradient of k = scale transpose(T) q      gradient of v = transpose(P) g

    P D and P (D - ...) are products of elements, and the sum runs over the keys of a query. The tensors are float32 on
    the CPU: query (..., L, E), key (..., S, E), value (..., S, Ev) and grad (..., L, Ev).
    """
    if scale is None:
        scale = 1 / math.sqrt(max(query.shape[-1], 1))  # without entries, all scores are 0
    inputs = query, key, value
    heads = math.prod(query.shape[:-2])
    q, k, v, g = (x.reshape(heads, *x.shape[-2:]) for x in (*inputs, grad))
    of_q, of_k, of_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    length = q.shape[1]
    size = min(length, _BLOCK_QUERIES) * k.shape[1]
    step = max(1, _BLOCK * torch.get_num_threads() // size)
    for first in range(0, length, _BLOCK_QUERIES):
        rows = slice(first, min(first + _BLOCK_QUERIES, length))
        keys = min(rows.stop, k.shape[1]) if is_causal else k.shape[1]
        mask = q.new_zeros(rows.stop - first, keys)
        if is_causal:
            mask = mask.fill_(-math.inf).triu_(first + 1)
        for head in range(0, heads, step):
            some = slice(head, head + step)
            q_, g_, k_, v_ = q[some, rows], g[some, rows], k[some, :keys], v[some, :keys]
            scores = torch.baddbmm(mask, q_, k_.mT, beta=int(is_causal), alpha=scale)
            p = torch.softmax(scores, -1)
            of_v[some, :keys].baddbmm_(p.mT, g_)
            t = torch._softmax_backward_data(torch.bmm(g_, v_.mT), p, -1, p.dtype)
            torch.baddbmm(of_q[some, rows], t, k_, beta=0, alpha=scale, out=of_q[some, rows])
            of_k[some, :keys].baddbmm_(t.mT, q_, alpha=scale)
    return tuple(x.view(like.shape) for x, like in zip((of_q, of_k, of_v), inputs, strict=True))
