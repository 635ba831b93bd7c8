"""Workloads for measuring training steps without a data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from fewbit import models
from fewbit.errors import InputError

IMAGES, IMAGE_SIZE, CLASSES = 16, 64, 1000
SEQUENCES, TOKENS = 4, 64
MASKED = 0.15
"""The share of tokens that RoBERTa's training masks, the same in every sequence."""


class Workload(NamedTuple):
    """A model with random weights, random batches and a loss.

    Attributes:
        model: The model, in training mode.
        batches: The batches. Each is a tuple of tensors, as the loss expects it.
        loss: Called as `loss(model, batch)`; returns the mean loss over the samples.
    """

    model: nn.Module
    batches: list[tuple[torch.Tensor, ...]]
    loss: Callable[[nn.Module, tuple], torch.Tensor]


def workload(
    name: str,
    *,
    batch: int | None = None,
    size: int | None = None,
    batches: int = 4,
    seed: int = 0,
) -> Workload:
    """Make the workload of a model. Equal arguments give equal workloads. torch's random state does not change.

    Images are normal noise with random classes, and texts are random tokens: RoBERTa predicts masked tokens, GPT-2 the next
    ones. A batch has 16 images or 4 sequences by default; `size` is the side of images in pixels, or the number of tokens
    (64).

    Raises:
        FewbitError: The name is unknown, the model does not accept the size, or a number is below 1.
    """
    name = models.resolve(name)
    is_text = models.family(name).is_text
    batch = (SEQUENCES if is_text else IMAGES) if batch is None else batch
    size = models.check_size(name, (TOKENS if is_text else IMAGE_SIZE) if size is None else size)
    for what, number in (("batch", batch), ("batches", batches)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InputError(f"{what}: expected an integer of at least 1, got {number!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if not is_text:
            model = models.build(name)
            made = [_images(batch, size) for _ in range(batches)]
            return Workload(model, made, classification_loss)
        from fewbit.models import transformer

        model = transformer.build(name, attention="sdpa").train()
        words = model.config.vocab_size
        if models.family(name).name == "RoBERTa":
            made = [_masked(batch, size, words) for _ in range(batches)]
            return Workload(model, made, masked_loss)
        made = [(torch.randint(words, (batch, size)),) for _ in range(batches)]
        return Workload(model, made, next_token_loss)


def classification_loss(model, batch) -> torch.Tensor:
    """Return the mean cross entropy for images (N, 3, size, size) and classes (N,) int64."""
    images, classes = batch
    return F.cross_entropy(model(images), classes)


def masked_loss(model, batch) -> torch.Tensor:
    """Return the mean cross entropy of masked tokens, with the embedding's weight as last layer.

    `batch` has three int64 tensors: the tokens (N, T), the masked positions (N, M), and the original tokens there (N, M).
    """
    tokens, places, masked = batch
    states = model(tokens).last_hidden_state
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    logits = F.linear(states[rows, places], model.get_input_embeddings().weight)
    return F.cross_entropy(logits.flatten(0, 1), masked.flatten())


def next_token_loss(model, batch) -> torch.Tensor:
    """Return the mean cross entropy of next tokens, with the embedding's weight as last layer. `batch` is ((N, T) int64,)."""
    (tokens,) = batch
    states = model(tokens).last_hidden_state[:, :-1]
    logits = F.linear(states, model.get_input_embeddings().weight)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _images(batch, size):
    return torch.randn(batch, 3, size, size), torch.randint(CLASSES, (batch,))


def _masked(batch, size, words):
    tokens = torch.randint(words - 1, (batch, size))
    count = max(1, round(MASKED * size))
    # Without the copy, `places` would keep the memory of all positions alive.
    places = torch.rand(batch, size).argsort(1)[:, :count].clone()
    masked = tokens.gather(1, places)
    return tokens.scatter(1, places, words - 1), places, masked
