"""The ops with which layers save tensors in code that a compiler traces. They become ops that need no Python, whose results it saves.

    quantize(x, seed, bits, group_size, kind, channels) -> packed, ranges, numbers of channels, anchor
    encode_kept(x, encoding, stride, seed) -> packed codes, anchor
    pack_kept(values, bits) -> packed, anchor
    narrow_kept(values, dtype) -> values in the dtype, anchor
    restore(packed, ranges, bits, group_size, samples, features, dtype, kind, widths, statistics, mask) -> the values

Where strides matter, they are those of the trace: at run time, a compiler may pass a tensor with others. A layer multiplies its
result by the *anchor*, the number 1, so that the result depends on what is saved (docs/decisions/0004). `restore` dequantizes copies
that only eager mode makes, if a compiler or a transform traces the backward pass alone.
"""

from __future__ import annotations

import math

import torch

from fewbit.config import KIND_NUMBERS
from fewbit.runtime.format import groups, layout
from fewbit.runtime.interop.tensor_kinds import check_not_distributed
from fewbit.runtime.ops import activation_ops, dense_ops, quantizer_ops
from fewbit.runtime.ops.library import define, run_by_example, saved_when_partitioned


def _define(schema, implementation):
    """Define an op that returns what `implementation` returns, a tuple, and an anchor."""

    def call(*arguments):
        check_not_distributed(*arguments)
        with torch._C._AutoDispatchBelowAutograd(), saved_when_partitioned():
            kept = implementation(*arguments)
            return *kept, dense_ops.anchor_op(kept[0])

    return define(schema, call, key="CompositeImplicitAutograd")


def _quantize(x, seed, bits, group_size, kind, channels=0):
    if channels:
        return dense_ops.quantize_by_channels_op(x, seed, bits, group_size, channels)
    packed, ranges = dense_ops.quantize_dense_op(x, seed, bits, group_size, KIND_NUMBERS[kind])
    return packed, ranges, ranges.new_empty((0, 2))


def _pack(values, bits):
    return (dense_ops.pack_op(values.to(torch.uint8), bits),)


def _narrow(values, dtype):
    # An op may not return its input.
    return (values.to(dtype, memory_format=torch.contiguous_format, copy=True),)


def _restore(
    packed, ranges, bits, group_size, samples, features, dtype, kind, widths, statistics, mask
):
    place = (samples, features), (max(features, 1), 1), dtype
    bits = bits if widths is None else 0
    packed, ranges = packed.contiguous(), ranges.contiguous()
    widths, statistics, mask = (
        None if x is None else x.contiguous() for x in (widths, statistics, mask)
    )
    how = widths, None, kind, mask, statistics
    return quantizer_ops.dequantize(packed, ranges, bits, group_size, *place, *how)


quantize_op = _define(
    "quantize(Tensor x, Tensor seed, int bits, int group_size, str kind, SymInt channels=0) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _quantize,
)
encode_kept_op = _define(
    "encode_kept(Tensor x, str encoding, SymInt[] stride, Tensor? seed=None) -> (Tensor, Tensor)",
    lambda *arguments: (activation_ops.encode_op(*arguments),),
)
pack_kept_op = _define("pack_kept(Tensor values, int bits) -> (Tensor, Tensor)", _pack)
narrow_kept_op = _define(
    "narrow_kept(Tensor values, ScalarType dtype) -> (Tensor, Tensor)", _narrow
)
run_by_example(encode_kept_op)
restore_op = define(
    "restore(Tensor packed, Tensor ranges, int bits, int group_size, SymInt samples, SymInt features, "
    "ScalarType dtype, str kind, Tensor? widths, Tensor? statistics, Tensor? mask) -> Tensor",
    _restore,
    dense_ops.fake_values,
)


def quantize(x, stride, seed, bits, group_size, kind, channels=0):
    """Return the results of `quantize_op` for x in storage order, which `stride` defines, with samples outermost."""
    x = x.detach().permute(_by_sample_order(x.shape, stride))
    return quantize_op(x, seed, bits, group_size, kind, channels)


def tie(y: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Return y, which depends on what is saved."""
    return y * anchor.to(y.dtype)


def dequantize(
    packed,
    ranges,
    bits,
    group_size,
    size,
    stride,
    dtype,
    kind,
    widths=None,
    statistics=None,
    mask=None,
) -> torch.Tensor:
    """Return the values of a copy whose dimension 0 is outermost in storage.

    `widths` are the bits of samples, and `statistics` the numbers of channels; each is None if the copy has none.
    """
    rows = groups.samples_of(size)
    if widths is not None:
        rows = len(widths), math.prod(size) // len(widths)
    settings = bits, group_size, *rows, dtype
    if not (widths is None and mask is None):
        values = restore_op(packed, ranges, *settings, kind, widths, statistics, mask)
    elif statistics is None:
        settings = *settings, KIND_NUMBERS[kind]
        values = dense_ops.dequantize_dense_op(packed, ranges, *settings)
    else:
        values = dense_ops.dequantize_by_channels_op(packed, ranges, *settings, statistics)
    order = _by_sample_order(size, stride)
    values = values.view([size[dim] for dim in order])
    return values.permute([order.index(dim) for dim in range(len(order))])


def _by_sample_order(shape, stride) -> list[int]:
    if tuple(stride) == layout.contiguous_stride(shape):
        return list(range(len(shape)))
    return [0, *(dim for dim in layout.outermost_first(shape, stride) if dim)]
