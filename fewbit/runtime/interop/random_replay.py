"""Random numbers of a forward pass, drawn again in the backward pass from the generator's state."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor

from fewbit.runtime.interop.tensor_kinds import is_plain


def can_replay(x) -> bool:
    """Return whether random numbers that are drawn for x now can be drawn again.

    A compiler cannot follow the state of a generator, and a CUDA graph cannot read it.
    """
    if not is_plain(x):
        return False
    if x.is_cuda:
        return not torch.cuda.is_current_stream_capturing()
    return x.device.type == "cpu"


def state_of(x) -> Tensor:
    """Return the state of torch's generator for x's device: 5056 bytes on the CPU, 16 on CUDA."""
    return torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()


@contextmanager
def replayed(x, state):
    """Set torch's generator for x's device to an earlier state within this context."""
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        if x.is_cuda:
            torch.cuda.set_rng_state(state.cpu(), x.device)
        else:
            torch.set_rng_state(state)
        yield
