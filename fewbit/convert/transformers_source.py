"""Recognition of a module class of transformers by the source code of its forward."""

from __future__ import annotations

import ast
import inspect
import textwrap

from torch import nn


def source_of(cls: type[nn.Module]) -> str | None:
    """Return the canonical source of a class's `forward`, and `_norm` if it has one; None if Python cannot find it."""
    try:
        methods = [cls.forward, *([cls._norm] if hasattr(cls, "_norm") else [])]
        sources = [textwrap.dedent(inspect.getsource(method)) for method in methods]
    except (OSError, TypeError, AttributeError):
        return None
    return canonical("\n".join(reversed(sources)))


def canonical(source: str) -> str:
    """Return the source of functions without docstrings and annotations, and with numbers as names of variables."""
    functions = []
    for function in ast.parse(source).body:
        names = {}
        arguments = function.args.posonlyargs + function.args.args
        for argument in arguments:
            argument.annotation = None
            names[argument.arg] = f"v{len(names)}"
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.setdefault(node.id, f"v{len(names)}")
        for node in (*arguments, *ast.walk(function)):
            if isinstance(node, ast.Name):
                node.id = names.get(node.id, node.id)
            elif isinstance(node, ast.arg):
                node.arg = names.get(node.arg, node.arg)
        function.returns = None
        if ast.get_docstring(function) is not None:
            function.body = function.body[1:]
        functions.append(ast.unparse(function))
    return "\n".join(functions)
