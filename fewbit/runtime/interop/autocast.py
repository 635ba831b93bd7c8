"""Autocast inside autograd Functions."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch

from fewbit.runtime.interop.interrupts import undo_after


def as_torch_casts():
    """A context in which torch's own layer casts as autocast tells it to, and keeps no cast weight.

    What is cast inside a Function has no gradient; autocast's cache would hand it to other layers. Nor is
    a cast weight kept for backward: it is made again from the parameter.
    """
    # A compiler traces the casts, and its graph keeps what its partitioner chooses.
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
    """x as autocast passes it to the functions that it runs in float32 on CUDA, and on the CPU does not."""
    if x is not None and x.is_cuda and x.dtype.itemsize == 2 and torch.is_autocast_enabled("cuda"):
        return x.to(torch.float32)
    return x
