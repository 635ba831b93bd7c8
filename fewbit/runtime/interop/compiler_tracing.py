"""Run ordinary Python code while torch.compile traces a function, and keep the code out of the compiled program."""

from __future__ import annotations

import torch


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
