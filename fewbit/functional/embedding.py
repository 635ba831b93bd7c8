"""Embedding, whose indices are saved in the narrowest integer dtype that can represent them."""

from __future__ import annotations

import torch
from torch import Tensor

from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.quantizers import copies, integers
from fewbit.runtime.saved.saving_function import SavingFunction, is_differentiated

__all__ = ["embedding"]


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Compute torch.nn.functional.embedding and save the indices in the narrowest integer dtype.

    The gradient equals torch's to the bit. For a weight of V rows, n indices take n bytes if V is at most 256, 2 n
    bytes if V is at most 32768, and else 4 n bytes, but never more than the input. Other arguments are those of torch's
    function.

    Args:
        input: int64 or int32, any shape.
        weight: (V, D).
    """
    if not is_differentiated(weight) or weight.dim() != 2:
        return torch_functional.embedding(
            input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
    if max_norm is not None:
        input = input.contiguous()
        with torch.no_grad():
            torch.embedding_renorm_(weight, input, max_norm, norm_type)
    return _Embedding.apply(input, weight, padding_idx, scale_grad_by_freq, sparse)


class _Embedding(SavingFunction):
    @staticmethod
    def forward(ctx, indices, weight, padding_idx, scale_grad_by_freq, sparse):
        y = torch_functional.embedding(
            indices, weight, padding_idx, None, 2.0, scale_grad_by_freq, sparse
        )
        rows = weight.shape[0]
        saved = integers.narrow(indices, rows)
        if padding_idx is None:
            padding_idx = -1
        elif padding_idx < 0:
            padding_idx += rows
        ctx.arguments = rows, padding_idx, scale_grad_by_freq, sparse
        return copies.keep(ctx, y, indices=saved)

    @staticmethod
    def backward(ctx, grad):
        indices = copies.Kept(ctx).values("indices")
        grad = torch.ops.aten.embedding_backward(grad, indices, *ctx.arguments)
        return None, grad, None, None, None
