"""What keeps a variable in place of the group quantiser, where the plan of a forward says so."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from fewbit.runtime import layout, observation
from fewbit.runtime.variables import Variable


class Keeper(Protocol):
    """Makes tensors of a tensor, and the recipe that makes values of them again.

    It does so alike whenever it is called with the same tensor and seed: checkpoints make what it has kept again.
    """

    def keep(self, x: torch.Tensor, seed: torch.Tensor):
        """(tensors for `save_for_backward`, recipe). x: plain, floating. seed: (1,) int64 on x's device.

        The recipe has count, of the tensors, and restore(tensors), which gives values in memory of their own.
        """


class KeptBy(NamedTuple):
    """How what a keeper has kept becomes values again, with the interface of `Recipe`."""

    inner: object
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    samples: int | None
    variable: Variable

    @property
    def count(self) -> int:
        """How many tensors are kept."""
        return self.inner.count

    def restore(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        """The values, in the dtype that was asked for when they were kept unless given; affine: as for `Recipe`."""
        values = self.inner.restore(tensors).to(self.dtype)
        values = observation.restored(values, self, tensors[0])
        scale, shift, _ = affine or (None, None, None)
        if scale is not None:
            values.mul_(scale)
        if shift is not None:
            values.add_(shift)
        return values.to(dtype or self.dtype)


def keep_by(keeper: Keeper, x, seed, dtype, normalise, samples, variable):
    """(tensors, recipe) of x, or of what `normalise` makes of it (as for `quantiser_ops.quantise`).

    dtype: to be restored in. What is normalised is kept in x's own dtype, as fine as what it was made from.
    """
    values = x.detach()
    if normalise is not None:
        values = normalised(values, *normalise).to(x.dtype)
    tensors, inner = keeper.keep(values, seed)
    place = tuple(x.shape), tuple(layout.by_sample_stride(x)), dtype
    return tuple(tensors), KeptBy(inner, *place, samples, variable)


def normalised(x, mean, rstd, inner: int) -> torch.Tensor:
    """(x - mean) rstd in float32 and x's strides; x: `layout.is_by_sample`; the rest as for `quantise`."""
    values = torch.empty_strided(x.shape, x.stride(), dtype=torch.float32, device=x.device)
    rows = layout.storage_order(values.copy_(x)).view(-1, len(rstd), inner)
    if mean is not None:
        rows -= mean[:, None]
    rows *= rstd[:, None]
    return values
