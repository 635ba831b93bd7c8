"""The corpus of the demo, the English help texts that CPython ships, and its batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbit.errors import FewbitError

HELD_OUT = 0.1
"""Share of the text, at its end, that is not used for training."""


@dataclass(frozen=True)
class Corpus:
    """A text as character numbers.

    Attributes:
        alphabet: All characters of the text, sorted.
        train: The first nine tenths, (n,) int64, numbers below len(alphabet).
        held_out: The last tenth.
    """

    alphabet: str
    train: Tensor
    held_out: Tensor

    @classmethod
    def from_text(cls, text: str) -> Corpus:
        """Make the corpus of a text. The alphabet is that of the whole text."""
        alphabet = "".join(sorted(set(text)))
        number = {character: i for i, character in enumerate(alphabet)}
        numbers = torch.tensor([number[character] for character in text])
        cut = round(len(numbers) * (1 - HELD_OUT))
        return cls(alphabet, numbers[:cut], numbers[cut:])

    def batch(self, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw random windows of `train`.

        Args:
            size: The number of windows.
            context: Characters of a window.
            generator: The generator of the places.

        Returns:
            The characters and the next characters, both (size, context) int64.
        """
        starts = torch.randint(len(self.train) - context, (size,), generator=generator)
        windows = self.train[starts[:, None] + torch.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]

    def held_out_batch(self, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Return characters and next characters, both (size, context) int64, from evenly spaced windows of `held_out`."""
        starts = torch.linspace(0, len(self.held_out) - context - 1, size).long()
        windows = self.held_out[starts[:, None] + torch.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]


def python_topics() -> Corpus:
    """Return the corpus of the texts of Python's `help("topics")`, in alphabetical order.

    Raises:
        FewbitError: This Python has no such texts.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise FewbitError(
            "expected CPython's help texts (the module pydoc_data.topics), which this Python lacks"
        ) from None
    return Corpus.from_text("\n".join(topics[name] for name in sorted(topics)))
