"""Copies in code that a compiler traces. They become ops on contiguous tensors (`dense_ops.py`), which need no Python.

    quantize(x, stride, seed, bits, group_size, kind, channels) -> packed, ranges, numbers of channels, one (trace anchor)

The strides of x when it is traced define the order of its elements, with samples outermost.
"""

from __future__ import annotations

import torch

from fewbit.config import KIND_NUMBERS
from fewbit.runtime.format import groups, layout
from fewbit.runtime.interop.tensor_kinds import check_not_distributed
from fewbit.runtime.ops import dense_ops
from fewbit.runtime.ops.library import define, saved_when_partitioned


def _quantize(x, stride, seed, bits, group_size, kind, channels=0):
    check_not_distributed(x, seed)
    with torch._C._AutoDispatchBelowAutograd():
        x = x.detach().permute(_order(x.shape, stride))
        statistics = x.new_empty((0, 2), dtype=torch.bfloat16)
        with saved_when_partitioned():
            if channels:
                how = bits, group_size, channels
                packed, ranges, statistics = dense_ops.quantize_by_channels_op(x, seed, *how)
            else:
                how = bits, group_size, KIND_NUMBERS[kind]
                packed, ranges = dense_ops.quantize_dense_op(x, seed, *how)
            anchor = dense_ops.anchor_op(packed)
    return packed, ranges, statistics, anchor


quantize_op = define(
    "quantize(Tensor x, SymInt[] stride, Tensor seed, int bits, int group_size, str kind, SymInt channels=0) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _quantize,
    "CompositeImplicitAutograd",
)


def dequantize(
    packed, ranges, bits, group_size, size, stride, dtype, kind, statistics=None
) -> torch.Tensor:
    """Return the values of a copy that `quantize_op` has made; `statistics` are the numbers of channels, or None."""
    settings = bits, group_size, *groups.samples_of(size), dtype
    if statistics is None:
        settings = *settings, KIND_NUMBERS[kind]
        values = dense_ops.dequantize_dense_op(packed, ranges, *settings)
    else:
        values = dense_ops.dequantize_by_channels_op(packed, ranges, *settings, statistics)
    order = _order(size, stride)
    values = values.view([size[dim] for dim in order])
    return values.permute([order.index(dim) for dim in range(len(order))])


def _order(shape, stride) -> list[int]:
    """Return the dimensions in storage order, the first one outermost."""
    if tuple(stride) == layout.contiguous_stride(shape):
        return list(range(len(shape)))
    return [0, *(dim for dim in layout.outermost_first(shape, stride) if dim)]
