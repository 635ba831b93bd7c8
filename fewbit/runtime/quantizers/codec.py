"""Codecs that save a slot's tensor instead of the group quantizer, if the forward's bit assignment says so."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from fewbit.runtime.saved import probe as probes


class Keeper(Protocol):
    """Makes tensors of a tensor, and the recipe that makes values of them again.

    It does so alike whenever it is called with the same tensor and seed: checkpoints make what it has kept again.
    """

    def keep(self, x: torch.Tensor, seed: torch.Tensor):
        """(tensors for `save_for_backward`, recipe). x: plain, floating. seed: (1,) int64 on x's device.

        The recipe has count, of the tensors, and restore(tensors), which gives values in memory of their own.
        """


class CodecSpec(NamedTuple):
    """How what a keeper has kept becomes values again, with the interface of `quantizer.QuantizedTensorSpec`.

    inner: the keeper's recipe. place: a `QuantizedTensorSpec`, with all but the bits.
    """

    inner: object
    place: object

    @property
    def count(self) -> int:
        """How many tensors are kept."""
        return self.inner.count

    @property
    def size(self) -> tuple[int, ...]:
        return self.place.size

    @property
    def stride(self) -> tuple[int, ...]:
        return self.place.stride

    @property
    def dtype(self) -> torch.dtype:
        return self.place.dtype

    @property
    def samples(self) -> int | None:
        return self.place.samples

    @property
    def slot(self):
        return self.place.slot

    def with_slot(self, slot) -> CodecSpec:
        """Return the spec of a tensor of that slot."""
        return self._replace(place=self.place.with_slot(slot))

    def used_by(self, name: str) -> CodecSpec:
        """For another layer, of that name."""
        return self._replace(place=self.place.used_by(name))

    def restore(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        """The values, in the dtype that is asked for, its own unless given; affine: as for `QuantizedTensorSpec.restore`."""
        values = probes.restored(self.exactly(tensors), self, tensors[0])
        scale, shift, _ = affine or (None, None, None)
        if scale is not None:
            values.mul_(scale)
        if shift is not None:
            values.add_(shift)
        return values.to(dtype or self.dtype)

    def exactly(self, tensors) -> torch.Tensor:
        """What was kept, whatever a probe tries."""
        return self.inner.restore(tensors).to(self.dtype)
