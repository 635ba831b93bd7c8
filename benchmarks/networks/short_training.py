"""A short training run with AdamW, which small tasks have in common."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


def train(
    model: nn.Module,
    batches: Iterator,
    loss: Callable[[nn.Module, object], Tensor],
    steps: int,
    learning_rate: float,
    seed: int,
    progress: Callable[[int], None] = lambda step: None,
) -> float:
    """Train a model in place with AdamW. The learning rate falls to zero along a cosine.

    torch's random state is restored.

    Args:
        model: The model.
        batches: Yields at least one batch for each step.
        loss: A function of the model and a batch.
        steps: The number of steps.
        learning_rate: The learning rate of the first step.
        seed: The seed of random numbers that the model draws, such as those of random rounding.
        progress: Called after every step with the number of steps done.

    Returns:
        The mean loss of the last tenth of the steps.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    losses = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for step in range(steps):
            value = loss(model, next(batches))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
            losses.append(value.item())
            progress(step + 1)
    return statistics.fmean(losses[-max(steps // 10, 1) :])


def train_and_test(
    model: nn.Module,
    batches: Callable[[torch.Generator], Iterator],
    loss: Callable[[nn.Module, object], Tensor],
    test: Callable[[nn.Module], tuple[float, dict[str, float]]],
    steps: int,
    learning_rate: float,
    seed: int,
    progress: Callable[[int], None] = lambda step: None,
) -> dict[str, float]:
    """Train a model with `train`, then test it in evaluation mode.

    Args:
        model: The model.
        batches: A function that yields batches without end, drawn with the given generator. Its seed is `seed`.
        loss: A function of the model and a batch.
        test: A function of the model that returns (loss, {name of a score: value}).
        steps: The number of steps.
        learning_rate: The learning rate of the first step.
        seed: The seed of the batches and of random numbers that the model draws.
        progress: Called after every step with the number of steps done.

    Returns:
        "final": the loss of the test. "train": the result of `train`. In addition, the scores of the test.
    """
    generator = torch.Generator().manual_seed(seed)
    of_training = train(model, batches(generator), loss, steps, learning_rate, seed, progress)
    model.eval()
    with torch.no_grad():
        final, scores = test(model)
    model.train()
    return {"final": final, "train": of_training, **scores}
