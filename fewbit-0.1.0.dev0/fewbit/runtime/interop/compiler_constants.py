"""Mark functions whose results torch.compile may treat as constants, without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable


def constant(function: Callable) -> Callable:
    """Mark a function as `torch.compiler.assume_constant_result` does.

    torch's decorator imports Dynamo and SymPy even if nothing is ever compiled, and that takes longer than importing
    fewbit. A test checks that this function and torch's decorator set the same mark.

    Args:
        function: a function whose result depends only on its arguments, all of which are constants in the compiled
            program.

    Returns:
        The function.
    """
    function._dynamo_marked_constant = True
    return function
