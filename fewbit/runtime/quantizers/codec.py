"""Slot codecs, which save the tensors of a slot in place of the group quantizer, if the bit assignment says so."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from fewbit.runtime.probes import restoring
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec, map_affine


class SlotCodec(Protocol):
    """Saves the tensors of one slot.

    The same tensor and seed give the same result in every call, since checkpoints recompute saved tensors.
    """

    def quantize(self, x: torch.Tensor, seed: torch.Tensor):
        """Return (tensors for `save_for_backward`, spec).

        The spec has `count`, the number of tensors, and dequantize(tensors), which returns values in memory of their own.

        Args:
            x: a plain floating tensor.
            seed: (1,) int64 on x's device.
        """


class CodecSpec(NamedTuple):
    """The spec of tensors that a slot codec has saved, with the interface of `QuantizedTensorSpec`.

    Args:
        inner: the slot codec's own spec.
        place: a spec with everything but the bits.
    """

    inner: object
    place: QuantizedTensorSpec

    @property
    def count(self) -> int:
        """The number of saved tensors."""
        return self.inner.count

    @property
    def size(self) -> tuple[int, ...]:
        """The size of the values."""
        return self.place.size

    @property
    def stride(self) -> tuple[int, ...]:
        """The strides of the values."""
        return self.place.stride

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.place.dtype

    @property
    def samples(self) -> int | None:
        """The number of samples with bits of their own, or None."""
        return self.place.samples

    @property
    def slot(self):
        """The slot that the tensor was saved for."""
        return self.place.slot

    def with_slot(self, slot) -> CodecSpec:
        """Return this spec for another slot."""
        return self._replace(place=self.place.with_slot(slot))

    def for_consumer(self, name: str) -> CodecSpec:
        """Return this spec for the layer `name`, see `QuantizedTensorSpec.for_consumer`."""
        return self._replace(place=self.place.for_consumer(name))

    def dequantize(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        """Return the values, see `QuantizedTensorSpec.dequantize`."""
        values = restoring.restored(self.dequantize_exact(tensors), self, tensors[0])
        return map_affine(values, affine).to(dtype or self.dtype)

    def dequantize_exact(self, tensors) -> torch.Tensor:
        """Return the values without the noise that a probe may add."""
        return self.inner.dequantize(tensors).to(self.dtype)
