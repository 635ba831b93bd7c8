"""Torch's own functions, where a model's functions are otherwise compressed (compress/calls.py)."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext

import torch


class _Stack(threading.local):
    """What the modules that run say of functions, the innermost one last.

    True: they stay torch's own. False: they are those of the model. Else settings of their own.
    """

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


def said():
    """What the innermost module says: True, False or settings."""
    return _stack.flags[-1] if _stack.flags else False


def forget() -> None:
    """Drops what modules said whose forward was interrupted."""
    _stack.flags.clear()


class Switch:
    """Forward hooks of a module that has a say of its own: see `said`."""

    def __init__(self, says):
        self.says = says

    def enter(self, *_) -> None:
        """A forward pre-hook."""
        if not torch.compiler.is_compiling():
            _stack.flags.append(self.says)

    def leave(self, *_) -> None:
        """A forward hook, called also where the forward raised."""
        if not torch.compiler.is_compiling() and _stack.flags:
            _stack.flags.pop()
