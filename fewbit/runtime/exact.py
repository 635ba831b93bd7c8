"""Torch's own functions, where a model's functions are otherwise compressed (compress/calls.py)."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext

import torch

from fewbit.runtime.interrupts import afterwards


class _Stack(threading.local):
    """What the modules that run say of functions, the innermost one last.

    True: they stay torch's own. False: they are those of the model. Else settings of their own. Nothing is written to a
    stack: whoever keeps one can put it back.
    """

    def __init__(self):
        self.flags = ()


_stack = _Stack()


def exactly():
    """A context in which functions that are called stay torch's own: of a layer in evaluation mode."""
    return nullcontext() if torch.compiler.is_compiling() else _exactly()


@contextmanager
def _exactly():
    before = _stack.flags
    with afterwards(lambda: put_back(before)):
        _stack.flags = (*before, True)
        yield


def said():
    """What the innermost module says: True, False or settings."""
    return _stack.flags[-1] if _stack.flags else False


def stack() -> tuple:
    """What all modules that run say, for `put_back`."""
    return _stack.flags


def start() -> None:
    """At the beginning of a model's forward: what modules around the model say does not count."""
    _stack.flags = ()


def put_back(flags: tuple) -> None:
    """What modules said before, when a call ends."""
    _stack.flags = flags


class Switch:
    """Forward hooks of a module that has a say of its own: see `said`.

    torch does not run `leave` after a KeyboardInterrupt: the calls around put back what was said before.
    """

    def __init__(self, says):
        self.says = says

    def enter(self, *_) -> None:
        """A forward pre-hook."""
        if not torch.compiler.is_compiling():
            _stack.flags = (*_stack.flags, self.says)

    def leave(self, *_) -> None:
        """A forward hook, called also where the forward raised."""
        if not torch.compiler.is_compiling():
            _stack.flags = _stack.flags[:-1]
