"""The codec `quant`: the group quantizer with as few bits as the bound allows (docs/concepts/codecs.md)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from fewbit.config import GROUP_SIZE, UNIFORM
from fewbit.runtime.backends.reference_quantizer import limits_of
from fewbit.runtime.codecs.payload import (
    Codec,
    Exact,
    Payload,
    codec_of,
    exact,
    left_over,
    smaller,
)
from fewbit.runtime.format import groups, layout
from fewbit.runtime.format.distortion import BITS, largest_distortion
from fewbit.runtime.ops import library, quantizer_ops
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec

FIRST_BITS = 4
"""The number of bits that is tried first. The ranges, from which the final number follows, do not depend on it."""


class Quant(Codec):
    """A codec that saves uniform copies of 1 to 8 bits in groups of 256 elements.

    Values are exact in expectation. The bound limits the expected squared error, averaged over the tensor or over each
    channel with a bound of its own.
    """

    name = "quant"

    def _compress(self, x, limits, seed) -> Payload:
        return quantized(x, limits, seed)


class ByChannel(NamedTuple):
    """The spec of a tensor whose channels have different numbers of bits.

    `parts` has pairs (channels with the same number of bits, spec).
    """

    parts: tuple[tuple[tuple[int, ...], object], ...]
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def codec(self) -> str:
        """`quant+zvc` if some channels were saved without their zeros, else `quant`."""
        codecs = {codec_of(spec) for _, spec in self.parts}
        return "quant+zvc" if "quant+zvc" in codecs else Quant.name

    @property
    def count(self) -> int:
        return sum(spec.count for _, spec in self.parts)

    def dequantize(self, tensors) -> torch.Tensor:
        values = torch.empty(self.size, dtype=self.dtype, device=tensors[0].device)
        rows, rest = values.transpose(0, 1), tuple(tensors)
        for channels, spec in self.parts:
            index = torch.tensor(channels, device=values.device)
            rows[index] = spec.dequantize(rest[: spec.count])
            rest = rest[spec.count :]
        return values


def quantized(
    x, limits, seed, changed: Callable[..., Payload] = lambda x, payload: payload
) -> Payload:
    """Quantize a tensor, each channel with the fewest bits that keep the bound, and return changed(part, payload) for all parts.

    Channels of fewer than 64 elements share groups, so the whole tensor is one part with the smallest bound.
    """
    if not x.numel():
        return exact(x)
    seed = library.new_seed(x) if seed is None else seed
    if len(limits) == 1 or x.numel() // x.shape[1] < groups.LEAST_FEATURES:
        # A group contains several of such short channels, so the smallest bound has to hold for all channels.
        return changed(x, _whole(x, limits.min(), seed))
    rows = x.transpose(0, 1).contiguous()
    _, ranges = quantizer_ops.quantize(rows, seed, 1, GROUP_SIZE)
    widths = widths_for(ranges, rows.shape, limits, x.dtype)
    parts, tensors = (), ()
    for bits in sorted(set(widths)):
        channels = tuple(channel for channel, width in enumerate(widths) if width == bits)
        part = rows[list(channels)]
        # With the same seed, two parts would be rounded with the same random numbers.
        payload = changed(part, _quantized(part, seed + len(parts), bits))
        parts, tensors = (*parts, (channels, payload.spec)), tensors + payload.tensors
    if all(isinstance(spec, Exact) for _, spec in parts):
        return exact(x)
    return smaller(x, tensors, ByChannel(parts, tuple(x.shape), x.dtype))


def widths_for(ranges, size, limits, dtype) -> list[int]:
    """Return the fewest bits, 1 to 8, that keep each sample's expected squared error within its limit; 0 if 8 are not enough.

    `ranges` are those of a uniform copy of a tensor of this size and dtype. `limits` is (samples,) float64, for samples
    of at least 64 elements, or (1,) to get one number of bits for all samples.
    """
    square, magnitude = _spread(ranges, size)
    if len(limits) == 1:
        square, magnitude = square.mean(0, keepdim=True), magnitude.amax(0, keepdim=True)
    square, magnitude = torch.stack((square, magnitude)).cpu()
    rest = left_over(limits, magnitude, dtype)
    # The value of the largest code may exceed the largest element a little, and so exceed the dtype's maximum.
    rest[magnitude > min(torch.finfo(kind).max for kind in (dtype, torch.float32))] = 0
    return [_bits(*sample) for sample in zip(square.tolist(), rest.tolist(), strict=True)]


def _bits(square: float, limit: float) -> int:
    """Return the bits for a mean range^2 of `square`; 0 if 8 are not enough or a range is not finite."""
    if not (math.isfinite(square) and limit > 0):
        return 0
    fits = (bits for bits in BITS if square * largest_distortion(UNIFORM, bits) <= limit)
    return next(fits, 0)


def _spread(ranges, size):
    """Return each sample's mean of range^2 over its elements, and largest magnitude, two float64 vectors.

    Samples of fewer than 64 elements count as one.
    """
    samples, features = groups.samples_of(size)
    if features < groups.LEAST_FEATURES:
        samples, features = 1, samples * features
    minimum, extent = (column.double().view(samples, -1) for column in limits_of(ranges))
    length = torch.full_like(minimum[0], GROUP_SIZE)
    length[-1] = features - (len(length) - 1) * GROUP_SIZE
    square = (extent.square() * length).sum(1) / features
    return square, torch.maximum(minimum.abs(), (minimum + extent).abs()).amax(1)


def _whole(x, limit, seed) -> Payload:
    packed, ranges = quantizer_ops.quantize(x, seed, FIRST_BITS, GROUP_SIZE)
    (bits,) = widths_for(ranges, x.shape, limit.reshape(1), x.dtype)
    if bits != FIRST_BITS:
        return _quantized(x, seed, bits)
    return smaller(x, (packed, ranges), _spec(x, bits))


def _quantized(x, seed, bits: int) -> Payload:
    if not bits:
        return exact(x)
    tensors = quantizer_ops.quantize(x, seed, bits, GROUP_SIZE)
    return smaller(x, tensors, _spec(x, bits))


def _spec(x, bits: int) -> QuantizedTensorSpec:
    stride = tuple(layout.by_sample_stride(x))
    return QuantizedTensorSpec(bits, GROUP_SIZE, tuple(x.shape), stride, x.dtype)
