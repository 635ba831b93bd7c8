"""Switch off oneDNN, the library of torch's CPU operations, for a while.

`torch.backends.mkldnn.flags` does this too, but also sets options of GPUs, about which torch then warns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fewbit.runtime.interop.interrupts import undo_after


@contextmanager
def without_one_dnn() -> Iterator[None]:
    """Return a context manager in whose block torch uses its own operations on the CPU, in all threads."""
    before = torch._C._get_mkldnn_enabled()
    with undo_after(lambda: torch._C._set_mkldnn_enabled(before)):
        torch._C._set_mkldnn_enabled(False)
        yield
