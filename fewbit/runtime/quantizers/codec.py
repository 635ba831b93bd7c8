"""Slot codecs: ways to save a tensor that replace the group quantizer."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple, Protocol

import torch

from fewbit.runtime.format.channels import map_affine
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec


class SlotCodec(Protocol):
    """The interface of objects that save the tensors of one slot.

    The same tensor and seed must give the same result, because checkpointing quantizes a tensor twice.
    """

    def quantize(self, x: torch.Tensor, seed: torch.Tensor):
        """Return (tensors for `save_for_backward`, spec with `count` and `dequantize(tensors)`).

        x is a plain tensor. `seed`, (1,) int64 on x's device, is the source of all random numbers.
        """


class CodecSpec(NamedTuple):
    """The spec `inner` of a slot codec, with the properties of `place`, the group quantizer's spec of the same tensor."""

    inner: object
    place: QuantizedTensorSpec

    count = property(attrgetter("inner.count"))
    size = property(attrgetter("place.size"))
    stride = property(attrgetter("place.stride"))
    dtype = property(attrgetter("place.dtype"))
    samples = property(attrgetter("place.samples"))
    kind = property(attrgetter("place.kind"))
    slot = property(attrgetter("place.slot"))

    def with_slot(self, slot) -> CodecSpec:
        return self._replace(place=self.place.with_slot(slot))

    def dequantize(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        values = self.inner.dequantize(tensors).to(self.dtype)
        return map_affine(values, affine).to(dtype or self.dtype)
