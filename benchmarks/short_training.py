"""One short training run, as every small task here has it."""

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
    """AdamW with a cosine to zero, in place; the mean loss of the last tenth of the steps.

    batches: as many as there are steps. seed: of what the model draws. progress: told each step done. torch's random
    state is left as it was.
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
    """`train`, then a test in evaluation mode: {"final": the loss there, "train": that of training, and its scores}.

    batches: without end, from a generator, which has the seed too. test: model -> (loss, {score: value}).
    """
    generator = torch.Generator().manual_seed(seed)
    of_training = train(model, batches(generator), loss, steps, learning_rate, seed, progress)
    model.eval()
    with torch.no_grad():
        final, scores = test(model)
    model.train()
    return {"final": final, "train": of_training, **scores}
