"""A small causal transformer over characters, in plain torch.nn."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Causal self-attention, then an MLP with 4 * width hidden units, each after a layer norm and with a residual connection."""

    def __init__(self, width: int, heads: int, activation: Callable[[], nn.Module]):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), activation(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class CharTransformer(nn.Module):
    """A transformer that computes logits, (batch, context, vocabulary), of the next characters for characters (batch, context) int64.

    Its sizes are those of `TrainingSettings`. `activation` is the class of the activation modules, or a function that makes one.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int,
        depth: int,
        heads: int,
        activation: Callable[[], nn.Module] = nn.GELU,
    ):
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads, activation) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        for embedding in (self.characters.weight, self.positions):
            nn.init.normal_(embedding, std=0.02)  # as in GPT-2

    def forward(self, characters: Tensor) -> Tensor:
        x = self.characters(characters) + self.positions[: characters.shape[1]]
        return self.head(self.norm(self.blocks(x)))
