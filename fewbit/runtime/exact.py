"""Torch's own functions, where a model's functions are otherwise compressed (compress/calls.py)."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext

import torch


class _Stack(threading.local):
    """Whether functions stay torch's own, as the modules that run say; the innermost one decides."""

    def __init__(self):
        self.flags = []


_stack = _Stack()


def exactly():
    """A context in which functions that are called stay torch's own: of a layer in evaluation mode."""
    return nullcontext() if torch.compiler.is_compiling() else _exactly()


@contextmanager
def _exactly():
    _stack.flags.append(True)
    try:
        yield
    finally:
        _stack.flags.pop()


def is_exact() -> bool:
    """Whether functions that are called in this thread stay torch's own now."""
    return bool(_stack.flags) and _stack.flags[-1]


def forget() -> None:
    """Drops what modules said whose forward was interrupted."""
    _stack.flags.clear()


class Switch:
    """Forward hooks of a module that was excluded (exact), or of one inside such a module that was not."""

    def __init__(self, exact: bool):
        self.exact = exact

    def enter(self, *_) -> None:
        """A forward pre-hook."""
        if not torch.compiler.is_compiling():
            _stack.flags.append(self.exact)

    def leave(self, *_) -> None:
        """A forward hook, called also where the forward raised."""
        if not torch.compiler.is_compiling() and _stack.flags:
            _stack.flags.pop()
