"""Bits that are not fixed: an average for each compressed tensor of a model, shared out between its samples.

A *variable* is what a layer keeps of one of its inputs, forward after forward. It has an average of bits an element,
so that the bytes of a tensor follow from its shape alone; its samples share them by the squares of their ranges
(ActNN, section 4.2). Rounding adds step^2 / 6 on average to the variance of an element, step being the range of
its group / (2^bits - 1), so that of sample n

    squares_n / 6 / (2^bits_n - 1)^2        squares_n = sum over its groups of length * range^2

is added in all.
"""

from __future__ import annotations

import math

import torch

LEAST, MOST = 1, 8
_NOISE = [1.0 / (2.0**bits - 1) ** 2 for bits in range(LEAST, MOST + 1)]
_GAINS = [a - b for a, b in zip(_NOISE, _NOISE[1:], strict=False)]


class Variable:
    """One compressed tensor of a model's forward. average: bits an element, from 1 to 8."""

    def __init__(self, name: tuple, average: float):
        self.name = name
        self.average = average

    def total(self, samples: int) -> int:
        """Bits of one element of each of `samples` samples together."""
        return min(max(math.floor(self.average * samples + 1e-6), LEAST * samples), MOST * samples)

    def uniform(self) -> int:
        """Bits of a tensor whose samples are not known."""
        return min(max(math.floor(self.average + 1e-6), LEAST), MOST)


class Variables:
    """Those of one model."""

    def __init__(self, average: float):
        self.average = average
        self.batch = None  # samples in the forward that runs, or None
        self._all = {}

    def of(self, name: str, slot: int) -> Variable:
        """What the layer of that name keeps of its input number `slot`."""
        variable = self._all.get((name, slot))
        if variable is None:
            variable = self._all[name, slot] = Variable((name, slot), self.average)
        return variable

    def samples_of(self, x) -> int | None:
        """How many samples lie in x one after the other, in storage order; None where that is not known."""
        if not self.batch or not x.dim() or not x.numel():
            return None
        if len(x) == self.batch:
            return self.batch
        return self.batch if len(x) % self.batch == 0 and x.is_contiguous() else None

    def __iter__(self):
        return iter(self._all.values())

    def __len__(self):
        return len(self._all)


def split(squares: torch.Tensor, total: int) -> torch.Tensor:
    """uint8 (N,): bits of samples that sum up to `total`, the best for those squares of ranges, (N,) float32.

    Noise falls ever more slowly with bits, so the `total` - N best of the single bits that could be
    added are those to add, whatever their order. Nothing here waits for a device.
    """
    samples = len(squares)
    extra = total - LEAST * samples
    widths = torch.full_like(squares, LEAST, dtype=torch.int64)
    if extra > 0:
        gains = torch.tensor(_GAINS, dtype=torch.float32).to(squares.device, non_blocking=True)
        keys = squares.nan_to_num(0.0, 0.0, 0.0)[:, None] * gains
        best = keys.flatten().argsort(descending=True, stable=True)[:extra]
        widths.index_add_(0, best // len(_GAINS), torch.ones_like(best))
    return widths.to(torch.uint8)
