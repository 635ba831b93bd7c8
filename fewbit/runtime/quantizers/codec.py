"""Slot codecs: other ways to save a tensor than the group quantizer.

A *slot* is one tensor that a layer saves in every forward pass. The bit assignment of a forward pass names the slots
that a codec saves. A *spec* is everything but the tensors that is needed to dequantize a saved tensor.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from fewbit.runtime.probes import restoring
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec, map_affine


class SlotCodec(Protocol):
    """Saves the tensors of one slot.

    A checkpoint recomputes saved tensors, so a slot codec has to return the same result whenever tensor and seed are
    the same.
    """

    def quantize(self, x: torch.Tensor, seed: torch.Tensor):
        """Return (tensors for `save_for_backward`, spec).

        The spec has an attribute `count`, the number of tensors. It has a method `dequantize(tensors)`, whose result
        shares no memory with the tensors.

        Args:
            x: an ordinary dense floating tensor in eager mode.
            seed: (1,) int64 on x's device.
        """


class CodecSpec(NamedTuple):
    """The spec of tensors that a slot codec has saved, with the interface of `QuantizedTensorSpec`.

    Args:
        inner: the slot codec's own spec.
        place: a spec of the same tensor that describes size, strides, dtype and slot. Its bits are not used.
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
        """Return the values of the saved tensor, see `QuantizedTensorSpec.dequantize`."""
        values = restoring.restored(self.dequantize_exact(tensors), self, tensors[0])
        return map_affine(values, affine).to(dtype or self.dtype)

    def dequantize_exact(self, tensors) -> torch.Tensor:
        """Return the values without the noise that a probe may add."""
        return self.inner.dequantize(tensors).to(self.dtype)
