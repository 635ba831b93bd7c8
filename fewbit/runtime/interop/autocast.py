"""torch's autocast inside autograd Functions."""

from __future__ import annotations

from contextlib import contextmanager

import torch


def with_torch_casts(function, *args, **kwargs):
    """Return function(*args, **kwargs) of a function of torch, which casts its inputs for autocast, but without a cache.

    A weight that is cast inside an autograd Function has no graph, so other layers must not get it from the cache.
    """
    # A compiler traces the casts, and its partitioner chooses the tensors to save.
    if not torch._C._is_any_autocast_enabled() or torch.compiler.is_dynamo_compiling():
        return function(*args, **kwargs)
    with _uncached():
        return function(*args, **kwargs)


@contextmanager
def _uncached():
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def in_float32(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return x, in float32 if it is a CUDA tensor of 16 bits under autocast."""
    if x is not None and x.is_cuda and x.dtype.itemsize == 2 and torch.is_autocast_enabled("cuda"):
        return x.to(torch.float32)
    return x
