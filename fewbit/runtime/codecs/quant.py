"""The codec `quant`: the group quantizer with as few bits as the bound allows (AutoQuant in AC-GC, section 5)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fewbit.config import GROUP_SIZE
from fewbit.runtime.backends.reference_quantizer import limits_of
from fewbit.runtime.codecs.payload import (
    Codec,
    Exact,
    Payload,
    codec_of,
    left_over,
    smaller,
)
from fewbit.runtime.codecs.payload import exact as exact_payload
from fewbit.runtime.format import groups, layout
from fewbit.runtime.ops import library, quantizer_ops
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec

FIRST_BITS = 4
"""The number of bits that is tried first; the resulting ranges do not depend on it."""


class Quant(Codec):
    """Saves codes of 1 to 8 bits in groups of 256 elements (docs/quantizer.md).

    Values are exact in expectation. On average over the tensor, or over each channel if each has its own bound, the
    expected squared error is at most the bound: whatever the data, the variance of a rounding error is at most a
    quarter of the squared step. The host waits once for the ranges, to choose the fewest bits.
    """

    name = "quant"

    def _compress(self, x, limits, seed) -> Payload:
        return joined(x, pieces(x, limits, seed))


class Piece(NamedTuple):
    """The channels that are saved with the same number of bits.

    Args:
        channels: the numbers of the channels, or None for all channels.
        x: the elements of the channels. Channels are outermost unless these are all channels.
        payload: the compressed x.
    """

    channels: tuple[int, ...] | None
    x: torch.Tensor
    payload: Payload


class ByChannel(NamedTuple):
    """The spec of a tensor whose channels have different numbers of bits. parts: (channels, spec) of each `Piece`."""

    parts: tuple[tuple[tuple[int, ...], object], ...]
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def codec(self) -> str:
        """`quant+zvc` if some piece was saved without its zeros, else `quant`."""
        codecs = {codec_of(spec) for _, spec in self.parts}
        return "quant+zvc" if "quant+zvc" in codecs else Quant.name

    @property
    def count(self) -> int:
        """The number of tensors of all pieces."""
        return sum(spec.count for _, spec in self.parts)

    def dequantize(self, tensors) -> torch.Tensor:
        """Return the values as a contiguous tensor."""
        values = torch.empty(self.size, dtype=self.dtype, device=tensors[0].device)
        rows, rest = values.transpose(0, 1), tuple(tensors)
        for channels, spec in self.parts:
            index = torch.tensor(channels, device=values.device)
            rows[index] = spec.dequantize(rest[: spec.count])
            rest = rest[spec.count :]
        return values


def pieces(x: torch.Tensor, limits: torch.Tensor, seed: torch.Tensor | None) -> list[Piece]:
    """Quantize x in pieces.

    If each channel has its own limit, the channels that get the same number of bits are one piece. Otherwise the whole
    tensor is one piece.

    Args:
        x: any tensor that `Codec.compress` takes.
        limits: the bounds on the squared error, (1,) or (C,) float64 on the CPU.
        seed: the seed that `Codec.compress` got, or None.
    """
    if not x.numel():
        return [Piece(None, x, exact_payload(x))]
    seed = library.new_seed(x) if seed is None else seed
    if len(limits) == 1 or x.numel() // x.shape[1] < groups.LEAST_FEATURES:
        # Groups run across channels that are so short, so all channels share the smallest bound.
        return [_whole(x, limits.min(), seed)]
    rows = x.transpose(0, 1).contiguous()
    found = quantizer_ops.quantize(rows, seed, 1, GROUP_SIZE, _fp32_min(x))
    widths = widths_for(found[1], rows.shape, limits, x.dtype)
    result = []
    for bits in sorted(set(widths)):
        channels = tuple(channel for channel, width in enumerate(widths) if width == bits)
        part = rows[list(channels)]
        # Two pieces may not share draws, so each has a seed of its own.
        own = seed + len(result)
        payload = _quantized(part, own, bits, found[1].shape[1] == groups.FP32_MIN_COLUMNS)
        result.append(Piece(channels, part, payload))
    return result


def joined(x: torch.Tensor, parts: list[Piece]) -> Payload:
    """Return one payload of x from all of its pieces."""
    if parts[0].channels is None:
        return parts[0].payload
    if all(isinstance(piece.payload.spec, Exact) for piece in parts):
        return exact_payload(x)
    specs = tuple((piece.channels, piece.payload.spec) for piece in parts)
    tensors = tuple(tensor for piece in parts for tensor in piece.payload.tensors)
    return smaller(x, tensors, ByChannel(specs, tuple(x.shape), x.dtype))


def widths_for(ranges, size, limits, dtype) -> list[int]:
    """Return the fewest bits, 1 to 8, with which each sample's expected squared error is within its limit.

    Rounding an element to codes adds at most range^2 / (4 (2^bits - 1)^2) to its squared error.

    Args:
        ranges: the minimum and range of each group, from `quantizer_ops.quantize`.
        size: the size of the quantized tensor. Samples have 64 features or more unless there is a single limit.
        limits: (samples,) float64; or (1,), for which all samples get the same number of bits.
        dtype: the dtype of the values.

    Returns:
        A list of bits. An entry is 0 if 8 bits are not enough.
    """
    square, magnitude = _spread(ranges, size)
    if len(limits) == 1:
        square, magnitude = square.mean(0, keepdim=True), magnitude.amax(0, keepdim=True)
    square, magnitude = torch.stack((square, magnitude)).cpu()
    rest = left_over(limits, magnitude, dtype)
    # The value of the largest code may be a little beyond the largest element, and so beyond the dtype.
    rest[magnitude > min(torch.finfo(kind).max for kind in (dtype, torch.float32))] = 0
    return [_bits(*sample) for sample in zip(square.tolist(), rest.tolist(), strict=True)]


def _bits(square: float, limit: float) -> int:
    """Return the bits for a sample whose mean of range^2 is `square`; 0 if 8 are not enough or a range is not finite."""
    if not (math.isfinite(square) and limit > 0):
        return 0
    fits = (bits for bits in range(1, 9) if square <= limit * 4 * (2**bits - 1) ** 2)
    return next(fits, 0)


def _spread(ranges, size):
    """Return the mean of range^2 and the largest magnitude of each sample, float64; short samples count as one."""
    samples, features = groups.samples_of(size)
    if features < groups.LEAST_FEATURES:
        samples, features = 1, samples * features
    minimum, extent = (column.double().view(samples, -1) for column in limits_of(ranges))
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
    """Return True on a GPU, where the host would have to wait to learn whether x needs float32 minimums; else None."""
    return True if x.is_cuda else None
