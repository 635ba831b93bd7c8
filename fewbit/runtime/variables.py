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
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

LEAST, MOST = 1, 8
_NOISE = [1.0 / (2.0**bits - 1) ** 2 for bits in range(LEAST, MOST + 1)]
_GAINS = [a - b for a, b in zip(_NOISE, _NOISE[1:], strict=False)]


class Variable(NamedTuple):
    """One compressed tensor of a model's forward. name: (of the layer, number of its input).

    average: bits an element, from 1 to 8. is_fixed: whether nobody but the user may change that.
    """

    name: tuple[str, int]
    average: float
    is_fixed: bool = True

    def total(self, samples: int) -> int:
        """Bits of one element of each of `samples` samples together."""
        return min(max(math.floor(self.average * samples + 1e-6), LEAST * samples), MOST * samples)

    def uniform(self) -> int:
        """Bits of a tensor whose samples are not known."""
        return min(max(math.floor(self.average + 1e-6), LEAST), MOST)

    @property
    def levels(self) -> float:
        """2^bits - 1: steps that a range is divided into."""
        return 2.0**self.average - 1


class Plan:
    """What one forward goes by, and whoever makes a part of it again for a checkpoint.

    averages: {name: bits}, of variables that do not have those of their layer. samples: in the forward, or None.
    observation: what is to be found out on the way, or None.
    """

    def __init__(self, averages=None, samples: int | None = None, observation=None):
        self.averages = averages or {}
        self.samples = samples
        self.observation = observation

    def of(self, name: tuple[str, int], average: float, is_fixed: bool) -> Variable:
        """The variable of that name. average: unless the plan has another."""
        return Variable(name, self.averages.get(name, average), is_fixed)

    def samples_of(self, x) -> int | None:
        """How many samples lie in x one after the other, in storage order; None where that is not known."""
        if not self.samples or not x.dim() or not x.numel():
            return None
        if len(x) == self.samples:
            return self.samples
        return self.samples if len(x) % self.samples == 0 and x.is_contiguous() else None


class Variables:
    """Those of one model: makes the plan of each forward."""

    averages: Mapping[tuple[str, int], float] = MappingProxyType({})

    def begin(self, module, inputs) -> Plan:
        """At the beginning of a forward of that module in training. inputs: its arguments."""
        return self.plan(inputs)

    def plan(self, inputs, observation=None) -> Plan:
        """As things are."""
        return Plan(self.averages, batch_size(inputs), observation)


def batch_size(inputs) -> int | None:
    """Dimension 0 of the first tensor among a model's inputs."""
    for each in inputs:
        if isinstance(each, torch.Tensor) and each.dim():
            return len(each)
    return None


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
