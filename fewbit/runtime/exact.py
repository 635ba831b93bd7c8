"""Torch's own layer, untouched, where a model's functions are otherwise compressed (compress/calls.py)."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext

import torch


class _Depth(threading.local):
    value = 0


_depth = _Depth()


def exactly():
    """A context in which functions that are called stay torch's own: of a layer in evaluation mode."""
    return nullcontext() if torch.compiler.is_compiling() else _exactly()


@contextmanager
def _exactly():
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1


def is_exact() -> bool:
    """Whether such a context is open in this thread."""
    return _depth.value > 0
