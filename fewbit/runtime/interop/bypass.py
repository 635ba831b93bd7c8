"""Torch's own functions, where a model's functions are otherwise compressed (convert/functions.py)."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext

import torch

from fewbit.runtime.interop.interrupts import afterwards


class _Stack(threading.local):
    """The ways in which the running modules want functions to be treated, the innermost module last.

    True: functions stay torch's own. False: functions are compressed with the model's settings. Else: the module's own
    settings. The tuple is replaced, never modified, so that a saved one can be restored.
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
    """Return the flags of all running modules, for `put_back`."""
    return _stack.flags


def start() -> None:
    """Clear the flags at the beginning of a model's forward: those of modules around the model do not apply to it."""
    _stack.flags = ()


def put_back(flags: tuple) -> None:
    """Restore the flags from before a call, when the call ends."""
    _stack.flags = flags


class Switch:
    """Forward hooks of a module with a flag of its own: see `said`.

    torch does not run `leave` after a KeyboardInterrupt; the call of the enclosing module then restores the flags.
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
