"""A norm's copy in K-bit fixed point, from which x~, y = gamma x~ + beta and the ReLU of y can be dequantized.

Here x~ is the norm's normalized input and y the norm's result. One packed tensor serves the norm, the activation and
the linear layer or convolution of a pre-activation block (BLPA, section 3.2). The norm saves the packed tensor and puts
it into the cache as a copy of y. A ReLU or LeakyReLU of y reads the sign of y from the copy, and adds the copy to the
cache for its own result. A linear layer or convolution dequantizes its input from the copy. No layer needs to know the
others, because the cache finds a copy by the tensor that is to be saved.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.autograd import Function

from fewbit.runtime.format import layout
from fewbit.runtime.format.encoding import Encoding
from fewbit.runtime.interop.tensor_kinds import is_eager
from fewbit.runtime.ops import fixed_point
from fewbit.runtime.quantizers.spec import SavedTensors, flat, map_affine, unsharded
from fewbit.runtime.saved import offload
from fewbit.runtime.saved.context import current
from fewbit.runtime.saved.single_backward import once_differentiable


class FixedPointSpec(NamedTuple):
    """The spec of x~, which is dequantized from (packed, weight, bias). Weight and bias may be None.

    Args:
        bits: the bits of a code.
        inner: element number e in storage order belongs to channel (e div inner) mod (number of channels).
        size, stride: the size and strides of the norm's result y.
        dtype: the dtype of x~.
    """

    bits: int
    inner: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        """The number of saved tensors."""
        return 3

    def dequantize(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        """Return x~ in the size and strides of y. For `affine` see `QuantizedTensorSpec.dequantize`."""
        scale, shift, inner = affine or (None, None, None)
        if shift is None and inner is not None and self.dtype == torch.float32:
            return self._decode(tensors, dtype or self.dtype, scale=(flat(scale), inner))
        return map_affine(self._decode(tensors, self.dtype), affine).to(dtype or self.dtype)

    def result(self, tensors, dtype: torch.dtype, slope: float) -> torch.Tensor:
        """Return y where y is positive, and y * slope elsewhere."""
        return self._decode(tensors, dtype, slope)

    def masked(self, grad, tensors, slope: float) -> torch.Tensor:
        """Return grad where y is positive, and grad * slope elsewhere."""
        packed, weight, bias = tensors
        if not is_eager(grad):  # is_grads_batched=True
            ones = torch.ones(self.size, dtype=grad.dtype, device=packed.device)
            below = grad * slope if slope else torch.zeros_like(grad)
            return torch.where(self.masked(ones, tensors, 0.0) > 0, grad, below)
        grid = fixed_point.grid_of(weight, bias, self.bits, packed.device)
        grad = layout.bring_to(grad, self.stride)
        return fixed_point.mask(grad, packed, grid, self.bits, self.inner, slope)

    def _decode(self, tensors, dtype, slope=None, scale=None):
        packed, weight, bias = tensors
        grid = fixed_point.grid_of(weight, bias, self.bits, packed.device)
        of = packed, grid, self.bits, self.inner
        return fixed_point.decode(*of, self.size, self.stride, dtype, slope, scale)


class PreActivationSpec(NamedTuple):
    """The spec of y, or of the ReLU or LeakyReLU of y, dequantized from the tensors of `fixed`.

    Args:
        fixed: the spec of x~.
        dtype: the dtype of the values.
        slope: the slope of the activation below 0; 1 for y itself.
    """

    fixed: FixedPointSpec
    dtype: torch.dtype
    slope: float = 1.0

    def dequantize(self, tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values in the size and strides of y, in the spec's dtype unless another one is given."""
        return self.fixed.result(tensors, dtype or self.dtype, self.slope)


