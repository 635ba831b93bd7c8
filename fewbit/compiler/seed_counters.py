"""The seeds from which compiled code rounds at random: each device has a counter of its own (docs/decisions/0010).

A call of a compiled model restarts the counters from a hash of torch's CPU generator, also before it replays a CUDA graph. Code that
is compiled otherwise restarts a counter when the seed of `torch.manual_seed` has changed.
"""

from __future__ import annotations

import hashlib
import threading

import torch
from torch.library import register_fake

from fewbit.runtime import backends
from fewbit.runtime.ops.library import define
from fewbit.runtime.saved.seeds import DISTINCT, advance_generator


class _Counter:
    """A counter of seeds on a device: its `value`, the number from which it started, and the seed of torch at that time."""

    def __init__(self, device: torch.device):
        with torch.inference_mode(False):  # or later draws could not change it
            self.value = torch.zeros(1, dtype=torch.int64, device=device)
        self.start = self.seed = None

    def restart(self, start: int) -> None:
        self.value.fill_((start + 2**63) % 2**64 - 2**63)
        self.start, self.seed = start, torch.initial_seed()

    def draw(self, count: int) -> torch.Tensor:
        of_call = _call.start
        start, known = (
            (torch.initial_seed(), self.seed) if of_call is None else (of_call, self.start)
        )
        # Each replay of a CUDA graph that had captured the restart would round alike.
        if start != known and not _is_captured():
            self.restart(start)
        return backends.of(self.value).draw_seeds(self.value, count)


class _Call(threading.local):
    """The call of a compiled model that runs in a thread: the number from which its counters start, or None."""

    start: int | None = None


_call = _Call()
_counters: dict[torch.device, _Counter] = {}


class Drawing:
    """A context manager for a call of a compiled model, in which seeds follow from torch's CPU generator as it is when the call begins.

    Calls within the call, and calls that a CUDA graph captures, go on with the seeds around them.
    """

    def __enter__(self):
        self._state = None if _call.start is not None or _is_captured() else _state()
        if self._state is not None:
            start = int.from_bytes(hashlib.blake2b(self._state, digest_size=8).digest())
            _call.start = start
            for counter in [*_counters.values()]:
                counter.restart(start)

    def __exit__(self, *_):
        if self._state is not None:
            _call.start = None
            if _state() == self._state:
                advance_generator()  # or the next call would round alike


def _is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _state() -> bytes:
    return torch.default_generator.get_state().numpy()[:DISTINCT].tobytes()


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
