"""Small integers saved for the backward pass, in bit-planes or a narrow dtype."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from fewbit.runtime import backends
from fewbit.runtime.format import layout
from fewbit.runtime.interop.tensor_kinds import is_abstract, is_plain
from fewbit.runtime.ops import dense_ops, traced_copies
from fewbit.runtime.quantizers.spec import SavedTensors
from fewbit.runtime.saved import offload

MOST_BITS = 8


def bits_of(count: int) -> int:
    """Return the number of bits that an integer in [0, count) needs."""
    return (count - 1).bit_length()


def dtype_of(count: int) -> torch.dtype:
    """Return the narrowest integer dtype for numbers in [0, count)."""
    if count <= 1 << 8:
        return torch.uint8
    if count <= 1 << 15:
        return torch.int16
    return torch.int32 if count <= 1 << 31 else torch.int64


class PackedIntegersSpec(NamedTuple):
    """The spec of integers that `pack` has saved. They are restored in uint8 if `bits` <= 8, else in a wider dtype."""

    bits: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def dequantize(self, tensors) -> torch.Tensor:
        return self.flat(tensors).as_strided(self.size, self.stride)

    def flat(self, tensors) -> torch.Tensor:
        """Return the integers in the order of elements in memory, (n,)."""
        (values,) = tensors
        if self.bits > MOST_BITS:
            return values
        count = prod(self.size)
        if is_plain(values):
            return backends.on[values.device].unpack(values, self.bits, count)
        return dense_ops.unpack_op(values, self.bits, count)


class CastSpec(NamedTuple):
    """The spec of integers that are restored in another dtype."""

    inner: PackedIntegersSpec
    dtype: torch.dtype
    count = 1

    def dequantize(self, tensors) -> torch.Tensor:
        return self.inner.dequantize(tensors).to(self.dtype)


class NarrowIntegersSpec(NamedTuple):
    """The spec of integers that `narrow` has saved, of which `dtype` was the original dtype."""

    dtype: torch.dtype

    def dequantize(self, tensors) -> torch.Tensor:
        return tensors[0].to(self.dtype)


def pack(values: torch.Tensor, count: int) -> SavedTensors:
    """Save integers or bools in [0, count): with b <= 8 bits each in ``4 * b * ceil(n / 32)`` bytes, else as `narrow`."""
    bits = bits_of(count)
    spec = PackedIntegersSpec(bits, tuple(values.shape), tuple(layout.dense_stride(values)))
    if is_plain(values):
        packed = _pack(layout.dense(values), bits, count)
        offload.mark(packed)
        return SavedTensors((packed,), spec)
    if bits > MOST_BITS:
        packed, one = traced_copies.narrow_kept_op(_flat(values), dtype_of(count))
    else:
        packed, one = traced_copies.pack_kept_op(_flat(values), bits)
    return SavedTensors((packed,), spec, None if is_abstract(values) else one)


def narrow(values: torch.Tensor, count: int) -> SavedTensors:
    """Convert integers in [0, count) to the narrowest dtype that holds them, unless their own is no wider."""
    dtype = dtype_of(count)
    if dtype.itemsize >= values.dtype.itemsize:
        return SavedTensors((values,), NarrowIntegersSpec(values.dtype))
    if is_plain(values):
        narrowed = values.to(dtype)
        offload.mark(narrowed)
        return SavedTensors((narrowed,), NarrowIntegersSpec(values.dtype))
    narrowed, one = traced_copies.narrow_kept_op(values, dtype)
    tie = None if is_abstract(values) else one
    return SavedTensors((narrowed,), NarrowIntegersSpec(values.dtype), tie)


def _pack(values, bits, count):
    flat = layout.storage_order(values)
    if bits > MOST_BITS:
        return flat.to(dtype_of(count), copy=True)  # the values may change later
    return backends.on[values.device].pack(flat.to(torch.uint8), bits)


def _flat(values):
    """Return the elements in the order of a dense tensor's memory, as views that a compiler can trace."""
    order = layout.outermost_first(values.shape, layout.dense_stride(values))
    return values.permute(order).reshape(-1)
