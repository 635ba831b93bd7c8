"""A small network for super-resolution, twice the size, on scikit-learn's two photographs.

Small images are the photographs at half their size (bicubic, antialiased). The bottom third of each photograph is never
trained on, and is what the test is about.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator

import torch
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn.functional import interpolate, l1_loss

SCALE = 2
PATCH, BATCH, STEPS, LEARNING_RATE = 20, 12, 1200, 4e-3  # patches of small images
WIDTH, BLOCKS = 24, 3
BORDER = 4
"""Pixels at the edges of a test image that do not count, as they lack neighbors."""


class Block(nn.Module):
    """Two 3x3 convolutions with a ReLU between, added to what came in; no norms (EDSR)."""

    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class SuperResolution(nn.Module):
    """(N, 3, H, W) to (N, 3, 2 H, 2 W): what is added to the bicubic interpolation."""

    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.body = nn.Sequential(
            *(Block(WIDTH) for _ in range(BLOCKS)), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        )
        self.tail = nn.Sequential(
            nn.Conv2d(WIDTH, 3 * SCALE**2, 3, padding=1), nn.PixelShuffle(SCALE)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = self.head(x)
        return self.tail(features + self.body(features)) + enlarged(x)


def enlarged(x: Tensor) -> Tensor:
    """Bicubic, not clipped."""
    return interpolate(x, scale_factor=SCALE, mode="bicubic", align_corners=False)


@functools.cache
def photographs() -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """(train, test): of each photograph a pair (small, large), (3, H, W) and (3, 2 H, 2 W) float32 from 0 to 1."""
    train, test = [], []
    for image in load_sample_images().images:
        large = torch.from_numpy(image.copy()).permute(2, 0, 1).float() / 255
        height, width = (each - each % SCALE for each in large.shape[1:])
        cut = height * 2 // 3 // SCALE * SCALE
        for part, of in ((large[:, :cut, :width], train), (large[:, cut:height, :width], test)):
            small = interpolate(
                part[None], scale_factor=1 / SCALE, mode="bicubic", antialias=True
            ).clamp(0, 1)
            of.append((small[0], part))
    return train, test


def batches(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """(small, large) patches without end, (BATCH, 3, PATCH, PATCH) and twice that, from random places."""
    pairs, _ = photographs()
    while True:
        chosen = []
        for which in torch.randint(len(pairs), (BATCH,), generator=generator).tolist():
            small, large = pairs[which]
            y, x = (
                int(torch.randint(size - PATCH + 1, (), generator=generator))
                for size in small.shape[1:]
            )
            there = [slice(each * SCALE, (each + PATCH) * SCALE) for each in (y, x)]
            chosen.append((small[:, y : y + PATCH, x : x + PATCH], large[:, there[0], there[1]]))
        yield tuple(torch.stack(each) for each in zip(*chosen, strict=True))


def build(seed: int) -> SuperResolution:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SuperResolution()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    small, large = batch
    return l1_loss(model(small), large)


def psnr(enlarge: Callable[[Tensor], Tensor]) -> float:
    """Mean over the test images, in dB, of 10 log10 of 1 / the mean squared error."""
    found = []
    for small, large in photographs()[1]:
        off = (enlarge(small[None])[0].clamp(0, 1) - large)[:, BORDER:-BORDER, BORDER:-BORDER]
        found.append(-10 * math.log10(off.double().square().mean().item()))
    return statistics.fmean(found)


def test(model: nn.Module) -> tuple[float, dict[str, float]]:
    """(loss, PSNR) on the test images."""
    score = psnr(model)
    pairs = [(small[None], large[None]) for small, large in photographs()[1]]
    return statistics.fmean(loss(model, pair).item() for pair in pairs), {"psnr": score}
