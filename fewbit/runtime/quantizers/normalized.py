"""The quantized copies of normalized inputs, and a norm's result dequantized from one.

y = x~ weight + bias is linear in the normalized input x~. If the dequantized x~^ is exact in expectation, so is y^. A
layer that saves y for the gradient of its weight can therefore use the copy that the norm before it saves anyway, and
two vectors that exist already.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fewbit.runtime.format import layout
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec, SavedTensors, unsharded


class AffineResultSpec(NamedTuple):
    """The spec of a norm's result y, dequantized from (packed, ranges, weight, bias). The bias may be None.

    Args:
        normalized: the spec of x~.
        dtype: of y.
        channels: the shape in which weight and bias broadcast to y; None if they broadcast as they are.
    """

    normalized: QuantizedTensorSpec
    dtype: torch.dtype
    channels: tuple[int, ...] | None = None

    def dequantize(self, tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return y in the size of x. dtype: of the result; that of y unless given."""
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
    """Let layers of the same model that save the norm's result y use the norm's copy of x~.

    Args:
        quantizer: of the norm.
        y: the result.
        saved: the SavedTensors of x~.
        weight: of the norm.
        bias: of the norm, or None.
        channels: as of `AffineResultSpec`.
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
    """Quantize the normalized x once or twice, and note the spec in ctx.

    Args:
        ctx: of the norm's autograd Function; gets `spec` and `inner`.
        x: as for `Quantizer.quantize_normalized`.
        mean: as for `Quantizer.quantize_normalized`.
        rstd: as for `Quantizer.quantize_normalized`.
        inner: as for `Quantizer.quantize_normalized`.
        copies: 1 or 2.
        quantizer: of the norm.

    Returns:
        (SavedTensors of the first copy, all tensors to save).
    """
    parts = [quantizer.quantize_normalized(x, mean, rstd, inner) for _ in range(copies)]
    ctx.spec, ctx.inner = parts[0].spec, inner
    return parts[0], [tensor for part in parts for tensor in part.tensors]


def dequantize_copies(ctx, saved):
    """Return the two factors x~^ of the backward pass: twice the same copy, or two independent ones."""
    count = ctx.spec.count
    first = ctx.spec.dequantize(saved[:count])
    return first, first if len(saved) == count else ctx.spec.dequantize(saved[count:])


def dequantize_scaled(ctx, saved, rstd, dtype):
    """Return x~^ of the first copy divided by rstd: an input of mean 0 for torch's own backward functions."""
    deviation = rstd.to(ctx.spec.dtype).reciprocal()
    return ctx.spec.dequantize(saved[: ctx.spec.count], dtype, (deviation, None, ctx.inner))


def input_gradient(g, first, second, rstd, dims, centered=True):
    """Return a norm's input gradient (g - mean(g) - x~1 mean(x~2 g)) rstd, without the first mean unless centered.

    Args:
        g: the gradient of the result times the weight.
        first: dequantized x~1.
        second: dequantized x~2, perhaps the same copy.
        rstd: broadcasts over `dims`.
        dims: the dimensions over which means are taken.
        centered: whether the norm subtracts the mean.
    """
    inner = g - first * (second * g).mean(dims, keepdim=True)
    if centered:
        inner = inner - g.mean(dims, keepdim=True)
    return inner * rstd
