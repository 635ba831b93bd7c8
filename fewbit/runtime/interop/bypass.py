"""Within some modules, switch off the compression of functions (`fewbit/convert/function_mode.py`), or change its settings."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _Stack(threading.local):
    """The modes of the modules that run in this thread, the innermost last. The tuple is replaced, never modified."""

    def __init__(self):
        self.modes = ()


stack = _Stack()


class _Bypass:
    __slots__ = ("before",)

    def __enter__(self):
        self.before = stack.modes
        stack.modes = (*self.before, True)

    def __exit__(self, *_):
        stack.modes = self.before


def bypass():
    """Return a context manager within which functions stay torch's own, as in evaluation mode."""
    return nullcontext() if torch.compiler.is_compiling() else _Bypass()


def current_mode():
    """Return the mode of the innermost running module, or False."""
    return stack.modes[-1] if stack.modes else False


class ReplacingMode(TorchFunctionMode):
    """The base of fewbit's function modes, by which `run_outside` recognizes them.

    One that watches a checkpointed region has `is_region`, and `run_layer(function, args, kwargs)`, which calls the
    forward of a layer of fewbit, args[0], outside of the mode.
    """

    is_region = False


def run_outside(function, *args, **kwargs):
    """Return function(*args, **kwargs), without fewbit's function modes if these are the innermost ones.

    The modes would replace none of the hundreds of methods that fewbit's layers call.
    """
    if torch.compiler.is_dynamo_compiling() or not torch._C._len_torch_function_stack():
        return function(*args, **kwargs)
    mode = torch._C._pop_torch_function_stack()
    is_ours = ReplacingMode in type(mode).__mro__
    try:
        if not is_ours:
            torch._C._push_on_torch_function_stack(mode)
        elif mode.is_region:
            return mode.run_layer(function, args, kwargs)
        return function(*args, **kwargs)
    finally:
        if is_ours:
            torch._C._push_on_torch_function_stack(mode)


_ENTER, _LEAVE = -1, -2
"""The numbers of the hooks of `ModeHooks`. torch's own are positive."""


class ModeHooks:
    """Forward hooks that give a module a mode of its own: True, False or settings.

    After a KeyboardInterrupt, in which torch does not run `leave`, the call of the enclosing module restores the modes.
    """

    def __init__(self, mode):
        self.mode = mode

    def register(self, module: nn.Module) -> None:
        """Add the hooks to a module, before and after its other hooks, with the same numbers in all modules.

        torch.compile compiles a module again if the numbers of hooks differ.
        """
        module._forward_pre_hooks[_ENTER] = self.enter
        module._forward_pre_hooks.move_to_end(_ENTER, last=False)
        module._forward_hooks[_LEAVE] = self.leave
        module._forward_hooks_always_called[_LEAVE] = True

    def enter(self, *_) -> None:
        if not torch.compiler.is_compiling():
            stack.modes = (*stack.modes, self.mode)

    def leave(self, *_) -> None:
        if not torch.compiler.is_compiling():
            stack.modes = stack.modes[:-1]
