"""The seeds from which compiled code rounds at random: each device has a counter of its own (docs/decisions/0010).

A second call of `torch.manual_seed` with the same seed does not restart a counter, because torch's generator may be in the same state
between two steps.
"""

from __future__ import annotations

import torch
from torch.library import register_fake

from fewbit.runtime import backends
from fewbit.runtime.ops.library import define


class _Counter:
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
    """Return the counter of a device. The first call makes it, before a CUDA graph that would own its memory."""
    if device not in _counters:
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
