"""torch's autocast inside autograd Functions."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch

from fewbit.runtime.interop.interrupts import undo_after


def as_torch_casts():
    """Return a context manager. Within it, torch's own layers cast as autocast asks, but autocast's cache is not used.

    The cache holds cast weights. A weight that is cast inside an autograd Function has no graph, and the cache would
    pass it to other layers. Instead of saving the cast weight, the backward pass casts the parameter again.
    """
    # A compiler traces the casts, and its partitioner chooses the tensors to save.
    if torch.compiler.is_compiling() or not torch._C._is_any_autocast_enabled():
        return nullcontext()
    return _uncached()


@contextmanager
def _uncached():
    before = torch.is_autocast_cache_enabled()
    with undo_after(lambda: torch.set_autocast_cache_enabled(before)):
        torch.set_autocast_cache_enabled(False)
        yield


def in_float32(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return x converted as autocast converts the input of functions that run in float32 on CUDA but not on the CPU."""
    if x is not None and x.is_cuda and x.dtype.itemsize == 2 and torch.is_autocast_enabled("cuda"):
        return x.to(torch.float32)
    return x
