"""The quantized copies of a norm's normalized input x~ = (x - mean) rstd, and the norm's result y = x~ weight + bias.

y is linear in x~, so values of y dequantized from such a copy are exact in expectation too.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from fewbit.config import ROTATED
from fewbit.runtime import backends
from fewbit.runtime.format import layout
from fewbit.runtime.interop.cuda_streams import stream_of
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.probes.restoring import mapped
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec, SavedTensors, flat, unsharded
from fewbit.runtime.saved.sharing import address_of, place_of

_IN_KERNELS = torch.float32, torch.float16, torch.bfloat16

MOST_SHARED = 2**14
"""The largest number of elements of a shared constant: filling a larger tensor takes longer than the launch."""


class AffineResultSpec(NamedTuple):
    """The spec of y, of `dtype` and the size of x~, computed from the tensors of a copy of x~, followed by weight and bias.

    `channels` is the shape to which weight and bias are viewed so that they broadcast to y; None for their own.
    """

    normalized: QuantizedTensorSpec
    dtype: torch.dtype
    channels: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        return self.normalized.count + 2

    def dequantize(self, tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
        *saved, weight, bias = tensors
        if self.channels is not None:
            weight, bias = self._placed(weight), self._placed(bias)
        inner = _inner(self.normalized.size, self.normalized.stride, self.channels is not None)
        return self.normalized.dequantize(saved, dtype or self.dtype, (weight, bias, inner))

    def mapped(self, tensors, function) -> AffineResultSpec:
        return self._replace(normalized=mapped(self.normalized, tensors[:-2], function))

    def _placed(self, vector):
        return None if vector is None else vector.view(self.channels)


@lru_cache(maxsize=4096)
def _inner(size, stride, has_channels: bool) -> int | None:
    """Return how many successive elements in memory have the same weight entry; None if that varies."""
    if has_channels and stride[1] == 1:
        return 1
    if stride != layout.contiguous_stride(size):
        return None
    return math.prod(size[2:]) if has_channels else 1


def share_result(quantizer, y, saved: SavedTensors, weight, bias, channels=None) -> None:
    """Let layers that would save y use the norm's copy `saved` of x~. `channels`: as in `AffineResultSpec`."""
    context = quantizer.context
    # A compiler's copies have an anchor.
    if context is None or saved.trace_anchor is not None:
        return
    copies = context.saving(y).shared
    if copies is None:
        return
    vectors, before = (weight, bias), None
    if context.is_distributed:
        vectors = unsharded(weight, bias)
    elif channels is not None and bias is not None:
        # torch's batch norm does not save the bias, so users may change the bias before backward.
        before = place_of(bias)
    make = partial(_result_copy, saved, *vectors, y.dtype, channels, before, copies.exposed)
    copies.put(y, place_of(y), quantizer.key, make)


def _result_copy(saved: SavedTensors, weight, bias, dtype, channels, before, exposed):
    """Return the copy of y; None if the bias is no longer at `before`, or a vector may have changed unnoticed."""
    if exposed and not exposed.isdisjoint(map(address_of, (weight, bias))):
        return None
    if before is not None:
        if place_of(bias) != before:
            return None
        bias = bias.detach().clone()
    spec = AffineResultSpec(saved.spec, dtype, channels)
    return SavedTensors((*saved.tensors, weight, bias), spec, None, saved.is_observed)


def save_copies(x, statistics, copies, quantizer, features=None):
    """Quantize x~ once, or twice with independent rounding. The second copy may be None."""
    first = quantizer.quantize_normalized(x, statistics, features)
    if copies == 1:
        return first, None
    return first, quantizer.quantize_normalized(x, statistics, features)


def batch_norm_gradients(spec, saved, inner, grad, rstd, weight, needs_input):
    """Return the results of `reference.batch_norm_backward` for a norm's copy, or None."""
    if inner != 1 or not isinstance(spec, QuantizedTensorSpec) or spec.kind != ROTATED:
        return None
    if spec.has_channels:  # of which the kernels know nothing
        return None
    fits = spec.samples is None and rstd.dtype == torch.float32 and grad.dtype in _IN_KERNELS
    tensors = grad, rstd, *saved, *(() if weight is None else (weight,))
    if not (fits and all(map(is_plain, tensors))):
        return None
    backend = backends.on[grad.device]
    if not backend.can_compute_batch_norm(spec.bits, spec.group_size, spec.size):
        return None
    grad = layout.with_stride(grad, spec.stride, by_sample=True)
    copy = *saved, spec.bits, spec.group_size
    return backend.batch_norm_backward(*copy, grad, rstd, flat(weight), needs_input)


def dequantize_copies(kept):
    """Return x~ dequantized from the copies "x" and "x2" that the norm has kept; the same twice if there is one copy."""
    first, second = kept.values("x"), kept.values("x2")
    return first, first if second is None else second


def dequantize_scaled(kept, rstd, inner, dtype):
    """Return dequantized x~ / rstd, which replaces x in torch's backward functions of norms, with 0 as the mean."""
    spec, tensors = kept.copy("x")
    if rstd.dtype is not spec.dtype:
        rstd = rstd.to(spec.dtype)
    return spec.dequantize(tensors, dtype, (rstd.reciprocal(), None, inner))


def constant_like(statistic, value: float):
    """Return a tensor like `statistic` that is filled with a value, for torch's functions, which only read it.

    Backward passes in one stream share small tensors, except in a capture, whose graph may be replayed at any time.
    """
    is_shared = statistic.is_cuda and is_plain(statistic) and statistic.numel() <= MOST_SHARED
    if not is_shared or torch.cuda.is_current_stream_capturing():
        return torch.full_like(statistic, value)
    place = statistic.shape, value, statistic.dtype, statistic.device, stream_of(statistic)
    return _constant(*place)


@lru_cache(maxsize=256)
def _constant(shape, value, dtype, device, stream):
    return torch.full(shape, value, dtype=dtype, device=device)


def input_gradient(g, first, second, rstd, dims, centered=True):
    """Return the gradient of a norm's input, (g - mean(g) - x~1 mean(x~2 g)) rstd; without mean(g) unless `centered`.

    g is the gradient of the norm's result, times the weight. x~1 and x~2, which may be the same, are `first` and
    `second`. Means are taken over `dims`.
    """
    inner = g - first * (second * g).mean(dims, keepdim=True)
    if centered:
        inner = inner - g.mean(dims, keepdim=True)
    return inner * rstd
