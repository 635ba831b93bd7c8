"""Draw the random numbers of a forward pass again in the backward pass."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor

from fewbit.runtime.interop.tensor_kinds import is_abstract, is_plain

_STATE_BYTES = {"cpu": 5056, "cuda": 16}


def can_replay(x) -> bool:
    """Return whether random numbers that are drawn for x now can be drawn again later.

    A compiler and a CUDA graph under capture cannot read the generator's state.
    """
    if is_abstract(x):
        return x.device.type in _STATE_BYTES
    if not is_plain(x):
        return False
    if x.is_cuda:
        return not torch.cuda.is_current_stream_capturing()
    return x.device.type == "cpu"


def state_of(x) -> Tensor:
    """Return the state of torch's random generator for x's device."""
    if is_abstract(x):
        return x.new_empty(_STATE_BYTES[x.device.type], dtype=torch.uint8, device="cpu")
    return torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()


@contextmanager
def replayed(x, state):
    """Run the block with a state from `state_of`."""
    if is_abstract(state):
        yield
        return
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        if x.is_cuda:
            torch.cuda.set_rng_state(state.cpu(), x.device)
        else:
            torch.set_rng_state(state)
        yield
