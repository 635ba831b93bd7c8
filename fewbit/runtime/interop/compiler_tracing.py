"""Mark functions as constants for torch.compile, and run Python code while it traces a function, without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable

import torch


def constant(function: Callable) -> Callable:
    """Mark a function as `torch.compiler.assume_constant_result` does, which would import Dynamo and SymPy."""
    function._dynamo_marked_constant = True
    return function


def notify_traced(subject) -> None:
    """Call `subject.was_traced()` if Dynamo traces this call. The graph gets no operation, guard or break."""
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_notify)


def _notify(context) -> None:
    """Call `was_traced` of the object that the variable `subject` is for Dynamo, in this ComptimeContext."""
    variable = context.get_local("subject")
    tracker = getattr(variable, "_i_will_not_complain_if_bc_breaks_VariableTracker", lambda: None)()
    subject = getattr(tracker, "value", None)
    if hasattr(subject, "was_traced"):
        subject.was_traced()
