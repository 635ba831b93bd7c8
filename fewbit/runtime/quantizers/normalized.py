"""The quantized copies of normalized inputs, and a norm's result restored from one.

y = x~ weight + bias is linear in the normalized input x~, so that with x~^ exact in expectation y^ is as
well. A layer that keeps y for the gradient of its weight can therefore keep the copy that the norm before it
keeps anyway, and two vectors that exist already.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fewbit.runtime.format import layout
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec, SavedTensors


class AffineResultSpec(NamedTuple):
    """How y is restored from (packed, ranges, weight, bias), of which the last may be None.

    channels: the shape in which weight and bias broadcast to y; None: as they are.
    """

    normalized: QuantizedTensorSpec
    dtype: torch.dtype
    channels: tuple[int, ...] | None = None

    def dequantize(self, tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
        """y in the size of x; dtype: that of y unless given."""
        *kept, weight, bias = tensors
        affine = self._placed(weight), self._placed(bias), self._inner()
        return self.normalized.dequantize(kept, dtype or self.dtype, affine)

    def for_consumer(self, name: str) -> AffineResultSpec:
        """For the layer of that name."""
        return self._replace(normalized=self.normalized.for_consumer(name))

    def _inner(self) -> int | None:
        """How many elements in storage order have the same entry in a row; None for other layouts."""
        size, stride = self.normalized.size, self.normalized.stride
        if self.channels is not None and stride[1] == 1:
            return 1
        if stride != layout.contiguous_stride(size):
            return None
        return 1 if self.channels is None else math.prod(size[2:])

    def _placed(self, vector):
        return vector if vector is None or self.channels is None else vector.view(self.channels)


def share_result(quantizer, y, kept: SavedTensors, weight, bias, channels=None) -> None:
    """Layers of the same model that are about to keep y find what the norm has kept."""
    if quantizer.context is None or kept.trace_anchor is not None:
        return
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # Where parameters are sharded the norm's may be gone when the layer after it runs backward.
        weight, bias = (None if each is None else each.detach().clone() for each in (weight, bias))
    elif channels is not None and bias is not None:
        # torch's batch norm does not save the bias, so users may change the bias before backward; a clone keeps its value.
        bias = bias.detach().clone()
    spec = AffineResultSpec(kept.spec, y.dtype, channels)
    quantizer.context.cache.put(y, quantizer.key, SavedTensors((*kept.tensors, weight, bias), spec))


def save_copies(ctx, x, mean, rstd, inner, copies, quantizer):
    """What is kept of x, and the tensors to save: of one copy, or of two.

    mean, rstd, inner: as for `Quantizer.quantize_normalized`.
    """
    parts = [quantizer.quantize_normalized(x, mean, rstd, inner) for _ in range(copies)]
    ctx.spec, ctx.inner = parts[0].spec, inner
    return parts[0], [tensor for part in parts for tensor in part.tensors]


def dequantize_copies(ctx, kept):
    """The two factors x~^ of the backward pass: twice the same copy, or two independent ones."""
    count = ctx.spec.count
    first = ctx.spec.dequantize(kept[:count])
    return first, first if len(kept) == count else ctx.spec.dequantize(kept[count:])


def dequantize_scaled(ctx, kept, rstd, dtype):
    """s x~^ of the first copy: an input of mean 0 for torch's own backward functions."""
    deviation = rstd.to(ctx.spec.dtype).reciprocal()
    return ctx.spec.dequantize(kept[: ctx.spec.count], dtype, (deviation, None, ctx.inner))


def input_gradient(g, first, second, rstd, dims, centered=True):
    """(g - mean(g) - x~1 mean(x~2 g)) rstd; without the first mean unless centered.

    g: the gradient times the weight; first, second: restored x~; rstd: broadcast over `dims`, which means are
    taken over.
    """
    inner = g - first * (second * g).mean(dims, keepdim=True)
    if centered:
        inner = inner - g.mean(dims, keepdim=True)
    return inner * rstd
