"""The tensors that a layer saves, and the specs that turn them into values again in the backward pass."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from fewbit.runtime.backends.reference_quantizer import in_dtype
from fewbit.runtime.format import groups, layout
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.ops import quantizer_ops
from fewbit.runtime.saved import restoring
from fewbit.runtime.saved.assignment import TensorSlot


class QuantizedTensorSpec(NamedTuple):
    """How kept tensors become values again: everything but the tensors."""

    bits: int
    group_size: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    samples: int | None = None  # where each has bits of its own
    variable: TensorSlot | None = None  # that this was kept for, where bits are not fixed

    @property
    def count(self) -> int:
        """How many tensors are kept: codes, ranges and, where samples have bits of their own, those."""
        return 2 if self.samples is None else 3

    def restore(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        """The values in the size and strides of what was kept; dtype: its own unless given.

        affine: (scale, shift, inner), either of which may be None, for values * scale + shift before they are
        rounded to dtype: of shapes that broadcast to the values; inner: as for `Quantizer.keep_normalized`.
        """
        *vectors, inner = affine or (None, None)
        if all(each is None for each in vectors):
            return self._restore(tensors, dtype or self.dtype)
        plain = all(each is None or is_plain(each) for each in (*tensors, *vectors))
        fits = plain and inner is not None and self.dtype == torch.float32 and self._maps()
        if fits and not restoring.is_changed(self):
            return self._restore(tensors, dtype or self.dtype, (*map(flat, vectors), inner))
        scale, shift = vectors
        values = self.restore(tensors)
        if scale is not None:
            values.mul_(scale)
        if shift is not None:
            values.add_(shift)
        return in_dtype(values, dtype or self.dtype)

    def of(self, variable: TensorSlot) -> QuantizedTensorSpec:
        """For that variable."""
        return self._replace(variable=variable)

    def used_by(self, name: str) -> QuantizedTensorSpec:
        """For another layer, of that name."""
        variable = self.variable
        if variable is None or variable.rounding is None or variable.name[0] == name:
            return self
        return self._replace(variable=variable._replace(user=name))

    def exactly(self, tensors) -> torch.Tensor:
        """What was kept, whatever an observation tries."""
        return self._values(tensors, self.dtype, None)

    def _restore(self, tensors, dtype, affine=None):
        values = self._values(tensors, dtype, affine)
        return restoring.restored(values, self, tensors[0])

    def _values(self, tensors, dtype, affine):
        packed, ranges, *widths = tensors
        place = self.bits, self.group_size, self.size, self.stride
        if not is_plain(packed):
            return quantizer_ops.dequantize_op(packed, ranges, *place, dtype)
        if not widths:
            return quantizer_ops.dequantize(packed, ranges, *place, dtype, affine=affine)
        return quantizer_ops.dequantize_samples(
            packed, ranges, *widths, self.samples, *place[1:], dtype, affine
        )

    def _maps(self) -> bool:
        """Whether the kernels map what they restore."""
        return self.samples is None or prod(self.size) >= self.samples * groups.LEAST_FEATURES


class Permuted(NamedTuple):
    """How a tensor with its dimensions in another order is restored."""

    inner: QuantizedTensorSpec
    order: tuple[int, ...]

    def restore(self, tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values of `inner` with dimension order[i] as dimension i."""
        return self.inner.restore(tensors, dtype).permute(self.order)


class SavedTensors(NamedTuple):
    """Tensors for `save_for_backward`, and how to restore from them.

    one: where a compiler traces, a 1 that the layer's result is to be multiplied with (docs/decisions/0004).
    """

    tensors: tuple[torch.Tensor, ...]
    recipe: QuantizedTensorSpec
    one: torch.Tensor | None = None

    def mark(self, y: torch.Tensor) -> torch.Tensor:
        """y, as a compiler must see it so that what is kept is made in the forward pass."""
        return y if self.one is None else y * self.one.to(y.dtype)


class Rounded(NamedTuple):
    """A tensor x, what is kept of it or of what `normalize` makes of it, and how: for observations."""

    x: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    recipe: QuantizedTensorSpec
    group_size: int
    wide: bool | None
    normalize: tuple | None

    def variance(self, bits: int, generator) -> torch.Tensor:
        """As `quantizer_ops.rounding_variance`."""
        settings = self.group_size, self.wide, self.normalize
        return quantizer_ops.rounding_variance(
            self.x, self.recipe.samples, *settings, bits, generator
        )

    def squares(self) -> torch.Tensor:
        """0-D float32: the sum over groups of length times range squared."""
        x = self.x if layout.is_by_sample(self.x) else self.x.contiguous()
        if x.numel() < groups.LEAST_FEATURES * len(x):
            x = layout.storage_order(x).view(1, -1)  # as groups run across samples so short
        return quantizer_ops.squares(x, self.group_size, self.normalize).sum()

    def exact(self) -> torch.Tensor:
        """What is kept, without errors; of the size, strides and dtype in which it is restored."""
        recipe = self.recipe
        x = torch.empty_strided(
            recipe.size, recipe.stride, dtype=recipe.dtype, device=self.x.device
        )
        x.copy_(self.x)
        if self.normalize is not None:
            mean, rstd, inner = self.normalize
            rows = layout.storage_order(x).view(-1, len(rstd), inner)
            if mean is not None:
                rows.sub_(mean[:, None])
            rows.mul_(rstd[:, None])
        return x

    def errors(self, exact: torch.Tensor | None = None) -> torch.Tensor:
        """What backward would restore, minus what should be. exact: that of `exact`, if it is there."""
        if exact is None:
            exact = self.x if self.normalize is None else self.exact()
        return self.recipe.exactly(self.tensors).sub_(exact)


def flat(vector):
    """Its entries as the kernels take them."""
    return None if vector is None else vector.detach().reshape(-1).to(torch.float32).contiguous()
