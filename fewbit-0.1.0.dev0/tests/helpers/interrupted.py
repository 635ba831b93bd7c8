"""Interrupts at a chosen line or opcode of fewbit's files, and checks that nothing is left behind."""

import os
import sys
from collections import defaultdict

import torch

import fewbit
from fewbit.runtime.interop import bypass
from fewbit.runtime.saved import context as contexts
from fewbit.runtime.saved import offload

PACKAGE = os.path.dirname(fewbit.__file__) + os.sep
FILES = {name for _, _, names in os.walk(PACKAGE) for name in names if name.endswith(".py")}


class Interrupt:
    """A context that raises `error` at event number `at` in fewbit's own files, and catches it.

    opcodes: events are opcodes and not lines. files: the names of the files that count; None for all. The trace function
    raises the error, and Python then removes the function, so the error is raised once. is_raised: true after that.
    """

    def __init__(self, at, error=KeyboardInterrupt, opcodes=False, files=None):
        assert files is None or FILES.issuperset(files), files
        self.at, self.error, self.opcodes, self.files = at, error, opcodes, files
        self.seen, self.is_raised = 0, False
        self.places = []  # (file, line) of the events if at is None

    @classmethod
    def count(cls, function, **options) -> int:
        """Return the number of events of a call."""
        with (counting := cls(None, **options)):
            function()
        return counting.seen

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, kind, value, traceback):
        sys.settrace(self._before)
        # With its traceback, whose frames an interactive interpreter would hold too.
        self.caught = value
        return kind is not None and self.is_raised and issubclass(kind, self.error)

    def _called(self, frame, event, argument):
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or frame.f_code.co_name == "__del__":
            return None
        if self.files is not None and os.path.basename(name) not in self.files:
            return None
        frame.f_trace_opcodes = self.opcodes
        return self._at

    def _at(self, frame, event, argument):
        if event == ("opcode" if self.opcodes else "line"):
            if self.at is None:
                self.places.append((os.path.basename(frame.f_code.co_filename), frame.f_lineno))
            elif self.seen == self.at:
                self.is_raised = True
                raise self.error
            self.seen += 1
        return self._at


def places(function, **options) -> dict[tuple[str, int], list[int]]:
    """Return {(file, line): numbers of the events there} of a call."""
    with (counting := Interrupt(None, **options)):
        function()
    found = defaultdict(list)
    for number, place in enumerate(counting.places):
        found[place].append(number)
    return found


def exhaustively(function, per_line=None, **options):
    """Call the function once for each event, interrupted there. per_line: the number of events of a line; None for all."""
    numbers = [number for at in places(function, **options).values() for number in at[:per_line]]
    for number in sorted(numbers):
        with Interrupt(number, **options) as interrupt:
            function()
        yield number
        del interrupt


def check_nothing_is_left() -> None:
    """Check that this thread has no mode, context or call left."""
    assert not torch.overrides._get_current_function_mode_stack()
    assert not torch._C._len_torch_dispatch_stack()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.is_grad_enabled() and torch._C._is_torch_function_enabled()
    assert torch.is_autocast_cache_enabled()
    assert contexts.current() is None and contexts._innermost(contexts._running) is None
    assert not contexts.is_measuring()
    assert bypass.modes() == () and not offload._running.entered


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
