"""Switch off the compression of functions (convert/functions.py) while some modules run, and change its settings for others."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext

import torch

from fewbit.runtime.interop.interrupts import undo_after


class _Stack(threading.local):
    """The modes of the running modules, the innermost module last.

    True: functions stay torch's own. False: functions are compressed with the model's settings. Else: the module's own
    settings. The tuple is replaced, never modified, so that a saved one can be restored.
    """

    def __init__(self):
        self.modes = ()


_stack = _Stack()


def bypass():
    """Return a context within which functions stay torch's own, as in a layer in evaluation mode."""
    return nullcontext() if torch.compiler.is_compiling() else _bypass()


@contextmanager
def _bypass():
    before = _stack.modes
    with undo_after(lambda: restore_modes(before)):
        _stack.modes = (*before, True)
        yield


def current_mode():
    """Return the mode of the innermost module: True, False or settings."""
    return _stack.modes[-1] if _stack.modes else False


def modes() -> tuple:
    """Return the modes of all running modules, for `restore_modes`."""
    return _stack.modes


def clear() -> None:
    """Clear the modes at the beginning of a model's forward: those of modules around the model do not apply to it."""
    _stack.modes = ()


def restore_modes(before: tuple) -> None:
    """Restore the modes from before a call, when the call ends."""
    _stack.modes = before


class ModeHooks:
    """Forward hooks that give a module a mode of its own.

    torch does not run `leave` after a KeyboardInterrupt; the call of the enclosing module then restores the modes.

    Args:
        mode: the mode, see `current_mode`.
    """

    def __init__(self, mode):
        self.mode = mode

    def enter(self, *_) -> None:
        """Set the mode: a forward pre-hook."""
        if not torch.compiler.is_compiling():
            _stack.modes = (*_stack.modes, self.mode)

    def leave(self, *_) -> None:
        """Restore the mode before: a forward hook, which is also called if the forward raised."""
        if not torch.compiler.is_compiling():
            _stack.modes = _stack.modes[:-1]
