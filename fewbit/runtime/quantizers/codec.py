"""Slot codecs: ways to save a tensor that replace the group quantizer."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from fewbit.runtime.probes import restoring
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec, map_affine


class SlotCodec(Protocol):
    """The interface of objects that save the tensors of one slot.

    The same tensor and seed must give the same result, because a region is quantized again when it is recomputed.
    """

    def quantize(self, x: torch.Tensor, seed: torch.Tensor):
        """Return (tensors for `save_for_backward`, spec with `count` and `dequantize(tensors)`).

        x is an ordinary dense tensor in eager mode, and `seed`, (1,) int64 on x's device, the source of all random
        numbers.
        """


class CodecSpec(NamedTuple):
    """The spec `inner` of a slot codec, with the interface of `QuantizedTensorSpec` and the properties of the group quantizer's `place`."""

    inner: object
    place: QuantizedTensorSpec

    @property
    def count(self) -> int:
        """The number of saved tensors."""
        return self.inner.count

    @property
    def size(self) -> tuple[int, ...]:
        """The value of `place`."""
        return self.place.size

    @property
    def stride(self) -> tuple[int, ...]:
        """The value of `place`."""
        return self.place.stride

    @property
    def dtype(self) -> torch.dtype:
        """The value of `place`."""
        return self.place.dtype

    @property
    def samples(self) -> int | None:
        """The value of `place`."""
        return self.place.samples

    @property
    def kind(self) -> str:
        """The value of `place`."""
        return self.place.kind

    @property
    def slot(self):
        """The value of `place`."""
        return self.place.slot

    def with_slot(self, slot) -> CodecSpec:
        """Return this spec with another slot."""
        return self._replace(place=self.place.with_slot(slot))

    def for_consumer(self, name: str) -> CodecSpec:
        """See `QuantizedTensorSpec.for_consumer`."""
        return self._replace(place=self.place.for_consumer(name))

    def dequantize(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        """See `QuantizedTensorSpec.dequantize`."""
        values = restoring.restored(self.dequantize_exact(tensors), self, tensors)
        return map_affine(values, affine).to(dtype or self.dtype)

    def dequantize_exact(self, tensors) -> torch.Tensor:
        """See `QuantizedTensorSpec.dequantize_exact`."""
        return self.inner.dequantize(tensors).to(self.dtype)
