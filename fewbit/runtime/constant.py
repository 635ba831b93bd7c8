"""Functions whose results torch.compile takes for constants, without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable


def constant(function: Callable) -> Callable:
    """Mark a function as `torch.compiler.assume_constant_result` does.

    That one imports Dynamo and SymPy, which takes longer than all of fewbit, also where nothing is ever compiled; a
    test keeps the marks equal.

    Args:
        function: whose result follows from its arguments alone, all of them constants of the compiled program.

    Returns:
        The function.
    """
    function._dynamo_marked_constant = True
    return function
