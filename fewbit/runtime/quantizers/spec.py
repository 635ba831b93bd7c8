"""The tensors that a layer saves, and *specs*: all that is needed besides to compute approximate values in the backward pass.

The group quantizer saves codes of a few bits, and `ranges`, two numbers for each group (docs/concepts/quantizer.md).
The specs in this file have `count`, the number of saved tensors, and the method `dequantize`, as `QuantizedTensorSpec`
describes them. It depends on nothing but the spec and the tensors. Specs that contain others have `mapped`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from fewbit.config import MASKED, UNIFORM
from fewbit.runtime import backends
from fewbit.runtime.backends.reference_quantizer import in_dtype
from fewbit.runtime.format import groups, layout
from fewbit.runtime.format.channels import Normalization, map_affine
from fewbit.runtime.format.distortion import distortion
from fewbit.runtime.interop.tensor_kinds import (
    PLAIN_CLASSES,
    PRE_DISPATCH,
    is_included,
    is_plain,
    modes_active,
    transforms_active,
)
from fewbit.runtime.ops import quantizer_ops, traced_copies
from fewbit.runtime.parallel.process_groups import is_distributed_run
from fewbit.runtime.probes.restoring import mapped
from fewbit.runtime.saved.assignment import TensorSlot


class QuantizedTensorSpec(NamedTuple):
    """The spec of a tensor that the group quantizer has saved.

    Args:
        bits: the bits per element; no effect if each sample has its own number of bits.
        size, stride, dtype: those of the dequantized values.
        samples: the number of samples if each sample has its own number of bits, else None.
        slot: the slot for which the tensor was saved, if a policy chooses bits; else None.
        kind: one of `fewbit.config.KINDS`.
        has_mask: whether the last saved tensor is a mask (`saved/sharing.py`).
        has_channels: whether the copy has the means and scales of channels.
    """

    bits: int
    group_size: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    samples: int | None = None
    slot: TensorSlot | None = None
    kind: str = UNIFORM
    has_mask: bool = False
    has_channels: bool = False

    @property
    def count(self) -> int:
        return 2 + (self.samples is not None) + self.has_channels + self.has_mask

    def dequantize(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        """Return approximate values of the saved tensor, in `dtype` if given.

        `tensors` are codes, ranges and, if there are any, bits of samples, numbers of channels, and the mask. With
        affine = (scale, shift, inner) the values are multiplied by scale and added to shift before the result is
        rounded to dtype; either may be None; inner is as in `channels.Normalization`.
        """
        dtype, have_memory = dtype or self.dtype, _have_memory(tensors)
        if affine is not None and affine[0] is affine[1] is None:
            affine = None
        if affine is not None:
            if not have_memory or not self._is_mapped_by_kernel(affine):
                return in_dtype(map_affine(self.dequantize(tensors), affine), dtype)
            scale, shift, inner = affine
            affine = flat(scale), flat(shift), inner
        packed, ranges = tensors[:2]
        widths = None if self.samples is None else tensors[2]
        mask = tensors[-1] if self.has_mask else None
        channels = tensors[-1 - self.has_mask] if self.has_channels else None
        if not have_memory:
            place = self.bits, self.group_size, self.size, self.stride, dtype
            how = self.kind, widths, channels, mask
            return traced_copies.dequantize(packed, ranges, *place, *how)
        bits, samples = self.bits, self.samples
        is_wide = dtype is torch.float64
        out = rows = torch.empty_strided(
            self.size,
            self.stride,
            dtype=torch.float32 if is_wide else dtype,
            device=packed.device,
        )
        if samples is not None:
            bits = 0
            rows = out if self.size[0] == samples else out.view(samples, -1)
        how = widths, affine, self.kind, mask, channels
        backends.on[packed.device].dequantize(packed, ranges, bits, self.group_size, rows, *how)
        return out.double() if is_wide else out

    def _is_mapped_by_kernel(self, affine) -> bool:
        scale, shift, inner = affine
        fits = inner is not None and self.dtype is torch.float32 and not self.has_mask
        fits = fits and (scale is None or type(scale) in PLAIN_CLASSES)
        fits = fits and (shift is None or type(shift) in PLAIN_CLASSES)
        # The kernels do not map short samples of different bits.
        if fits and self.samples is not None:
            fits = prod(self.size) >= self.samples * groups.LEAST_FEATURES
        return fits

    def with_slot(self, slot: TensorSlot) -> QuantizedTensorSpec:
        return self._replace(slot=slot)

    def rounding_errors(self, values, tensors, bits: int, generator) -> torch.Tensor:
        """Return the errors of rounding dequantized values again to `bits`, a float32 vector in storage order.

        Values of a uniform copy lie on the steps of their group, so their errors are drawn in proportion to its range.
        """
        if self.kind == UNIFORM:
            packed, *rest = tensors
            lowest, highest = (
                layout.storage_order(self.dequantize((codes, *rest), torch.float32))
                for codes in (torch.zeros_like(packed), torch.full_like(packed, -1))
            )
            noise = torch.rand(lowest.shape, generator=generator, device=values.device)
            return (highest - lowest).mul_(noise.sub_(0.5))
        channels = tensors[self.count - 1 - self.has_mask] if self.has_channels else None
        normalize = None if channels is None else Normalization(channels=channels)
        x = values.to(torch.float32)
        seed = torch.randint(2**62, (1,), generator=generator, device=x.device)
        settings = bits, self.group_size, normalize
        packed, ranges = quantizer_ops.quantize(x, seed, *settings, kind=self.kind)
        place = bits, self.group_size, self.size, self.stride, torch.float32
        rounded = quantizer_ops.dequantize(
            packed, ranges, *place, kind=self.kind, channels=channels
        )
        x = layout.storage_order(x)
        errors = layout.storage_order(rounded) - x
        return errors.mul_(x != 0) if self.kind == MASKED else errors


def _have_memory(tensors) -> bool:
    """Return whether the tensors of a copy are ordinary, and so is what an operation returns now."""
    packed = tensors[0]
    if torch.compiler.is_dynamo_compiling() or type(packed) is not torch.Tensor or packed.is_meta:
        return False
    if modes_active() or transforms_active() or is_included(PRE_DISPATCH):
        return is_plain(packed)
    return True


@lru_cache(maxsize=4096)
def spec_of(
    shape, stride, dtype, bits, group_size, kind, has_mask, has_channels, samples=None
) -> QuantizedTensorSpec:
    """Return the spec of a tensor with these strides; None stands for contiguous ones."""
    stride = layout.contiguous_stride(shape) if stride is None else tuple(stride)
    of = bits, group_size, tuple(shape), stride, dtype
    return QuantizedTensorSpec(*of, samples, None, kind, has_mask, has_channels)


class RearrangedSpec(NamedTuple):
    """The spec of a tensor that had its dimensions in another order, or another shape, when it was quantized.

    Args:
        order: dimension order[i] of the quantized tensor is dimension i of the original; None if their order is the same.
        shape: the shape of the original, which is contiguous, if `order` is None.
    """

    inner: NamedTuple
    order: tuple[int, ...] | None
    shape: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        return self.inner.count

    def mapped(self, tensors, function) -> RearrangedSpec:
        return self._replace(inner=mapped(self.inner, tensors, function))

    def dequantize(self, tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = self.inner.dequantize(tensors, dtype)
        return values.view(self.shape) if self.order is None else values.permute(self.order)


class ComputedSpec(NamedTuple):
    """The spec of function(*inputs), for copies of the inputs that are saved one after the other.

    `products` is the number of linear layers that are computed again.
    """

    function: Callable
    specs: tuple[NamedTuple, ...]
    dtype: torch.dtype
    products: int = 0

    @property
    def count(self) -> int:
        return sum(spec.count for spec in self.specs)

    def mapped(self, tensors, function) -> ComputedSpec:
        specs = ()
        for spec in self.specs:
            count = spec.count
            specs, tensors = (*specs, mapped(spec, tensors[:count], function)), tensors[count:]
        return self._replace(specs=specs)

    def dequantize(self, tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
        values, dtype = (), dtype or self.dtype
        for spec in self.specs:
            count = spec.count
            values, tensors = (*values, spec.dequantize(tensors[:count])), tensors[count:]
        result = self.function(*values)
        return result if result.dtype is dtype else result.to(dtype)


class SavedTensors(NamedTuple):
    """Tensors for `save_for_backward`, and the spec that dequantizes them.

    Args:
        trace_anchor: a 0-D tensor of value 1 if a compiler traces, else None. The layer multiplies its result by the
            anchor, so that the compiler runs the quantization in the forward pass (docs/decisions/0004).
        is_observed: whether the policy learns from the backward pass that dequantizes the tensors.
    """

    tensors: tuple[torch.Tensor, ...]
    spec: QuantizedTensorSpec
    trace_anchor: torch.Tensor | None = None
    is_observed: bool = False

    def for_consumer(self, name: str) -> SavedTensors:
        """Return this copy for the layer `name`, which dequantizes a tensor that another layer saved."""

        def used(spec, _):
            slot = spec.slot
            if slot.rounding is None or slot.name[0] == name:
                return spec
            return spec.with_slot(slot._replace(user=name))

        return self._replace(spec=mapped(self.spec, self.tensors, used))

    def viewed(self, shape: tuple[int, ...]) -> SavedTensors:
        return self._replace(spec=RearrangedSpec(self.spec, None, shape))


def computed_from(
    function: Callable, copies: Iterable[SavedTensors], dtype: torch.dtype, products: int = 0
) -> SavedTensors:
    """Return SavedTensors from which the backward pass computes function(*copies), with dequantized values.

    The function can be pickled, and computes `products` linear layers.
    """
    tensors, specs, is_observed = (), (), False
    for copy in copies:
        tensors, specs = tensors + copy.tensors, (*specs, copy.spec)
        products += products_of(copy)
        is_observed = is_observed or copy.is_observed
    return SavedTensors(tensors, ComputedSpec(function, specs, dtype, products), None, is_observed)


def products_of(copy: SavedTensors) -> int:
    """Return the number of linear layers that restoring a tensor computes again."""
    spec = copy.spec
    while isinstance(spec, RearrangedSpec):
        spec = spec.inner
    return spec.products if isinstance(spec, ComputedSpec) else 0


class QuantizationRecord(NamedTuple):
    """A tensor x and its quantized copy, or with `normalize` one of (x - mean) rstd, for a probe to measure."""

    x: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    spec: QuantizedTensorSpec
    group_size: int
    normalize: Normalization | None

    def variance(self, bits: int, generator) -> torch.Tensor:
        """Return the variance that rounding to `bits` adds to an element, the mean over each sample, (samples,) float32.

        That of a uniform copy is estimated by `quantizer_ops.rounding_variance`.
        """
        kind = self.spec.kind
        if kind != UNIFORM:
            squares = self._squares_by_sample()
            return squares * (distortion(kind, bits) * len(squares) / max(self.x.numel(), 1))
        settings = self.group_size, self.normalize
        return quantizer_ops.rounding_variance(
            self.x, self.spec.samples, *settings, bits, generator
        )

    def squares(self) -> torch.Tensor:
        """Return the sum of `quantizer_ops.squares` over all samples, 0-D float32."""
        return self._squares_by_sample().sum()

    def _squares_by_sample(self) -> torch.Tensor:
        x = self.x if layout.is_by_sample(self.x) else self.x.contiguous()
        samples = self.spec.samples or (len(x) if x.dim() else 1)
        is_short = x.numel() < groups.LEAST_FEATURES * samples
        rows = layout.storage_order(x).view(1 if is_short else samples, -1)
        found = quantizer_ops.squares(rows, self.group_size, self.normalize, self.spec.kind)
        # Groups run across samples that are so short, and the errors of all elements of a group have the same variance.
        return (found / samples).expand(samples) if is_short else found

    @property
    def _is_normalized(self) -> bool:
        return self.normalize is not None and self.normalize.rstd is not None

    def exact(self) -> torch.Tensor:
        """Return the values before rounding, in the spec's size, strides and dtype."""
        spec = self.spec
        x = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=self.x.device)
        x.copy_(self.x)
        if self._is_normalized:
            mean, rstd, inner, _ = self.normalize
            rows = layout.storage_order(x).view(-1, len(rstd), inner)
            if mean is not None:
                rows.sub_(mean[:, None])
            rows.mul_(rstd[:, None])
        return x

    def errors(self, exact: torch.Tensor | None = None) -> torch.Tensor:
        if exact is None:
            exact = self.exact() if self._is_normalized else self.x
        return self.spec.dequantize(self.tensors).sub_(exact)


