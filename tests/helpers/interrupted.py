"""Interrupts at chosen lines of fewbit's files, and checks that nothing is left behind."""

import os
import sys

import torch

import fewbit
from fewbit.runtime.interop import bypass
from fewbit.runtime.saved import offload
from fewbit.runtime.saved.forward import running

PACKAGE = os.path.dirname(fewbit.__file__) + os.sep


class Interrupt:
    """A context that raises KeyboardInterrupt at line event number `at` in some files of fewbit, and catches it.

    files: the names of the files. The trace function raises the error, and Python then removes the function, so the error is
    raised once.
    """

    def __init__(self, at, files):
        self.at, self.files, self.seen = at, files, 0

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, kind, value, traceback):
        sys.settrace(self._before)
        return kind is KeyboardInterrupt

    def _called(self, frame, event, argument):
        name = frame.f_code.co_filename
        is_ours = name.startswith(PACKAGE) and os.path.basename(name) in self.files
        return self._at if is_ours else None

    def _at(self, frame, event, argument):
        if event == "line":
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt
        return self._at


def at_each_line(function, files):
    """Call the function once for each line event in the files, interrupted there, and yield after each call."""
    with (counting := Interrupt(0, files)):
        function()
    for number in range(1, counting.seen + 1):
        with Interrupt(number, files):
            function()
        yield number


def check_nothing_is_left() -> None:
    """Check that this thread has no mode, context or call left."""
    assert not torch.overrides._get_current_function_mode_stack()
    assert not torch._C._len_torch_dispatch_stack()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.is_grad_enabled() and torch._C._is_torch_function_enabled()
    assert torch.is_autocast_cache_enabled()
    assert running.forward is None and not running.measured
    assert bypass.stack.modes == () and not offload.running.entered


def state_of(model) -> list:
    """Return classes, flags, hooks, names of attributes and parameters of all modules, for a comparison."""
    found = []
    for path, module in model.named_modules():
        tables = [
            len(value)
            for name, value in sorted(vars(module).items())
            if "hooks" in name and isinstance(value, dict)
        ]
        numbers = [
            (name, tensor.detach().clone().numpy().tobytes())
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]
        found.append((path, type(module), module.training, sorted(vars(module)), tables, numbers))
    return found


def gradients(model, x) -> list[torch.Tensor]:
    """Return the gradients of the parameters, from the same random state each time."""
    torch.manual_seed(0)
    model.zero_grad()
    model(x).square().sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found
