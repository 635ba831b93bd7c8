"""Norms of gradients: computed on the gradients' devices, and read as numbers after a copy to the host."""

from __future__ import annotations

import torch

from fewbit.runtime.interop.tensor_kinds import is_plain


def by_edge(context, results) -> list:
    """Return a Function's gradients for the inputs that need one."""
    results = results if isinstance(results, tuple) else (results,)
    needed = context.needs_input_grad
    return [grad for grad, is_needed in zip(results, needed, strict=True) if is_needed]


def is_dense(x) -> bool:
    """Return whether x is an ordinary dense tensor, or becomes one by `resolve_neg`."""
    return is_plain(x) or (type(x) is torch.Tensor and x.is_neg() and is_plain(x.resolve_neg()))


def norm(tensors) -> torch.Tensor | None:
    """Return the norm of all entries of the tensors together, 0-D float32 on the first one's device; None if there is none.

    Sparse tensors and None are skipped.
    """
    norms = [
        torch.linalg.vector_norm(
            tensor.detach(), dtype=torch.promote_types(tensor.dtype, torch.float32)
        ).float()
        for tensor in tensors
        if tensor is not None and not tensor.is_sparse
    ]
    if len(norms) < 2:
        return norms[0] if norms else None
    return torch.linalg.vector_norm(torch.stack([part.to(norms[0].device) for part in norms]))


def squared(host: dict[int, list[float]], norm: torch.Tensor | None) -> float:
    """Return the square of a norm on the host; 0 for None."""
    if norm is None:
        return 0.0
    (value,) = host[id(norm)]
    return value * value
