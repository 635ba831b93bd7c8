"""Padding that keeps nothing: torch's own keeps its whole input in two modes, for its shape alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from fewbit.runtime.format import layout
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.quantizers.quantizer import is_differentiated
from fewbit.runtime.saved.single_backward import once_differentiable

__all__ = ["pad"]

_aten = torch.ops.aten
_BACKWARD = {
    ("reflect", 1): _aten.reflection_pad1d_backward,
    ("reflect", 2): _aten.reflection_pad2d_backward,
    ("reflect", 3): _aten.reflection_pad3d_backward,
    ("replicate", 1): _aten.replication_pad1d_backward,
    ("replicate", 2): _aten.replication_pad2d_backward,
    ("replicate", 3): _aten.replication_pad3d_backward,
}


def pad(input: Tensor, pad, mode: str = "constant", value: float | None = None) -> Tensor:
    """torch.nn.functional.pad; nothing is kept but shapes, and the gradient is exact.

    input: any shape that torch takes; pad: amounts from the last dimension on, as in torch.
    """
    if (mode, len(pad) // 2) not in _BACKWARD or not is_differentiated(input):
        return torch_functional.pad(input, pad, mode, value)
    return _Pad.apply(input, tuple(pad), mode)


class _Pad(Function):
    @staticmethod
    def forward(ctx, x, pad, mode):
        ctx.place, ctx.arguments = (x.shape, layout.dense_stride(x)), (pad, mode)
        return torch_functional.pad(x, pad, mode)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        pad, mode = ctx.arguments
        # Only its shape and memory format matter.
        like_input = torch.empty_strided(*ctx.place, dtype=grad.dtype, device=grad.device)
        return _BACKWARD[mode, len(pad) // 2](grad, like_input, pad), None, None
