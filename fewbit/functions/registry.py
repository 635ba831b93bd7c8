"""The functions by name, with aliases and default parameters."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from fewbit.errors import FunctionError
from fewbit.functions import rectifiers, self_gated, sigmoids, values
from fewbit.functions.function import BUILDERS, MODULES, Function, require

_FAMILIES = rectifiers, self_gated, sigmoids, values
_BUILDERS = {
    name: builder
    for family in _FAMILIES
    for name, builder in BUILDERS.items()
    if builder.__module__ == family.__name__
}

_ALIASES: dict[str, str] = {
    "relu2": "relu_squared",
    "leakyrelu": "leaky_relu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quickgelu": "quick_gelu",
    "swish": "silu",
    "hard_swish": "hardswish",
    "hard_sigmoid": "hardsigmoid",
    "log_sigmoid": "logsigmoid",
    "hard_tanh": "hardtanh",
    "hard_shrink": "hardshrink",
    "soft_shrink": "softshrink",
    "soft_sign": "softsign",
    "soft_plus": "softplus",
    "sqrt_softplus": "sqrtsoftplus",
    "linear": "identity",
}


def names() -> tuple[str, ...]:
    """Return the canonical names of all activation functions."""
    others = solver_names()
    return tuple(name for name in _BUILDERS if name not in others)


def solver_names() -> tuple[str, ...]:
    """Return the names of the functions that are no activations."""
    return tuple(
        name for name, builder in _BUILDERS.items() if builder.__module__ == values.__name__
    )


def modules() -> Mapping[str, str]:
    """Return {class name of an activation module in `fewbit.nn`: name of its function}."""
    return MappingProxyType(MODULES)


def aliases() -> Mapping[str, str]:
    """Return {other name that `get` accepts: canonical name}."""
    return MappingProxyType(_ALIASES)


def canonical(name: str) -> str:
    """Return the canonical name for a name or an alias, or raise FunctionError with similar names."""
    if not isinstance(name, str):
        raise FunctionError(f"expected the name of a function, got {type(name).__name__}")
    if name in _BUILDERS:
        return name
    if name in _ALIASES:
        return _ALIASES[name]
    close = difflib.get_close_matches(name.lower(), [*_BUILDERS, *_ALIASES], n=4)
    hint = (
        f"did you mean {', '.join(close)}?" if close else f"expected one of {', '.join(_BUILDERS)}"
    )
    raise FunctionError(f"unknown function {name!r}: {hint}")


def get(name: str, parameters: Mapping[str, float] | None = None) -> Function:
    """Return the `Function` with a given name or alias.

    Args:
        name: A canonical name or an alias.
        parameters: Parameters by torch's names, with torch's defaults; `threshold`, which has none, gets threshold=0 and value=0.

    Raises:
        FunctionError: The name or a parameter is unknown, or a parameter's value is not finite or not allowed.
    """
    name = canonical(name)
    resolved = _resolved(name, parameters or {})
    function = _BUILDERS[name](**resolved)
    is_moderate = all(map(math.isfinite, (*function.kinks, *function.domain)))
    require(is_moderate, name, "parameters of moderate size", **resolved)
    return replace(function, name=name, parameters=resolved)


def _resolved(name: str, given: Mapping[str, float]) -> dict[str, float]:
    signature = inspect.signature(_BUILDERS[name])
    defaults = {key: parameter.default for key, parameter in signature.parameters.items()}
    for key, number in given.items():
        if key not in defaults:
            expected = ", ".join(defaults) or "none"
            raise FunctionError(f"{name} has no parameter {key!r}; expected: {expected}")
        if (
            not isinstance(number, numbers.Real)
            or isinstance(number, bool)
            or not math.isfinite(number)
        ):
            raise FunctionError(f"{name}: expected a finite number for {key}, got {number!r}")
    return {key: float(given.get(key, default)) for key, default in defaults.items()}
