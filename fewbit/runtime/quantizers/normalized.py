"""The quantized copies of a norm's normalized input, and the norm's result dequantized from such a copy.

A norm computes y = x~ weight + bias from the normalized input x~. Since y is linear in x~, dequantized values of x~
that are exact in expectation give values of y that are exact in expectation. A layer after the norm that would save y
can therefore use the copy of x~ that the norm saves anyway, with weight and bias, which exist already.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fewbit.runtime.format import layout
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec, SavedTensors, unsharded


class AffineResultSpec(NamedTuple):
    """The spec of a norm's result y, which is dequantized from (packed, ranges, weight, bias). The bias may be None.

    Args:
        normalized: the spec of the normalized input x~.
        dtype: the dtype of y.
        channels: the shape in which weight and bias broadcast to y; None if they broadcast as they are.
    """

    normalized: QuantizedTensorSpec
    dtype: torch.dtype
    channels: tuple[int, ...] | None = None

    def dequantize(self, tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return approximate values of y, in the size of x~ and in y's dtype unless another one is given."""
        *saved, weight, bias = tensors
        affine = self._placed(weight), self._placed(bias), self._inner()
        return self.normalized.dequantize(saved, dtype or self.dtype, affine)

    def for_consumer(self, name: str) -> AffineResultSpec:
        """Return this spec for the layer `name`, see `QuantizedTensorSpec.for_consumer`."""
        return self._replace(normalized=self.normalized.for_consumer(name))

    def _inner(self) -> int | None:
        """Return how many consecutive elements, in storage order, have the same entry of the weight; None for other layouts."""
        size, stride = self.normalized.size, self.normalized.stride
        if self.channels is not None and stride[1] == 1:
            return 1
        if stride != layout.contiguous_stride(size):
            return None
        return 1 if self.channels is None else math.prod(size[2:])

    def _placed(self, vector):
        return vector if vector is None or self.channels is None else vector.view(self.channels)


def share_result(quantizer, y, saved: SavedTensors, weight, bias, channels=None) -> None:
    """Let layers of the same model that would save the norm's result y use the norm's copy of x~ instead.

    Args:
        quantizer: the quantizer of the norm.
        y: the result of the norm.
        saved: the SavedTensors of x~.
        weight: the weight of the norm.
        bias: the bias of the norm, or None.
        channels: the shape in which weight and bias broadcast to y, see `AffineResultSpec`.
    """
    if quantizer.context is None or saved.trace_anchor is not None:
        return
    weight, result_bias = unsharded(weight, bias)
    if channels is not None and bias is not None and result_bias is bias:
        # torch's batch norm does not save the bias, so users may change the bias before backward.
        result_bias = bias.detach().clone()
    spec = AffineResultSpec(saved.spec, y.dtype, channels)
    tensors = *saved.tensors, weight, result_bias
    quantizer.context.cache.put(y, quantizer.key, SavedTensors(tensors, spec))


def save_copies(ctx, x, mean, rstd, inner, copies, quantizer):
    """Quantize the normalized input of a norm once or twice.

    Args:
        ctx: the context of the norm's autograd Function. Its attributes `spec` and `inner` are set for the backward
            pass.
        x: the input of the norm. See `Quantizer.quantize_normalized` for x, mean, rstd and inner.
        mean: the mean of x, or None.
        rstd: the reciprocal standard deviation of x.
        inner: the number of consecutive elements with the same statistics, or None.
        copies: 1, or 2 for two independently rounded copies.
        quantizer: the quantizer of the norm.

    Returns:
        (SavedTensors of the first copy, all tensors to save).
    """
    parts = [quantizer.quantize_normalized(x, mean, rstd, inner) for _ in range(copies)]
    ctx.spec, ctx.inner = parts[0].spec, inner
    return parts[0], [tensor for part in parts for tensor in part.tensors]


def dequantize_copies(ctx, saved):
    """Return dequantized x~ twice, from two independent copies, or from one copy if only one was saved."""
    count = ctx.spec.count
    first = ctx.spec.dequantize(saved[:count])
    return first, first if len(saved) == count else ctx.spec.dequantize(saved[count:])


def dequantize_scaled(ctx, saved, rstd, dtype):
    """Return dequantized x~ divided by rstd: an input of mean 0 that torch's own backward functions accept in place of x."""
    deviation = rstd.to(ctx.spec.dtype).reciprocal()
    return ctx.spec.dequantize(saved[: ctx.spec.count], dtype, (deviation, None, ctx.inner))


def input_gradient(g, first, second, rstd, dims, centered=True):
    """Return the gradient of a norm's input: (g - mean(g) - x~1 mean(x~2 g)) rstd, without mean(g) if not `centered`.

    Args:
        g: the gradient of the norm's result, times the weight.
        first: the dequantized x~1.
        second: the dequantized x~2, perhaps from the same copy as x~1.
        rstd: the reciprocal standard deviation, which broadcasts over `dims`.
        dims: the dimensions over which means are taken.
        centered: whether the norm subtracts the mean.
    """
    inner = g - first * (second * g).mean(dims, keepdim=True)
    if centered:
        inner = inner - g.mean(dims, keepdim=True)
    return inner * rstd
