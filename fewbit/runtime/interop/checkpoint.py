"""Recognize the checkpointed region that this thread runs, in its first run and in its recomputation.

A region is recognized by an object that exists once for it (docs/decisions/0014): torch's `_CheckpointFrame`, or with
`use_reentrant=True` the autograd context of `CheckpointFunction`.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import nullcontext
from types import FunctionType

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_REENTRANT = CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__


def checkpoint_hook():
    """Return the pack hook of the running region with `use_reentrant=False`, or None."""
    hooks = top_hooks(False)
    if hooks is None:  # most calls end here
        return None
    return hooks[0] if getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint" else None


def region_of(hook):
    """Return the object that is the same in both runs of the region with this `checkpoint_hook()`; None without a region."""
    for cell in getattr(hook, "__closure__", None) or ():
        held = cell.cell_contents
        held = held() if isinstance(held, weakref.ref) else held
        if isinstance(held, _CheckpointFrame):
            return held
        if isinstance(held, FunctionType) and (frame := region_of(held)) is not None:
            return frame
    return None


def reentrant_region():
    """Return the autograd context of the running region with `use_reentrant=True`, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _REENTRANT:
            return frame.f_locals["ctx"]
        frame = frame.f_back
    return None


def in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """Return whether this thread runs a region with `use_reentrant=False`."""
    return checkpoint_hook() is not None


def outside_dispatch_modes():
    """Return a context manager in whose block no dispatch mode is active.

    A selective policy of torch's checkpoint expects the same operations in both runs of a region.
    """
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
