"""The gradients of attention on the CPU, computed from blocks of the matrix of probabilities.

Let S be the scores, P the probabilities, and g the gradient of the result. Then

    S = scale q transpose(k)     P = softmax(S)     D = g transpose(v)     T = P (D - sum(P D))
    gradient of q = scale T k    gradient of k = scale transpose(T) q      gradient of v = transpose(P) g

The products P D and P (D - ...) are those of elements, and the sum runs over the keys of a query. These are five matrix
products and one exponential of each score. torch's kernels for the CPU compute seven products and two exponentials if
the result of attention was not saved, and their products take longer than those of MKL.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BLOCK = 2**17
"""The number of probabilities in a block, for each thread. So few stay in the thread's caches."""
_QUERIES = 128
"""The number of queries in a block. Causal attention leaves out the keys after the last of them."""
_LEAST = 2**16
"""The least number of probabilities. The gradients of smaller calls are those of torch's own function, bit for bit."""


def fits(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> bool:
    """Return whether `gradients` should compute the gradients of attention without mask, dropout and repeated heads.

    Args:
        query: (..., L, E), as are key and value an ordinary dense tensor.
        key: (..., S, E).
        value: (..., S, Ev).
        grad: the gradient of the result, (..., L, Ev), an ordinary dense tensor.
    """
    tensors = query, key, value, grad
    is_usual = all(x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors)
    is_usual = is_usual and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    size = math.prod(query.shape[:-1]) * key.shape[-2]
    return is_usual and size >= _LEAST and torch.backends.mkl.is_available()


def gradients(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    Args:
        query: (..., L, E) float32.
        key: (..., S, E) float32.
        value: (..., S, Ev) float32.
        grad: the gradient of the result, (..., L, Ev) float32.
        is_causal: as in torch.
        scale: as in torch.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    inputs = query, key, value
    q, k, v, g = (x.reshape(-1, *x.shape[-2:]) for x in (*inputs, grad))
    of_q, of_k, of_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    heads, length, _ = q.shape
    step = max(1, _BLOCK * torch.get_num_threads() // (min(length, _QUERIES) * k.shape[1]))
    for first in range(0, length, _QUERIES):
        rows = slice(first, min(first + _QUERIES, length))
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
