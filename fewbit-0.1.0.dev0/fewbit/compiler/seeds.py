"""The seeds from which compiled code rounds at random.

Compiled code cannot hash the state of torch's generator as eager code does (docs/decisions/0010), because a CUDA graph
replays kernels and runs no code on the host. So each device has a counter of its own, which one op advances. torch's
generator does not move, and dropout draws the same masks as without fewbit.

A second call of `torch.manual_seed` with the same seed does not restart a counter: if nothing was drawn from torch's generator
in between, its state is the same as before the call, as it is between two steps of a model without dropout.
"""

from __future__ import annotations

import torch
from torch.library import register_fake

from fewbit.runtime.ops.library import define

_STEP = -7046029254386353131
"""2^64 / golden ratio, as a signed number: the distance of counters, as in the generator SplitMix64."""
_FACTORS = -4658895280553007687, -7723592293110705685
_SHIFTS = 30, 27, 31


class _Counter:
    """The number of draws on one device, multiplied by `_STEP`, and the seed of torch's generator when it started."""

    def __init__(self, device: torch.device):
        self.value = torch.zeros(1, dtype=torch.int64, device=device)
        self.start = None

    def draw(self, count: int) -> torch.Tensor:
        start = torch.initial_seed()
        if start != self.start:
            # Not in a CUDA graph: the seed does not change while a graph is captured.
            self.value.fill_(_signed(start))
            self.start = start
        numbers = torch.arange(1, count + 1, dtype=torch.int64, device=self.value.device)
        seeds = mixed(self.value + numbers * _STEP)
        self.value += _signed(count * _STEP)
        return seeds


_counters: dict[torch.device, _Counter] = {}


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's function of each number of x, int64. Different numbers have different results."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        x = (x ^ _shifted(x, shift)) * factor
    return x


def _shifted(x, count):
    """Return x >> count of unsigned numbers; torch's shift of int64 repeats the sign."""
    return (x >> count) & (2 ** (64 - count) - 1)


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def counter_of(device: torch.device) -> _Counter:
    """Return the counter of a device, which is made by the first call.

    The first call has to come before torch records a CUDA graph. Otherwise the memory of the counter would belong to the
    graph, and torch would raise an error.
    """
    device = torch.empty(0, device=device).device  # "cuda" stands for the current GPU
    if device not in _counters:
        _counters[device] = _Counter(device)
    return _counters[device]


def _draw_seeds(count: int, device: torch.device) -> torch.Tensor:
    return counter_of(device).draw(count)


draw_seeds_op = define("draw_seeds(int count, *, Device device) -> Tensor", _draw_seeds)


@register_fake("fewbit::draw_seeds")
def _(count, device):
    return torch.empty(count, dtype=torch.int64, device=device)
