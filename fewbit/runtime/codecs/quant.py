"""`quant`: the group quantizer with as few bits as the bound allows (AC-GC, section 5: AutoQuant)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fewbit.config import GROUP_SIZE
from fewbit.runtime.backends.reference_quantizer import limits_of
from fewbit.runtime.codecs.payload import (
    Exact,
    Payload,
    checked,
    kept_by,
    left_over,
    mapped,
    restored,
    smaller,
)
from fewbit.runtime.codecs.payload import exact as exact_payload
from fewbit.runtime.format import groups, layout
from fewbit.runtime.ops import library, quantizer_ops
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec

FIRST_BITS = 4
"""Tried first: the ranges that this yields are those of any width."""


class Quant:
    """Codes of 1 to 8 bits in groups of 256 (docs/quantizer.md). Unbiased.

    The expected squared error is at most the bound, on average over the tensor, or over each channel: a
    rounding error's variance is at most a quarter of the squared step, whatever the data.
    Fewest bits need the ranges on the host: one synchronization.
    """

    name = "quant"

    def compress(self, tensor, bound, seed=None) -> Payload:
        """As `Codec.compress`."""
        limits = checked(tensor, bound, seed)
        x = tensor.detach()
        return joined(x, pieces(x, limits, seed))

    def decompress(self, payload: Payload) -> torch.Tensor:
        return restored(payload)


class Piece(NamedTuple):
    """Channels (None: all) that have one width: their elements, channels outermost unless all, and the payload."""

    channels: tuple[int, ...] | None
    x: torch.Tensor
    payload: Payload


class ByChannel(NamedTuple):
    """How pieces become the tensor again."""

    parts: tuple[tuple[tuple[int, ...], object], ...]  # channels, spec
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def codec(self) -> str:
        """`quant+zvc` where zeros were left out of some part."""
        codecs = {kept_by(spec) for _, spec in self.parts}
        return "quant+zvc" if "quant+zvc" in codecs else Quant.name

    @property
    def count(self) -> int:
        return sum(spec.count for _, spec in self.parts)

    def dequantize(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        """The values, contiguous; affine: as for `QuantizedTensorSpec.dequantize`."""
        values = torch.empty(self.size, dtype=self.dtype, device=tensors[0].device)
        rows, rest = values.transpose(0, 1), tuple(tensors)
        for channels, spec in self.parts:
            index = torch.tensor(channels, device=values.device)
            rows[index] = spec.dequantize(rest[: spec.count])
            rest = rest[spec.count :]
        return mapped(values, dtype or self.dtype, affine)


def pieces(x: torch.Tensor, limits: torch.Tensor, seed: torch.Tensor | None) -> list[Piece]:
    """x quantized, channel by channel where limits has more than one entry."""
    if not x.numel():
        return [Piece(None, x, exact_payload(x))]
    seed = library.new_seed(x) if seed is None else seed
    if len(limits) == 1 or x.numel() // x.shape[1] < groups.LEAST_FEATURES:
        # Groups would run across channels so short: they share the smallest bound.
        return [_whole(x, limits.min(), seed)]
    rows = x.transpose(0, 1).contiguous()
    found = quantizer_ops.quantize(rows, seed, 1, GROUP_SIZE, _fp32_min(x))
    widths = widths_for(found[1], rows.shape, limits, x.dtype)
    result = []
    for bits in sorted(set(widths)):
        channels = tuple(channel for channel, each in enumerate(widths) if each == bits)
        part = rows[list(channels)]
        # In streams of their own, as no two pieces may share draws.
        own = seed + len(result)
        payload = _quantized(part, own, bits, found[1].shape[1] == groups.FP32_MIN_COLUMNS)
        result.append(Piece(channels, part, payload))
    return result


def joined(x: torch.Tensor, parts: list[Piece]) -> Payload:
    """One payload of all pieces of x."""
    if parts[0].channels is None:
        return parts[0].payload
    if all(isinstance(piece.payload.spec, Exact) for piece in parts):
        return exact_payload(x)
    specs = tuple((piece.channels, piece.payload.spec) for piece in parts)
    tensors = tuple(tensor for piece in parts for tensor in piece.payload.tensors)
    return smaller(x, tensors, ByChannel(specs, tuple(x.shape), x.dtype))


def widths_for(ranges, size, limits, dtype) -> list[int]:
    """Of each sample the fewest bits of 1 to 8 that keep the expected squared error within its limit, else 0.

    ranges: those of the group quantizer, of a tensor of that size, samples of 64 features or more; or of any
    size, for a single limit: one width for all. limits: (samples,) or (1,) float64. dtype: of the values.
    At most range^2 / (4 (2^bits - 1)^2) of an element's squared error is rounding to codes.
    """
    square, magnitude = _spread(ranges, size)
    if len(limits) == 1:
        square, magnitude = square.mean(0, keepdim=True), magnitude.amax(0, keepdim=True)
    square, magnitude = torch.stack((square, magnitude)).cpu()
    rest = left_over(limits, magnitude, dtype)
    # The greatest code's value may be a little beyond the greatest element, and so beyond the dtype.
    rest[magnitude > min(torch.finfo(each).max for each in (dtype, torch.float32))] = 0
    return [_bits(each, limit) for each, limit in zip(square.tolist(), rest.tolist(), strict=True)]


def _bits(square: float, limit: float) -> int:
    """square: the mean of range^2. 0 where 8 bits are not enough, or a range is not finite."""
    if not (math.isfinite(square) and limit > 0):
        return 0
    fits = (bits for bits in range(1, 9) if square <= limit * 4 * (2**bits - 1) ** 2)
    return next(fits, 0)


def _spread(ranges, size):
    """Of each sample (those of fewer than 64 features together): mean of range^2, and greatest magnitude; float64."""
    samples, features = groups.samples_of(size)
    if features < groups.LEAST_FEATURES:
        samples, features = 1, samples * features
    minimum, extent = (each.double().view(samples, -1) for each in limits_of(ranges))
    length = torch.full_like(minimum[0], GROUP_SIZE)
    length[-1] = features - (len(length) - 1) * GROUP_SIZE
    square = (extent.square() * length).sum(1) / features
    return square, torch.maximum(minimum.abs(), (minimum + extent).abs()).amax(1)


def _whole(x, limit, seed) -> Piece:
    packed, ranges = quantizer_ops.quantize(x, seed, FIRST_BITS, GROUP_SIZE, _fp32_min(x))
    (bits,) = widths_for(ranges, x.shape, limit.reshape(1), x.dtype)
    if bits != FIRST_BITS:
        return Piece(None, x, _quantized(x, seed, bits, ranges.shape[1] == groups.FP32_MIN_COLUMNS))
    return Piece(None, x, smaller(x, (packed, ranges), _spec(x, bits)))


def _quantized(x, seed, bits: int, fp32_min: bool) -> Payload:
    if not bits:
        return exact_payload(x)
    tensors = quantizer_ops.quantize(x, seed, bits, GROUP_SIZE, fp32_min)
    return smaller(x, tensors, _spec(x, bits))


def _spec(x, bits: int) -> QuantizedTensorSpec:
    stride = tuple(layout.by_sample_stride(x))
    return QuantizedTensorSpec(bits, GROUP_SIZE, tuple(x.shape), stride, x.dtype)


def _fp32_min(x) -> bool | None:
    """On a GPU minimums are always float32: there only a synchronization of its own could tell."""
    return True if x.is_cuda else None
