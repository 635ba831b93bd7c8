"""A small ResNet for scikit-learn's images of digits, 8 by 8 pixels, and a function that trains it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from networks.short_training import train_and_test
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

EPOCHS, BATCH, LEARNING_RATE = 15, 64, 5e-3
WIDTHS = (16, 32)


class Block(nn.Module):
    """A residual block: two 3x3 convolutions with batch norm, and a shortcut (the identity or a 1x1 convolution)."""

    def __init__(self, inputs: int, outputs: int, stride: int, activation: Callable):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            activation(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = inputs == outputs and stride == 1
        self.short_cut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride)
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.body(x) + self.short_cut(x))


class DigitsResNet(nn.Sequential):
    """The ResNet, with two blocks of each width. It maps images (batch, 1, 8, 8) float32 to logits (batch, 10)."""

    def __init__(self, activation: Callable[[], nn.Module]):
        first, *_ = WIDTHS
        stem = [nn.Conv2d(1, first, 3, 1, 1, bias=False), nn.BatchNorm2d(first), activation()]
        blocks, inputs = [], first
        for i, width in enumerate(WIDTHS):
            blocks += [Block(inputs, width, 1 + (i > 0), activation)]
            blocks += [Block(width, width, 1, activation)]
            inputs = width
        super().__init__(
            *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)
        )


@functools.cache
def digits():
    """Return (train images, train labels, test images, test labels): 1437 and 360 digits, the same in every run.

    Images are (n, 1, 8, 8) float32 from -1 to 1, labels (n,) int64.
    """
    data = load_digits()
    images = torch.from_numpy(data.images.astype(np.float32) / 8 - 1)[:, None]
    labels = torch.from_numpy(data.target).long()
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    cut = len(labels) * 4 // 5
    return (
        images[order[:cut]],
        labels[order[:cut]],
        images[order[cut:]],
        labels[order[cut:]],
    )


def build(activation: Callable[[], nn.Module], seed: int) -> DigitsResNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DigitsResNet(activation)


def batches(generator: torch.Generator):
    """Yield the batches (images, labels) of one epoch, in random order. An incomplete batch is left out."""
    images, labels, _, _ = digits()
    order = torch.randperm(len(labels), generator=generator)
    for part in order.split(BATCH)[: len(labels) // BATCH]:
        yield images[part], labels[part]


def endless_batches(generator: torch.Generator):
    """Yield the batches of one epoch after the other."""
    while True:
        yield from batches(generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def test(model: nn.Module) -> tuple[float, dict[str, float]]:
    """Return (loss, {"accuracy": accuracy}) on the test digits."""
    _, _, images, labels = digits()
    logits = model(images)
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    return cross_entropy(logits, labels).item(), {"accuracy": accuracy}


def train(
    model: nn.Module, seed: int, progress: Callable[[int], None] = lambda step: None
) -> dict[str, float]:
    """Train a model in place for EPOCHS, and return the result of `short_training.train_and_test`."""
    steps = EPOCHS * (len(digits()[1]) // BATCH)
    return train_and_test(model, endless_batches, loss, test, steps, LEARNING_RATE, seed, progress)
