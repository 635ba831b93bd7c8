"""A small text classifier. It tells from which package of Python's standard library a passage of 128 characters is.

The last fifth of every file is held out of the training. Test passages come from there.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

PACKAGES = (
    "asyncio",
    "email",
    "http",
    "importlib",
    "logging",
    "multiprocessing",
    "unittest",
    "xml",
)
TESTS = {"test", "tests"}
PASSAGE, CHARACTERS, OTHER = 128, 128, 127
HELD_OUT = 0.2
TEST_PASSAGES = 256
"""The number of test passages of each package."""
STEPS, BATCH, LEARNING_RATE = 600, 64, 3e-3
WIDTH = 64


class TextClassifier(nn.Sequential):
    """Three convolutions over embedded characters, from (batch, PASSAGE) int64 to logits (batch, packages)."""

    def __init__(self):
        super().__init__(
            nn.Embedding(CHARACTERS, WIDTH // 2),
            Transposed(),
            *_convolution(WIDTH // 2, WIDTH),
            nn.MaxPool1d(2),
            *_convolution(WIDTH, WIDTH),
            nn.MaxPool1d(2),
            *_convolution(WIDTH, 2 * WIDTH),
            nn.AdaptiveMaxPool1d(1),
            nn.Flatten(),
            nn.Linear(2 * WIDTH, len(PACKAGES)),
        )


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Transpose (batch, length, channels) to (batch, channels, length), for convolutions."""
        return x.transpose(1, 2).contiguous()


def _convolution(inputs: int, outputs: int):
    return nn.Conv1d(inputs, outputs, 5, padding=2), nn.BatchNorm1d(outputs), nn.ReLU()


@functools.cache
def texts() -> list[tuple[Tensor, Tensor]]:
    """Return (train, test) for each package: character codes, (n,) int64, with OTHER for what is not ASCII."""
    found = []
    for package in PACKAGES:
        (folder,) = importlib.util.find_spec(package).submodule_search_locations
        train, test = [], []
        for path in sorted(Path(folder).rglob("*.py")):
            if TESTS.intersection(path.parts):  # some systems do not install tests
                continue
            text = path.read_text(encoding="utf-8")
            numbers = torch.tensor([min(ord(c), OTHER) for c in text], dtype=torch.long)
            cut = round(len(numbers) * (1 - HELD_OUT))
            train.append(numbers[:cut])
            test.append(numbers[cut:])
        found.append((torch.cat(train), torch.cat(test)))
    return found


@functools.cache
def test_passages() -> tuple[Tensor, Tensor]:
    """Return (passages, labels) for the test: passages spread evenly over the held-out text of each package."""
    passages = []
    for _, test in texts():
        starts = torch.linspace(0, len(test) - PASSAGE, TEST_PASSAGES).long()
        passages.append(test[starts[:, None] + torch.arange(PASSAGE)])
    return torch.cat(passages), torch.arange(len(PACKAGES)).repeat_interleave(TEST_PASSAGES)


def batches(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches (passages, labels) without end. Each package has the same probability."""
    places = torch.arange(PASSAGE)
    while True:
        labels = torch.randint(len(PACKAGES), (BATCH,), generator=generator)
        where = torch.rand(BATCH, generator=generator, dtype=torch.float64)
        passages = []
        for label, share in zip(labels.tolist(), where.tolist(), strict=True):
            train, _ = texts()[label]
            passages.append(train[int(share * (len(train) - PASSAGE)) + places])
        yield torch.stack(passages), labels


def build(seed: int) -> TextClassifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TextClassifier()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    passages, labels = batch
    return cross_entropy(model(passages), labels)


def test(model: nn.Module) -> tuple[float, dict[str, float]]:
    """Return (loss, {"accuracy": accuracy}) on the test passages."""
    passages, labels = test_passages()
    logits = torch.cat([model(part) for part in passages.split(256)])
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    return cross_entropy(logits, labels).item(), {"accuracy": accuracy}
