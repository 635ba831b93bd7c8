"""The demo's corpus: the English help texts that CPython ships, as numbers, and batches of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbit.errors import FewbitError

HELD_OUT = 0.1
"""The share of the text, at its end, that is never trained on."""


@dataclass(frozen=True)
class Corpus:
    """``train`` and ``held_out``: (n,) int64 character numbers below ``len(alphabet)``."""

    alphabet: str
    train: Tensor
    held_out: Tensor

    @classmethod
    def from_text(cls, text: str) -> Corpus:
        """The last tenth of the text is held out. The alphabet is that of the whole text."""
        alphabet = "".join(sorted(set(text)))
        number = {character: i for i, character in enumerate(alphabet)}
        numbers = torch.tensor([number[character] for character in text])
        cut = round(len(numbers) * (1 - HELD_OUT))
        return cls(alphabet, numbers[:cut], numbers[cut:])

    def batch(self, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(characters, next characters), (size, context) int64 each, from random places of ``train``."""
        starts = torch.randint(len(self.train) - context, (size,), generator=generator)
        windows = self.train[starts[:, None] + torch.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]

    def held_out_batch(self, size: int, context: int) -> tuple[Tensor, Tensor]:
        """The same at ``size`` evenly spread places of ``held_out``: the same ones at every call."""
        starts = torch.linspace(0, len(self.held_out) - context - 1, size).long()
        windows = self.held_out[starts[:, None] + torch.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]


def python_topics() -> Corpus:
    """The texts behind Python's ``help("topics")``, in alphabetical order; FewbitError without them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise FewbitError(
            "expected CPython's help texts (the module pydoc_data.topics), which this Python lacks"
        ) from None
    return Corpus.from_text("\n".join(topics[name] for name in sorted(topics)))
