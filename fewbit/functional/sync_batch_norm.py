"""Batch norm with statistics over all processes, with the input kept quantised.

Forward and backward are torch's own, which keeps its input in a context; here the context is a stand-in
whose input is quantised in between.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules._functions import SyncBatchNorm as Torch

from fewbit.runtime.quantiser import Quantiser

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
    quantiser: Quantiser,
) -> Tensor:
    """What torch.nn.SyncBatchNorm computes in training, in a group of two processes or more.

    input: (N, C, *) on a device for which torch has it; the vectors: (C,). Kept: the input quantised, and for each channel a
    mean, a deviation and a count a process. Bias of the input's gradient: as in `batch_norm`.
    """
    vectors = weight, bias, running_mean, running_var
    return _SyncBatchNorm.apply(input, *vectors, eps, momentum, process_group, quantiser)


class _Context:
    """What torch's Function takes for its context."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


class _SyncBatchNorm(Function):
    @staticmethod
    def forward(
        ctx, x, weight, bias, running_mean, running_var, eps, momentum, process_group, quantiser
    ):
        context = _Context()
        vectors = weight, bias, running_mean, running_var
        y = Torch.forward(context, x, *vectors, eps, momentum, process_group, process_group.size())
        _, weight, *statistics = context.saved_tensors
        ctx.process_group, ctx.count = process_group, len(statistics)
        kept = ()
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            keep = quantiser.keep(x)
            kept, ctx.recipe = keep.tensors, keep.recipe
        ctx.size = tuple(x.shape)
        ctx.save_for_backward(weight, *statistics, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, *others = ctx.saved_tensors
        statistics, kept = others[: ctx.count], others[ctx.count :]
        context = _Context()
        # For the bias alone only the input's shape matters.
        x = ctx.recipe.restore(kept) if kept else grad.new_zeros(()).expand(ctx.size)
        context.saved_tensors = _in_torch_format(x) if kept else x, weight, *statistics
        context.process_group, context.needs_input_grad = ctx.process_group, ctx.needs_input_grad
        return Torch.backward(context, grad)


def _in_torch_format(x):
    """x in the memory formats that torch's own keeps."""
    for channels_last in (torch.channels_last, torch.channels_last_3d):
        dims = 4 if channels_last is torch.channels_last else 5
        if x.dim() == dims and x.is_contiguous(memory_format=channels_last):
            return x
    return x.contiguous()
