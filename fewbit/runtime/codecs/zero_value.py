"""The codec `quant+zvc`: the codec `quant` without the codes of zeros (docs/concepts/codecs.md)."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from fewbit.runtime import backends
from fewbit.runtime.codecs.payload import Codec, Payload
from fewbit.runtime.codecs.quant import quantized
from fewbit.runtime.format import layout
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.ops import quantizer_ops
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec
from fewbit.runtime.saved import offload


class ZeroValue(Codec):
    """A codec that saves a mask, with one bit for each element, and codes only for elements that are not zero.

    Values are those of `quant` with the same seed, except that zeros are exactly zero. The payload is that of `quant`
    if this is no larger.
    """

    name = "quant+zvc"

    def _compress(self, x, limits, seed) -> Payload:
        return quantized(x, limits, seed, _without_zeros)


class Sparse(NamedTuple):
    """The spec of a tensor saved as a packed mask of nonzero elements, their packed codes, and the ranges of the groups.

    Values have the size and strides of the compressed tensor.
    """

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

    def dequantize(self, tensors) -> torch.Tensor:
        mask, packed, ranges = tensors
        backend, inner, n = backends.on[packed.device], self.inner, prod(self.inner.size)
        is_saved = backend.unpack(mask, 1, n).bool()
        codes = torch.zeros(n, dtype=torch.uint8, device=packed.device)
        codes[is_saved] = backend.unpack(packed, inner.bits, self.nonzero)
        place = inner.bits, inner.group_size, inner.size, inner.stride
        packed = backend.pack(codes, inner.bits)
        values = quantizer_ops.dequantize(packed, ranges, *place, inner.dtype)
        # All values are finite, so a product with 0 is 0; masked_fill_ takes thirty times as long. Adding 0 turns -0
        # into +0.
        layout.storage_order(values).mul_(is_saved).add_(0)
        return values


def _without_zeros(x, payload: Payload) -> Payload:
    tensors, spec = payload
    if not isinstance(spec, QuantizedTensorSpec):
        return payload
    packed, ranges = tensors
    backend = backends.on[packed.device]
    source = layout.storage_order(x if layout.is_by_sample(x) else x.contiguous())
    place = spec.bits, spec.group_size, spec.size, spec.stride
    values = quantizer_ops.dequantize(packed, ranges, *place, torch.float32)
    is_saved = (source != 0) & (layout.storage_order(values) != 0)
    nonzero = int(is_saved.sum())
    words = packed_words(len(source), 1) + packed_words(nonzero, spec.bits)
    if words >= len(packed):
        return payload
    codes = backend.unpack(packed, spec.bits, len(source))[is_saved]
    mask = backend.pack(is_saved.to(torch.uint8), 1)
    saved = mask, backend.pack(codes, spec.bits), ranges
    offload.mark(*saved)
    return Payload(saved, Sparse(spec, nonzero))
