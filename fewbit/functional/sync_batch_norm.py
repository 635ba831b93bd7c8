"""Batch norm with statistics over all processes, with the input kept quantized.

Forward and backward are torch's own, which keeps its input in a context; here the context is a stand-in
whose input is quantized in between.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.modules._functions import SyncBatchNorm as Torch

from fewbit.runtime.quantizers.quantizer import Quantizer, is_differentiated
from fewbit.runtime.saved.single_backward import once_differentiable

__all__ = ["sync_batch_norm"]


def sync_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    momentum: float,
    process_group,
    *,
    quantizer: Quantizer,
) -> Tensor:
    """What torch.nn.SyncBatchNorm computes in training, in a group of two processes or more.

    input: (N, C, *) on a device for which torch has it; the vectors: (C,). Kept: the normalized input quantized, a
    deviation a channel, and a count a process. Bias of the input's gradient: as in `batch_norm`.
    """
    vectors = weight, bias, running_mean, running_var
    if not is_differentiated(input, weight, bias):
        # Processes synchronize all the same.
        size = process_group.size()
        return Torch.apply(input, *vectors, eps, momentum, process_group, size)
    return _SyncBatchNorm.apply(input, *vectors, eps, momentum, process_group, quantizer)


class _Context:
    """What torch's Function takes for its context."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


class _SyncBatchNorm(Function):
    backward_has_collectives = True

    @staticmethod
    def forward(
        ctx, x, weight, bias, running_mean, running_var, eps, momentum, process_group, quantizer
    ):
        context = _Context()
        vectors = weight, bias, running_mean, running_var
        y = Torch.forward(context, x, *vectors, eps, momentum, process_group, process_group.size())
        _, weight, mean, rstd, count = context.saved_tensors
        ctx.process_group = process_group
        kept = ()
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            placed = (each.view(1, -1, *[1] * (x.dim() - 2)) for each in (mean, rstd))
            saved = quantizer.quantize_normalized(x, *placed, None)
            kept, ctx.spec = saved.tensors, saved.spec
        ctx.size, ctx.dtype = tuple(x.shape), x.dtype
        ctx.save_for_backward(weight, rstd, count, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, rstd, count, *kept = ctx.saved_tensors
        context = _Context()
        # For the bias alone only the input's shape matters.
        x = grad.new_zeros(()).expand(ctx.size)
        if kept:
            x = ctx.spec.dequantize(kept).div_(rstd.view(1, -1, *[1] * (grad.dim() - 2)))
            x = _in_torch_format(x.to(ctx.dtype))
        context.saved_tensors = x, weight, torch.zeros_like(rstd), rstd, count
        context.process_group, context.needs_input_grad = ctx.process_group, ctx.needs_input_grad
        return Torch.backward(context, grad)


def _in_torch_format(x):
    """x in the memory formats that torch's own keeps."""
    for channels_last in (torch.channels_last, torch.channels_last_3d):
        dims = 4 if channels_last is torch.channels_last else 5
        if x.dim() == dims and x.is_contiguous(memory_format=channels_last):
            return x
    return x.contiguous()