def can_save_fixed_point(quantizer, x, rstd, weight, bias, copies: int) -> bool:
    """Return whether a norm can save x~ in fixed point.

    It cannot if the quantizer does not ask for it (`fuse`), two copies are needed, a compiler traces, or the statistics
    have a 16-bit dtype.
    """
    if not quantizer.fuse or copies != 1 or rstd.dtype.itemsize <= 2:
        return False
    return all(tensor is None or is_eager(tensor) for tensor in (x, weight, bias))


def save_fixed_point(
    quantizer, x, y, mean, rstd, inner: int | None, weight, bias, channels: int | None
):
    """Save x~ of a norm in fixed point, and put the copy into the cache for the norm's result y.

    Args:
        quantizer: the quantizer of the norm.
        x: the input of the norm. See `Quantizer.quantize_normalized` for x, mean, rstd and inner.
        y: the result of the norm.
        mean: the mean of x.
        rstd: the reciprocal standard deviation of x.
        inner: the number of consecutive elements with the same statistics, or None.
        weight: the weight of the norm, or None.
        bias: the bias of the norm, or None.
        channels: the dimension of y that weight and bias belong to; None: the last dimensions.

    Returns:
        SavedTensors of x~.
    """
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
        values = ((x.detach().to(dtype) - mean) * rstd).to(torch.promote_types(dtype, y.dtype))
        source, normalize = layout.bring_to(values, result.stride()), None
        result = result.to(source.dtype)
    grid = fixed_point.grid_of(weight, bias, quantizer.bits, x.device)
    packed = fixed_point.encode(source, result, grid, quantizer.bits, of_channels, normalize)
    offload.mark(packed)
    tensors = packed, *unsharded(weight, bias)
    spec = FixedPointSpec(quantizer.bits, of_channels, tuple(y.shape), result.stride(), dtype)
    context = quantizer.fixed_point_context
    if context is not None:
        context.cache.put_fixed_point(y, SavedTensors(tensors, PreActivationSpec(spec, y.dtype)))
    return SavedTensors(tensors, spec)


def activate(x, function: str, parameters: tuple, encoding: str, inplace: bool):
    """Return ReLU or LeakyReLU of a tensor that has a fixed-point copy in the cache; None for any other tensor or function.

    The activation saves nothing of its own. The copy is put into the cache for the result as well. The arguments are
    those of `fewbit.runtime.activations.apply.apply`.
    """
    if function not in ("relu", "leaky_relu"):
        return None
    context = current()
    if context is None or not context.cache.has_fixed_point or not context.recomputes_alike():
        return None
    context.record_save()
    saved = context.cache.get_fixed_point(x)
    slope = float(parameters[0]) if parameters else 0.0
    if saved is None or saved.spec.slope != 1.0 or not _is_exact(encoding, slope):
        return None
    y = _TwoValued.apply(x, slope, inplace, saved)
    context.cache.put_fixed_point(y, SavedTensors(saved.tensors, saved.spec._replace(slope=slope)))
    return y


class _TwoValued(Function):
    """The activation itself, whose gradient is computed from the signs in the norm's copy."""

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
    @once_differentiable
    def backward(ctx, grad):
        return ctx.spec.masked(grad, ctx.saved_tensors, ctx.slope), None, None, None


@lru_cache(maxsize=256)
def _is_exact(encoding: str, slope: float) -> bool:
    """Return whether the encoding is the exact derivative of ReLU or LeakyReLU, and not a table's own."""
    encoded = Encoding.parse(encoding)
    if encoded.unbiased:
        return False
    return encoded.breaks64.tolist() == [0.0] and sorted(encoded.lut64.tolist()) == sorted(
        [slope, 1.0]
    )


def _inner_of(y, channels: int | None) -> int | None:
    """Return how many consecutive elements of y, in storage order, have the same channel; None for other layouts."""
    if y.is_contiguous():
        return 1 if channels is None else math.prod(y.shape[channels + 1 :])
    if channels is None:
        return None
    return 1 if layout.is_by_sample(y) and y.stride(channels) == 1 else None
