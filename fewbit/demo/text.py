"""The text of the demo: English help texts that come with CPython."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbit.errors import FewbitError

HELD_OUT = 0.1
"""Share of the text, at its end, that is not used for training."""


@dataclass(frozen=True)
class Corpus:
    """A text in which a number stands for each character.

    Attributes:
        alphabet: All characters of the text, sorted. A character's number is its position in the alphabet.
        train: The first nine tenths of the text, (n,) int64.
        held_out: The last tenth of the text, (m,) int64.
    """

    alphabet: str
    train: Tensor
    held_out: Tensor

    @classmethod
    def from_text(cls, text: str) -> Corpus:
        """Make the corpus of a text."""
        alphabet = "".join(sorted(set(text)))
        number = {character: i for i, character in enumerate(alphabet)}
        numbers = torch.tensor([number[character] for character in text])
        cut = round(len(numbers) * (1 - HELD_OUT))
        return cls(alphabet, numbers[:cut], numbers[cut:])

    def batch(self, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return `size` random windows of `train`, and for each character the next; both (size, context) int64."""
        starts = torch.randint(len(self.train) - context, (size,), generator=generator)
        windows = self.train[starts[:, None] + torch.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]

    def held_out_batch(self, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Return `size` evenly spaced windows of `held_out`, as `batch` does."""
        starts = torch.linspace(0, len(self.held_out) - context - 1, size).long()
        windows = self.held_out[starts[:, None] + torch.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]


def python_topics() -> Corpus:
    """Return the corpus of the help texts that Python lists by `help("topics")`."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise FewbitError(
            "expected CPython's help texts (the module pydoc_data.topics), which this Python lacks"
        ) from None
    return Corpus.from_text("\n".join(topics[name] for name in sorted(topics)))
