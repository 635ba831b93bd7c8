"""`jpeg`: block cosine transform of spatial activations (AC-GC, section 5: AutoJPEG's role, not its method).

The paper finds the relation of JPEG's levels to the error by experiment. This transform is orthonormal, so the
squared error of the coefficients is that of the values, and the step follows from the bound.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from fewbit.errors import InputError
from fewbit.runtime.codecs import streams
from fewbit.runtime.codecs.payload import (
    Payload,
    checked,
    exact,
    largest,
    left_over,
    mapped,
    restored,
    smaller,
)

EDGE = 8
"""Of a block; a smaller image is one block."""
FACTORS = tuple(2.0 ** (each / 4) for each in (8, 6, 4, 3, 2, 1))
"""By which the step that suffices for any data is made longer, where the error expected of this data allows it."""
ROUNDINGS = 32
"""Of a value, in float32, by the transform and back."""
MOST_STEPS = 2**15 - 1
"""Of a coefficient; a bound that asks for more gains nothing."""


class Jpeg:
    """Cosine transform of 8 by 8 blocks, coefficients rounded at random to multiples of one step. Unbiased.

    For (N, C, H, W) only; InputError for any other shape. The expected squared error is at most the bound, on
    average over the tensor, or over each channel: it is computed from the coefficients. Sizes and widths depend on the data: it
    synchronizes several times.
    """

    name = "jpeg"

    def compress(self, tensor, bound, seed=None) -> Payload:
        """As `Codec.compress`."""
        limits = checked(tensor, bound, seed)
        x = tensor.detach()
        if x.dim() != 4:
            raise InputError(
                f"expected activations of shape (N, C, H, W) for jpeg, got shape {tuple(x.shape)}"
            )
        if not x.numel():
            return exact(x)
        magnitude = largest(x, len(limits) > 1)
        rest = left_over(limits, magnitude, x.dtype, ROUNDINGS)
        if not bool(((rest > 0) & magnitude.isfinite() & (magnitude < 1e30)).all()):
            return exact(x)
        # All is zero at a bound of the greatest square, and beyond it.
        rest = torch.where(magnitude > 0, torch.minimum(rest, magnitude.square()), 1.0)
        return _compressed(x, rest, seed)

    def decompress(self, payload: Payload) -> torch.Tensor:
        return restored(payload)


class Transformed(NamedTuple):
    """How coefficients become values. nonzeros: as `streams.read` asks for."""

    size: tuple[int, ...]
    dtype: torch.dtype
    nonzeros: tuple[int, ...]
    codec = Jpeg.name
    count = 3

    def dequantize(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        """The values, contiguous; affine: as for `QuantizedTensorSpec.dequantize`."""
        steps, widths, words = tensors
        samples, channels, height, width = self.size
        h, w = min(EDGE, height), min(EDGE, width)
        rows, columns = -(-height // h), -(-width // w)
        blocks = samples * rows * columns
        numbers = streams.read(words, widths, blocks, self.nonzeros)  # (C, K, blocks)
        coefficients = (numbers * steps.view(-1, 1, 1)).transpose(1, 2)
        shape = channels, samples, rows, columns, h, w
        values = (
            _cosines(h, words.device).T @ coefficients.reshape(shape) @ _cosines(w, words.device)
        )
        values = values.permute(1, 0, 2, 4, 3, 5).reshape(samples, channels, rows * h, columns * w)
        values = values[:, :, :height, :width].contiguous()
        # What a long step moved beyond the range of a 16-bit dtype comes nearer so.
        most = min(torch.finfo(each).max for each in (self.dtype, torch.float32))
        values = values.clamp(-most, most)
        if affine is None:
            return values.to(dtype or self.dtype)
        return mapped(values.to(self.dtype), dtype or self.dtype, affine)


def _compressed(x, rest, seed) -> Payload:
    coefficients = _coefficients(x)
    steps = _steps(coefficients, rest, x.numel() // len(rest)).to(x.device, torch.float32)
    draws = torch.rand(coefficients.shape, generator=_generator(x, seed), device=x.device)
    numbers = (coefficients / steps.view(-1, 1, 1) + draws).floor()
    if float(numbers.abs().amax()) > MOST_STEPS:
        return exact(x)
    words, widths, nonzeros = streams.write(numbers.to(torch.int32).transpose(1, 2))
    return smaller(x, (steps, widths, words), Transformed(tuple(x.shape), x.dtype, nonzeros))


def _coefficients(x) -> torch.Tensor:
    """(C, blocks, K) float32, K of a block; images are continued by their last rows and columns."""
    samples, channels, height, width = x.shape
    h, w = min(EDGE, height), min(EDGE, width)
    padded = torch.nn.functional.pad(x.float(), (0, -width % w, 0, -height % h), mode="replicate")
    rows, columns = padded.shape[2] // h, padded.shape[3] // w
    blocks = padded.view(samples, channels, rows, h, columns, w).permute(1, 0, 2, 4, 3, 5)
    result = _cosines(h, x.device) @ blocks @ _cosines(w, x.device).T
    return result.reshape(channels, samples * rows * columns, h * w)


def _steps(coefficients, rest, elements: int) -> torch.Tensor:
    """(1,) or (C,) float64 on the CPU, as rest: the longest steps whose expected error is within it.

    A coefficient c is rounded to s (floor(c / s) + 0 or 1) with variance s^2 p (1 - p), p = c / s - floor(c / s), at most
    s^2 / 4; so is that of any value then, as the rows of the transform have norm 1. elements: for each rest.
    """
    least = 2 * rest.sqrt()
    steps, parts = least.clone(), coefficients.reshape(len(rest), -1)
    for factor in reversed(FACTORS):
        tried = (least * factor).to(coefficients.device, torch.float32)
        p = parts / tried.view(-1, 1)
        p -= p.floor()
        variance = (p * (1 - p)).sum(1, dtype=torch.float64) * tried.double().square()
        fits = variance.cpu() / elements <= rest
        steps = torch.where(fits, tried.cpu().double(), steps)
    return steps


def _generator(x, seed) -> torch.Generator | None:
    return None if seed is None else torch.Generator(x.device).manual_seed(int(seed))


@lru_cache(maxsize=64)
def _cosines(n: int, device) -> torch.Tensor:
    """(n, n) float32: the orthonormal DCT-II, a frequency a row."""
    place = torch.arange(n, dtype=torch.float64)
    rows = torch.cos(math.pi / n * (place + 0.5) * place.view(-1, 1)) * math.sqrt(2 / n)
    rows[0] = math.sqrt(1 / n)
    return rows.to(device, torch.float32)
