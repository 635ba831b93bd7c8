"""`quant+zvc`: `quant`, of which only codes of what is not zero are kept (AC-GC, section 5: AutoQuantZ)."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from fewbit.runtime import backends
from fewbit.runtime.codecs.payload import Payload, checked, mapped, restored
from fewbit.runtime.codecs.quant import Piece, joined, pieces
from fewbit.runtime.format import layout
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.ops import quantizer_ops
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec
from fewbit.runtime.saved import offload


class ZeroValue:
    """A bit an element that says whether it is zero, and the codes of those that are not. Unbiased.

    Lossless: `quant`'s values with the same seed, but that zeros are zero exactly; its guarantee. Where that
    is not smaller it is `quant`. How much is kept depends on the data: it synchronizes twice.
    """

    name = "quant+zvc"

    def compress(self, tensor, bound, seed=None) -> Payload:
        """As `Codec.compress`."""
        limits = checked(tensor, bound, seed)
        x = tensor.detach()
        return joined(x, [_without_zeros(piece) for piece in pieces(x, limits, seed)])

    def decompress(self, payload: Payload) -> torch.Tensor:
        return restored(payload)


class Sparse(NamedTuple):
    """How codes of non-zero values become values: `inner` is that of `quant`, nonzero says how many there are."""

    inner: QuantizedTensorSpec
    nonzero: int
    codec = ZeroValue.name
    count = 3

    @property
    def size(self) -> tuple[int, ...]:
        return self.inner.size

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    def dequantize(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        """The values in the size and strides of what was kept; affine: as for `QuantizedTensorSpec.dequantize`."""
        mask, packed, ranges = tensors
        backend, inner, n = backends.of(packed), self.inner, prod(self.inner.size)
        is_kept = backend.unpack(mask, 1, n).bool()
        codes = torch.zeros(n, dtype=torch.uint8, device=packed.device)
        codes[is_kept] = backend.unpack(packed, inner.bits, self.nonzero)
        place = inner.bits, inner.group_size, inner.size, inner.stride
        given = inner.dtype if dtype is None or affine is not None else dtype
        values = quantizer_ops.dequantize(backend.pack(codes, inner.bits), ranges, *place, given)
        # All are finite. (masked_fill_ takes thirty times as long; adding 0 makes -0 +0.)
        layout.storage_order(values).mul_(is_kept).add_(0)
        return mapped(values, dtype or inner.dtype, affine)


def _without_zeros(piece: Piece) -> Piece:
    tensors, spec = piece.payload
    if not isinstance(spec, QuantizedTensorSpec):
        return piece
    packed, ranges = tensors
    x, backend = piece.x, backends.of(packed)
    source = layout.storage_order(x if layout.is_by_sample(x) else x.contiguous())
    place = spec.bits, spec.group_size, spec.size, spec.stride
    values = quantizer_ops.dequantize(packed, ranges, *place, torch.float32)
    is_kept = (source != 0) & (layout.storage_order(values) != 0)
    nonzero = int(is_kept.sum())
    words = packed_words(len(source), 1) + packed_words(nonzero, spec.bits)
    if words >= len(packed):
        return piece
    codes = backend.unpack(packed, spec.bits, len(source))[is_kept]
    mask = backend.pack(is_kept.to(torch.uint8), 1)
    kept = mask, backend.pack(codes, spec.bits), ranges
    offload.mark(*kept)
    return piece._replace(payload=Payload(kept, Sparse(spec, nonzero)))
