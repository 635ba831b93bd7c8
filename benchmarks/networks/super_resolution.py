"""A small network that doubles the size of images (super-resolution), trained on scikit-learn's two photographs.

The network's inputs are the photographs at half their size (bicubic, antialiased). The bottom third of each photograph
is held out of the training, for the test.
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
PATCH, BATCH, STEPS, LEARNING_RATE = 20, 12, 1200, 4e-3  # PATCH: pixels of small images
WIDTH, BLOCKS = 24, 3
BORDER = 4
"""The width, in pixels, of the edges of a test image that are ignored, because their pixels lack neighbors."""


class Block(nn.Module):
    """A residual block of EDSR: two 3x3 convolutions with a ReLU between them, and no norms."""

    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class SuperResolution(nn.Module):
    """Maps images (N, 3, H, W) to (N, 3, 2 H, 2 W). The network computes a correction of the bicubic interpolation."""

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
    """Enlarge images to twice their size by bicubic interpolation. Values outside 0 to 1 are not clipped."""
    return interpolate(x, scale_factor=SCALE, mode="bicubic", align_corners=False)


@functools.cache
def photographs() -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Return (train, test), each a list with a pair (small, large) for each photograph.

    The images are (3, H, W) and (3, 2 H, 2 W), float32 from 0 to 1.
    """
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
    """Yield batches (small, large) of random patches without end.

    `small` is (BATCH, 3, PATCH, PATCH), and `large` has twice the height and width.
    """
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
    """Return the mean peak signal-to-noise ratio over the test images, in dB: 10 log10(1 / mean squared error).

    Args:
        enlarge: A function that doubles the size of images (N, 3, H, W).
    """
    found = []
    for small, large in photographs()[1]:
        off = (enlarge(small[None])[0].clamp(0, 1) - large)[:, BORDER:-BORDER, BORDER:-BORDER]
        found.append(-10 * math.log10(off.double().square().mean().item()))
    return statistics.fmean(found)


def test(model: nn.Module) -> tuple[float, dict[str, float]]:
    """Return (loss, {"psnr": peak signal-to-noise ratio in dB}) on the test images."""
    score = psnr(model)
    pairs = [(small[None], large[None]) for small, large in photographs()[1]]
    return statistics.fmean(loss(model, pair).item() for pair in pairs), {"psnr": score}
