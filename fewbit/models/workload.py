"""A model with random weights, synthetic batches and a loss: what a step of training costs, without any data."""

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
"""Of RoBERTa's tokens, as in its training; the same number in each sequence, so that batches take alike bytes."""


class Workload(NamedTuple):
    """loss: called as `loss(model, batch)`, a mean over the samples."""

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
    """Of a name of :func:`fewbit.models.names`: the same for the same seed; torch's random state stays.

    Images of normal noise with random classes, for classification; random tokens, masked for RoBERTa, with the next
    one to be told for GPT-2. batch: samples (16 images, 4 sequences). size: pixels of a side (64) or tokens (64).
    Raises FewbitError for an unknown name, a size that the model does not take, or numbers below 1.
    """
    name = models.resolve(name)
    is_text = models.family(name) in models.TEXT
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
        if models.family(name) == "RoBERTa":
            made = [_masked(batch, size, words) for _ in range(batches)]
            return Workload(model, made, masked_loss)
        made = [(torch.randint(words, (batch, size)),) for _ in range(batches)]
        return Workload(model, made, next_token_loss)


def classification_loss(model, batch) -> torch.Tensor:
    """Cross entropy of classes. batch: images (N, 3, size, size), classes (N,) int64."""
    images, classes = batch
    return F.cross_entropy(model(images), classes)


def masked_loss(model, batch) -> torch.Tensor:
    """Cross entropy of masked tokens, by the embedding's weight.

    batch, int64: tokens (N, T), places (N, M) of those that are masked, which they were (N, M).
    """
    tokens, places, masked = batch
    states = model(tokens).last_hidden_state
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    logits = F.linear(states[rows, places], model.get_input_embeddings().weight)
    return F.cross_entropy(logits.flatten(0, 1), masked.flatten())


def next_token_loss(model, batch) -> torch.Tensor:
    """Cross entropy of each next token, by the embedding's weight. batch: tokens (N, T) int64."""
    (tokens,) = batch
    states = model(tokens).last_hidden_state[:, :-1]
    logits = F.linear(states, model.get_input_embeddings().weight)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _images(batch, size):
    return torch.randn(batch, 3, size, size), torch.randint(CLASSES, (batch,))


def _masked(batch, size, words):
    tokens = torch.randint(words - 1, (batch, size))
    count = max(1, round(MASKED * size))
    # (A slice would keep all that it is a slice of.)
    places = torch.rand(batch, size).argsort(1)[:, :count].clone()
    masked = tokens.gather(1, places)
    return tokens.scatter(1, places, words - 1), places, masked
