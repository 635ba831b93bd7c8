"""Within some modules, switch off the compression of functions, or change the settings of this compression.

`fewbit/convert/functions.py` compresses functions that modules call, such as `torch.nn.functional.gelu`. The *mode* of
a module says what happens to such calls within the module. True: functions stay torch's own. False: functions are
compressed with the model's settings. Anything else is the module's own settings.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _Stack(threading.local):
    """The modes of the modules that run in this thread, the innermost module last.

    The tuple `modes` is replaced, never modified, so that an earlier tuple can be restored.
    """

    def __init__(self):
        self.modes = ()


stack = _Stack()


def bypass():
    """Return a context manager within which functions stay torch's own, as they do if a model is in evaluation mode."""
    return nullcontext() if torch.compiler.is_compiling() else _bypass()


@contextmanager
def _bypass():
    before = stack.modes
    stack.modes = (*before, True)
    try:
        yield
    finally:
        stack.modes = before


def current_mode():
    """Return the mode of the innermost running module; False if no module with a mode runs."""
    return stack.modes[-1] if stack.modes else False


class ReplacingMode(TorchFunctionMode):
    """The base of fewbit's function modes, by which `run_outside` recognizes them.

    Attributes:
        is_region: whether the mode watches a checkpointed region. Then `run_layer(function, args, kwargs)` calls the forward
            of a layer of fewbit outside of the mode.
    """

    is_region = False


def run_outside(function, *args, **kwargs):
    """Return function(*args, **kwargs), without fewbit's function modes if these are the innermost ones.

    fewbit's layers call hundreds of methods of tensors. Each call would take a detour through the mode, which would
    replace none of them.
    """
    if not torch._C._len_torch_function_stack() or torch.compiler.is_dynamo_compiling():
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
    """Forward hooks that give a module a mode of its own.

    torch does not run `leave` after a KeyboardInterrupt. In that case the call of the enclosing module restores the
    modes.

    Args:
        mode: the module's mode: True, False or settings.
    """

    def __init__(self, mode):
        self.mode = mode

    def register(self, module: nn.Module) -> None:
        """Add the hooks to a module, before and after its other hooks.

        torch numbers hooks anew for each module, and torch.compile compiles a module again if the numbers differ. These hooks do
        nothing in compiled code, so they have the same numbers in all modules, and blocks of a model share code.
        """
        module._forward_pre_hooks[_ENTER] = self.enter
        module._forward_pre_hooks.move_to_end(_ENTER, last=False)
        module._forward_hooks[_LEAVE] = self.leave
        module._forward_hooks_always_called[_LEAVE] = True

    def enter(self, *_) -> None:
        """Set the mode, as a forward pre-hook."""
        if not torch.compiler.is_compiling():
            stack.modes = (*stack.modes, self.mode)

    def leave(self, *_) -> None:
        """Restore the previous mode, as a forward hook that is always called."""
        if not torch.compiler.is_compiling():
            stack.modes = stack.modes[:-1]
