"""The seeds from which compiled code rounds at random: each device has a counter of its own (docs/decisions/0010).

A call of a compiled model restarts the counters from a hash of torch's CPU generator, also before it replays a CUDA graph. Code that
is compiled otherwise restarts a counter when the seed of `torch.manual_seed` has changed.
"""

from __future__ import annotations

import hashlib
import threading

import torch
from torch import nn

from fewbit.runtime import backends
from fewbit.runtime.interop.checkpoint import checkpoint_hook, in_backward, reentrant_region
from fewbit.runtime.interop.cuda_streams import is_capturing
from fewbit.runtime.ops.library import define
from fewbit.runtime.saved.seeds import DISTINCT, MASK, advance_generator, mixed, purpose


class _Counter:
    """A counter of seeds on a device: its `value`, the seed of torch when it started, and the `Drawing` that started it, or None."""

    def __init__(self, device: torch.device):
        with torch.inference_mode(False):  # or later draws could not change it
            self.value = torch.zeros(1, dtype=torch.int64, device=device)
        self.seed = self.owner = None

    def restart(self, start: int, owner: Drawing | None = None) -> None:
        self.value.fill_((start + 2**63) % 2**64 - 2**63)
        self.seed, self.owner = torch.initial_seed(), owner

    def draw(self, count: int) -> torch.Tensor:
        drawing = _running.drawing
        if drawing is None:
            start = torch.initial_seed()
            is_new = start != self.seed
        else:
            start, is_new = drawing.start_of(self)
        # A restart captured in a CUDA graph would run in each replay, so all replays would round alike.
        if is_new and not is_capturing():
            self.restart(start, drawing)
        return backends.on[self.value.device].draw_seeds(self.value, count)


class _DrawingOfThread(threading.local):
    """The call of a compiled model that runs in a thread, or None."""

    drawing: Drawing | None = None


_running = _DrawingOfThread()
_counters: dict[torch.device, _Counter] = {}


class Drawing:
    """A context manager for a call of a compiled model, in which seeds follow from torch's CPU generator as it is when the call begins.

    A call within another call, or one that a CUDA graph captures, does not restart the counters: it draws the next seeds.

    Processes that train the model with different inputs draw different seeds, also if their generators are alike.

    Args:
        counters: the counters that earlier calls of the model have used; those of this call are added.
        ranks: the ranks of this process among those with different inputs.
    """

    def __init__(self, counters: set[_Counter], ranks: tuple[int, ...] = ()):
        self._counters, self._ranks = counters, ranks
        self._state = None  # of torch's generator before the call
        self._started = set()  # the counters that this call has started

    def __enter__(self):
        if _running.drawing is not None or is_capturing():
            return
        self._state = _state()
        self._start = int.from_bytes(hashlib.blake2b(self._state, digest_size=8).digest())
        if self._ranks:
            self._start = self._start + purpose(self._ranks) & MASK
        for counter in self._counters:  # a CUDA graph that is replayed draws without Python
            counter.restart(self._start, self)
        self._started, _running.drawing = {*self._counters}, self

    def __exit__(self, *_):
        if self._state is not None:
            _running.drawing = None
            if _state() == self._state:
                advance_generator()  # or the next call would round alike

    def start_of(self, counter: _Counter) -> tuple[int, bool]:
        """Return the number from which a counter starts, and whether it has to start now."""
        is_new = counter.owner is not self
        if is_new and counter in self._started:
            # Another thread has restarted the counter within this call, which must not draw its first seeds again.
            self._start = mixed(self._start, 0, 1) + 2**63
        self._started.add(counter)
        self._counters.add(counter)
        return self._start, is_new


def takes_part(model: nn.Module) -> bool:
    """Return whether a call of the model now is a `Drawing`: with gradients, or as the first run of a region that runs again with them.

    Both runs of a checkpointed region must be, because they must advance the generator alike, from which dropout may draw.
    """
    if in_backward():
        return checkpoint_hook() is not None or reentrant_region() is not None
    return torch.is_grad_enabled() or (model.training and reentrant_region() is not None)


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


draw_seeds_op = define(
    "draw_seeds(int count, *, Device device) -> Tensor",
    _draw_seeds,
    lambda count, device: torch.empty(count, dtype=torch.int64, device=device),
)
