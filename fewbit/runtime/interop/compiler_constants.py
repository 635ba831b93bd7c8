"""Mark functions whose results torch.compile may treat as constants, without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable


def constant(function: Callable) -> Callable:
    """Mark a function as `torch.compiler.assume_constant_result` does, which would import Dynamo and SymPy."""
    function._dynamo_marked_constant = True
    return function
