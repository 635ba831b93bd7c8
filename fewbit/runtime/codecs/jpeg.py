"""The codec `jpeg`: a cosine transform of blocks of images, whose coefficients are rounded (docs/concepts/codecs.md)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from fewbit.errors import InputError
from fewbit.runtime.codecs import streams
from fewbit.runtime.codecs.payload import (
    Codec,
    Payload,
    exact,
    largest,
    left_over,
    smaller,
)

EDGE = 8
"""The largest height and width of a block. A shorter dimension of an image is not divided."""
FACTORS = tuple(2.0 ** (quarters / 4) for quarters in (8, 6, 4, 3, 2, 1))
"""Factors of the step that keeps the bound for any data; the largest that fits the data is used."""
ROUNDINGS = 32
"""The number of times that the transform and its inverse round a value in float32."""
MOST_STEPS = 2**15 - 1
"""The largest magnitude of a coefficient, in steps, with which a tensor becomes smaller."""


class Jpeg(Codec):
    """A codec that applies the cosine transform to blocks of 8 by 8 elements and rounds the coefficients at random.

    Values are exact in expectation. The bound is that of `Quant`. Tensors must have shape (N, C, H, W). The host waits
    for the device several times.
    """

    name = "jpeg"

    def _compress(self, x, limits, seed) -> Payload:
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
        # If the bound is the square of the largest magnitude, all values become zero, so a larger bound gains nothing.
        rest = torch.where(magnitude > 0, torch.minimum(rest, magnitude.square()), 1.0)
        coefficients = _coefficients(x)
        steps = _steps(coefficients, rest, x.numel() // len(rest)).to(x.device, torch.float32)
        generator = None if seed is None else torch.Generator(x.device).manual_seed(int(seed))
        draws = torch.rand(coefficients.shape, generator=generator, device=x.device)
        numbers = (coefficients / steps.view(-1, 1, 1) + draws).floor()
        if float(numbers.abs().amax()) > MOST_STEPS:
            return exact(x)
        words, widths, nonzeros = streams.write(numbers.to(torch.int32).transpose(1, 2))
        return smaller(x, (steps, widths, words), Transformed(tuple(x.shape), x.dtype, nonzeros))


class Transformed(NamedTuple):
    """The spec of a tensor that the codec `jpeg` compressed.

    The payload's tensors are the steps, (1,) or (C,) float32, and the `widths` and `words` of the packed coefficients
    (`streams.write`).
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    nonzeros: tuple[int, ...]
    codec = Jpeg.name
    count = 3

    def dequantize(self, tensors) -> torch.Tensor:
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
        # A long step can move a value beyond the range of a 16-bit dtype.
        most = min(torch.finfo(dtype).max for dtype in (self.dtype, torch.float32))
        return values.clamp(-most, most).to(self.dtype)


def _coefficients(x) -> torch.Tensor:
    samples, channels, height, width = x.shape
    h, w = min(EDGE, height), min(EDGE, width)
    padded = torch.nn.functional.pad(x.float(), (0, -width % w, 0, -height % h), mode="replicate")
    rows, columns = padded.shape[2] // h, padded.shape[3] // w
    blocks = padded.view(samples, channels, rows, h, columns, w).permute(1, 0, 2, 4, 3, 5)
    result = _cosines(h, x.device) @ blocks @ _cosines(w, x.device).T
    return result.reshape(channels, samples * rows * columns, h * w)


def _steps(coefficients, rest, elements: int) -> torch.Tensor:
    """Return the longest steps whose expected squared error is at most `rest`; both (1,) or (C,) float64.

    The step 2 sqrt(rest) suffices for any data (docs/concepts/codecs.md). This step times each of FACTORS is tried.
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


@lru_cache(maxsize=64)
def _cosines(n: int, device) -> torch.Tensor:
    """Return the matrix of the orthonormal cosine transform DCT-II, (n, n) float32, one frequency in each row."""
    place = torch.arange(n, dtype=torch.float64)
    rows = torch.cos(math.pi / n * (place + 0.5) * place.view(-1, 1)) * math.sqrt(2 / n)
    rows[0] = math.sqrt(1 / n)
    return rows.to(device, torch.float32)
