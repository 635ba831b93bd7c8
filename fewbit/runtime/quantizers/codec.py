"""Slot codecs: ways to save a tensor that replace the group quantizer.

A *slot* is one tensor that a layer saves in every forward pass. The `BitAssignment` of a forward pass says which slots
have a slot codec. A *spec* is all information except the tensors that is needed to dequantize a saved tensor.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from fewbit.runtime.probes import restoring
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec, map_affine


class SlotCodec(Protocol):
    """The interface of objects that save the tensors of one slot.

    If a checkpointed region is recomputed in the backward pass, its tensors are quantized again. So a slot codec must
    return the same result for the same tensor and seed.
    """

    def quantize(self, x: torch.Tensor, seed: torch.Tensor):
        """Return (tensors for `save_for_backward`, spec).

        The spec has an attribute `count`, the number of tensors, and a method `dequantize(tensors)`, which returns
        approximate values of x in new memory.

        Args:
            x: an ordinary dense floating tensor in eager mode.
            seed: (1,) int64 on x's device, from which all random numbers are made.
        """


class CodecSpec(NamedTuple):
    """The spec of tensors that a slot codec has saved. It has the interface of `QuantizedTensorSpec`.

    Args:
        inner: the spec that the slot codec returned.
        place: the spec that the group quantizer would make. It gives the size, strides, dtype and slot. Its bits have
            no effect.
    """

    inner: object
    place: QuantizedTensorSpec

    @property
    def count(self) -> int:
        """The number of saved tensors."""
        return self.inner.count

    @property
    def size(self) -> tuple[int, ...]:
        """The size of the dequantized values."""
        return self.place.size

    @property
    def stride(self) -> tuple[int, ...]:
        """The strides of the dequantized values."""
        return self.place.stride

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the dequantized values."""
        return self.place.dtype

    @property
    def samples(self) -> int | None:
        """The number of samples if each sample has its own number of bits, else None."""
        return self.place.samples

    @property
    def kind(self) -> str:
        """The kind of copy that the group quantizer would make."""
        return self.place.kind

    @property
    def slot(self):
        """The slot that the tensor was saved for."""
        return self.place.slot

    def with_slot(self, slot) -> CodecSpec:
        """Return this spec with another slot."""
        return self._replace(place=self.place.with_slot(slot))

    def for_consumer(self, name: str) -> CodecSpec:
        """Return this spec for the layer `name`, which dequantizes a tensor that another layer saved."""
        return self._replace(place=self.place.for_consumer(name))

    def dequantize(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        """Return approximate values of the saved tensor. Arguments: see `QuantizedTensorSpec.dequantize`."""
        values = restoring.restored(self.dequantize_exact(tensors), self, tensors)
        return map_affine(values, affine).to(dtype or self.dtype)

    def dequantize_exact(self, tensors) -> torch.Tensor:
        """Return the dequantized values without the noise that a probe, which measures for a policy, may add."""
        return self.inner.dequantize(tensors).to(self.dtype)