def unsharded(weight, bias) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return a norm's weight and bias, as detached copies if torch.distributed is initialized.

    A sharded model may have freed the norm's full parameters when the next layer, which uses them too, runs its
    backward.
    """
    if not is_distributed_run():
        return weight, bias
    return tuple(None if vector is None else vector.detach().clone() for vector in (weight, bias))


def flat(vector: torch.Tensor | None) -> torch.Tensor | None:
    """Return the entries of a tensor as kernels expect them: 1-D, contiguous, float32."""
    if vector is None:
        return None
    if vector.dtype is torch.float32 and vector.is_contiguous():
        return vector if vector.ndim == 1 else vector.detach().view(-1)
    vector = vector.detach()
    if vector.dtype != torch.float32:
        vector = vector.to(torch.float32)
    return vector.reshape(-1).contiguous()


def in_storage_order(x: torch.Tensor, save) -> SavedTensors:
    """Return save(x), in which save gets the dimensions of x in storage order. Dequantizing restores x's strides.

    A sparse tensor has no storage order.
    """
    order = layout.storage_permutation(x) if x.layout is torch.strided else None
    return save(x) if order is None else in_order(x, order, save)


def in_order(x: torch.Tensor, order: tuple[int, ...], save) -> SavedTensors:
    """Return save(x), in which save gets the dimensions of x in this order."""
    saved = save(x.permute(order))
    back = tuple(map(order.index, range(len(order))))
    return saved._replace(spec=RearrangedSpec(saved.spec, back))
