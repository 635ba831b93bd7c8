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

from fewbit.runtime import backends
from fewbit.runtime.ops.library import define


class _Counter:
    """The counter of one device, and the seed of torch's generator when it started."""

    def __init__(self, device: torch.device):
        with torch.inference_mode(False):  # or later draws could not change it
            self.value = torch.zeros(1, dtype=torch.int64, device=device)
        self.start = None

    def draw(self, count: int) -> torch.Tensor:
        start = torch.initial_seed()
        if start != self.start:
            # Not in a CUDA graph: the seed does not change while a graph is captured.
            self.value.fill_((start + 2**63) % 2**64 - 2**63)
            self.start = start
        return backends.of(self.value).draw_seeds(self.value, count)


_counters: dict[torch.device, _Counter] = {}


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
