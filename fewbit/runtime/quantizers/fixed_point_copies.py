"""The *fixed-point copy* that a norm, an activation and a linear layer or convolution save together, a pre-activation block.

It contains the norm's normalized input x~, from which y = gamma x~ + beta and the ReLU of y are dequantized too (BLPA,
section 3.2; docs/guides/preactivation.md). Each layer shares it as the copy of its result.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from fewbit.runtime.format import layout
from fewbit.runtime.format.channels import Statistics, map_affine
from fewbit.runtime.format.encoding import Encoding
from fewbit.runtime.interop.tensor_kinds import is_eager
from fewbit.runtime.ops import fixed_point
from fewbit.runtime.quantizers.spec import SavedTensors, flat, unsharded
from fewbit.runtime.saved import offload
from fewbit.runtime.saved.forward import running
from fewbit.runtime.saved.saving_function import SavingFunction
from fewbit.runtime.saved.sharing import FIXED_POINT, place_of

SIGNED = ("relu", "leaky_relu")
"""The activations whose gradients need only the signs of their inputs."""


class FixedPointSpec(NamedTuple):
    """The spec of x~ saved as a fixed-point copy: (packed codes, weight, bias), of which weight and bias may be None.

    Args:
        inner: as in `channels.Normalization`.
        size, stride: those of y.
        dtype: the dtype of x~.
    """

    bits: int
    inner: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    count = 3

    def dequantize(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        scale, shift, inner = affine or (None, None, None)
        if shift is None and inner is not None and self.dtype == torch.float32:
            return self.decode(tensors, dtype or self.dtype, scale=(flat(scale), inner))
        return map_affine(self.decode(tensors, self.dtype), affine).to(dtype or self.dtype)

    def masked(self, grad, tensors, slope: float) -> torch.Tensor:
        """Return the gradient of LeakyReLU: grad where y > 0, and grad * slope elsewhere."""
        if is_eager(grad):
            return self._masked(grad, tensors, slope)
        # A gradient with a batch dimension, as with is_grads_batched=True, cannot be given to the kernels.
        ones = torch.ones(self.size, dtype=grad.dtype, device=tensors[0].device)
        below = grad * slope if slope else torch.zeros_like(grad)
        return torch.where(self._masked(ones, tensors, 0.0) > 0, grad, below)

    def _masked(self, grad, tensors, slope):
        packed, weight, bias = tensors
        grid = fixed_point.grid_of(weight, bias, self.bits, packed.device)
        grad = layout.bring_to(grad, self.stride)
        return fixed_point.mask(grad, packed, grid, self.bits, self.inner, slope)

    def decode(self, tensors, dtype, slope=None, scale=None) -> torch.Tensor:
        """Return approximate values of x~, times `scale` if given; with a `slope` those of LeakyReLU(y)."""
        packed, weight, bias = tensors
        grid = fixed_point.grid_of(weight, bias, self.bits, packed.device)
        of = packed, grid, self.bits, self.inner
        return fixed_point.decode(*of, self.size, self.stride, dtype, slope, scale)


class PreActivationSpec(NamedTuple):
    """The spec of LeakyReLU(y) saved as a fixed-point copy of spec `fixed`. `slope` is 1 for y itself, and 0 for ReLU."""

    fixed: FixedPointSpec
    dtype: torch.dtype
    slope: float = 1.0

    count = FixedPointSpec.count

    def dequantize(self, tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.fixed.decode(tensors, dtype or self.dtype, self.slope)


def can_save_fixed_point(x, rstd, weight, bias, copies: int) -> bool:
    """Return whether a norm can save a fixed-point copy.

    It cannot if it needs two independent copies, if a compiler traces, or if `rstd` has a 16-bit dtype.
    """
    if copies != 1 or rstd.dtype.itemsize <= 2:
        return False
    return all(tensor is None or is_eager(tensor) for tensor in (x, weight, bias))


def save_fixed_point(quantizer, x, y, statistics: Statistics, weight, bias, channels: int | None):
    """Save x~ as a fixed-point copy, and share it as the copy of y. Return the SavedTensors of x~.

    Weight and bias lie along dimension `channels` of y, or for None along the last ones.
    """
    mean, rstd, inner, _ = statistics
    of_channels = _inner_of(y, channels)
    result = y.detach()
    if of_channels is None:
        result = result.contiguous()
        of_channels = _inner_of(result, channels)
    usual = rstd.dtype == torch.float32 and x.dtype == y.dtype != torch.float64
    if usual and inner is not None and layout.has_stride(x, result.stride()):
        dtype, source, normalize = torch.float32, x, (flat(mean), flat(rstd), inner)
    else:
        dtype = torch.promote_types(rstd.dtype, torch.float32)
        values = statistics.normalized(x.detach().to(dtype)).to(torch.promote_types(dtype, y.dtype))
        source, normalize = layout.bring_to(values, result.stride()), None
        result = result.to(source.dtype)
    grid = fixed_point.grid_of(weight, bias, quantizer.bits, x.device)
    packed = fixed_point.encode(source, result, grid, quantizer.bits, of_channels, normalize)
    offload.mark(packed)
    tensors = packed, *unsharded(weight, bias)
    spec = FixedPointSpec(quantizer.bits, of_channels, tuple(y.shape), result.stride(), dtype)
    context = quantizer.fixed_point_context
    if context is not None:
        _share(context, y, SavedTensors(tensors, PreActivationSpec(spec, y.dtype)))
    return SavedTensors(tensors, spec)


def activate(x, function: str, parameters: tuple, encoding: Encoding, inplace: bool):
    """Apply a ReLU or LeakyReLU to the result x of a norm, if the layers share a fixed-point copy of x.

    Returns:
        The result. None if there is no such copy, if the activation is another one, or if `encoding` is not its exact
        derivative.
    """
    if function not in SIGNED:
        return None
    forward = running.forward
    if forward is None or not forward.context.has_fixed_point or not forward.recomputes_alike():
        return None
    saved = fixed_point_of(forward.context, x)
    slope = float(parameters[0]) if parameters else 0.0
    if saved is None or saved.spec.slope != 1.0 or not _is_exact(encoding, slope):
        return None
    y = _TwoValued.apply(x, slope, inplace, saved)
    _share(forward.context, y, SavedTensors(saved.tensors, saved.spec._replace(slope=slope)))
    return y


def fixed_point_of(context, x) -> SavedTensors | None:
    """Return the fixed-point copy of x, or None."""
    saving = context.saving(x)
    saving.has_saved = True
    place = None if saving.shared is None else place_of(x)
    return None if place is None else saving.shared.get(place, FIXED_POINT)


def _share(context, y, saved: SavedTensors) -> None:
    context.has_fixed_point = True
    shared = context.saving(y).shared
    if shared is not None:
        shared.put(y, place_of(y), FIXED_POINT, saved)


class _TwoValued(SavingFunction):
    """ReLU or LeakyReLU, whose gradient is computed from the signs in the norm's copy."""

    @staticmethod
    def forward(ctx, x, slope, inplace, saved):
        ctx.spec, ctx.slope = saved.spec.fixed, slope
        ctx.save_for_backward(*saved.tensors)
        if inplace:
            ctx.mark_dirty(x)
        if slope == 0.0:
            return torch.relu_(x) if inplace else torch.relu(x)
        return torch.nn.functional.leaky_relu(x, slope, inplace)

    @staticmethod
    def backward(ctx, grad):
        return ctx.spec.masked(grad, ctx.saved_tensors, ctx.slope), None, None, None


@lru_cache(maxsize=256)
def _is_exact(encoding: Encoding, slope: float) -> bool:
    if encoding.unbiased or encoding.breaks64.tolist() != [0.0]:
        return False
    return sorted(encoding.lut64.tolist()) == sorted([slope, 1.0])


def _inner_of(y, channels: int | None) -> int | None:
    if y.is_contiguous():
        return 1 if channels is None else math.prod(y.shape[channels + 1 :])
    if channels is None:
        return None
    return 1 if layout.is_by_sample(y) and y.stride(channels) == 1 else None
