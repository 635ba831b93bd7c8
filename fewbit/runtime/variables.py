"""Bits that are not fixed: chosen for each compressed tensor of a model, and for each of its samples.

A *variable* is what a layer keeps of one of its inputs, forward after forward. Between adaptations it has a fixed
average of bits an element, so that the bytes of a tensor follow from its shape; its samples share them by
their sensitivity (ActNN, section 4.2). What adaptation needs is observed in some of the steps: of each sample the squares
of its ranges, in forward, and a factor of the gradient's, in backward. With those, rounding adds to the
variance of the gradient

    factor / 6 * squares_n / (2^bits_n - 1)^2        for sample n

as the variance of a rounded element is step^2 / 6 on average, step being the range of its group / (2^bits - 1).
"""

from __future__ import annotations

import math

import torch

LEAST, MOST = 1, 8
_NOISE = [1.0 / (2.0**bits - 1) ** 2 for bits in range(LEAST, MOST + 1)]
_GAINS = [a - b for a, b in zip(_NOISE, _NOISE[1:], strict=False)]
MOMENTUM = 0.9
"""Of the moving average of factors, from one observed step to the next."""


class Variable:
    """One compressed tensor of a model's forward.

    average: bits an element, from 1 to 8. factor: what the variance of an element is multiplied with in that of the
    gradient, a moving average over observed steps; None before the first.
    """

    def __init__(self, name: tuple, average: float):
        self.name = name
        self.average = average
        self.factor = None
        self.seen = []  # (samples, features, squares (samples,) or (1,)) in the observed forward
        self.factors = []  # 0-D tensors, from its backward pass
        self.observing = False

    def observe(self, factor) -> None:
        """Notes, in an observed step, what factor() says, a 0-D tensor. Of several layers' the sum counts."""
        if self.observing:
            self.factors.append(factor())

    def total(self, samples: int) -> int:
        """Bits of one element of each of `samples` samples together."""
        return min(max(math.floor(self.average * samples + 1e-6), LEAST * samples), MOST * samples)

    def uniform(self) -> int:
        """Bits of a tensor whose samples are not known."""
        return min(max(math.floor(self.average + 1e-6), LEAST), MOST)


class Variables:
    """Those of one model. by_sample: whether samples have bits of their own."""

    def __init__(self, average: float, by_sample: bool = True):
        self.average = average
        self.by_sample = by_sample
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
        if not self.by_sample or not self.batch or not x.numel():
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
