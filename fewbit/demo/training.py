"""One training run of the demo's transformer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fewbit.demo.small_transformer import CharTransformer
from fewbit.demo.text import Corpus
from fewbit.errors import InputError

MOST_STEPS = 100_000


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training run, except the activation and the seed.

    Attributes:
        steps: The number of training steps, 1 to 100,000.
        batch: The number of windows in a batch.
        context: The number of characters in a window.
        width: The width of the transformer's residual stream.
        learning_rate: The largest learning rate.
        weight_decay: The weight decay of AdamW.
        warmup: The fraction of the steps in which the learning rate grows.
        clip: The norm to which larger gradients are clipped.
        held_out_windows: The number of windows of held-out text for the final loss.
    """

    steps: int = 600
    batch: int = 32
    context: int = 64
    width: int = 64
    depth: int = 2
    heads: int = 4
    learning_rate: float = 1e-2
    weight_decay: float = 0.01
    warmup: float = 0.1
    clip: float = 1.0
    held_out_windows: int = 256

    def __post_init__(self):
        if not 1 <= self.steps <= MOST_STEPS:
            raise InputError(f"steps: expected 1 to {MOST_STEPS}, got {self.steps!r}")


@dataclass(frozen=True)
class Run:
    """The losses of a training run: mean cross entropies per character, in nats.

    Attributes:
        seed: The seed of weights and batches.
        train: For each step, the loss of its batch before the weights are updated.
        final: The loss on the held-out windows after the last step.
    """

    seed: int
    train: tuple[float, ...]
    final: float


def build(
    corpus: Corpus, settings: TrainingSettings, activation: Callable[[], nn.Module], seed: int
):
    """Build the transformer. Its initial parameters depend on the seed, not on the activation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CharTransformer(
            len(corpus.alphabet),
            settings.context,
            settings.width,
            settings.depth,
            settings.heads,
            activation,
        )


def loss(model: nn.Module, characters, following) -> torch.Tensor:
    """Return the mean cross entropy of the next characters, in nats; both tensors are (size, context) int64."""
    return cross_entropy(model(characters).flatten(0, 1), following.flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus, settings: TrainingSettings) -> float:
    """Return the mean cross entropy over the held-out windows, in nats."""
    model.eval()
    pairs = corpus.held_out_batch(settings.held_out_windows, settings.context)
    chunks = zip(*(tensor.split(64) for tensor in pairs), strict=True)
    total = sum(loss(model, x, y).item() * len(x) for x, y in chunks)
    model.train()
    return total / settings.held_out_windows


def train(
    model: nn.Module,
    corpus: Corpus,
    settings: TrainingSettings,
    seed: int,
    progress: Callable[[int], None] = lambda step: None,
) -> Run:
    """Train a model in place with AdamW. The learning rate grows linearly, then falls to zero along a cosine.

    Batches and random rounding depend on the seed alone, and torch's random state is restored. `progress` gets the number of steps done.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings))
    batches = torch.Generator().manual_seed(seed)
    losses = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for step in range(settings.steps):
            value = loss(model, *corpus.batch(settings.batch, settings.context, batches))
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            schedule.step()
            losses.append(value.item())
            progress(step + 1)
    return Run(seed, tuple(losses), held_out_loss(model, corpus, settings))


def _rate(step: int, settings: TrainingSettings) -> float:
    done = (step + 1) / settings.steps
    if done < settings.warmup:
        return done / settings.warmup
    return 0.5 * (1 + math.cos(math.pi * (done - settings.warmup) / (1 - settings.warmup)))
