"""Short texts for a table's function and weight."""

from __future__ import annotations

from collections.abc import Mapping


def describe_function(table) -> str:
    """Describe a table's function: `gelu` or `leaky_relu(negative_slope=0.01)`."""
    return describe(table.function, table.parameters)


def describe(function: str, parameters: Mapping[str, float]) -> str:
    """Return a function's name, with its parameters if any."""
    inside = ", ".join(f"{name}={value:g}" for name, value in parameters.items())
    return f"{function}({inside})" if inside else function


def describe_weight(table) -> str:
    """Describe a table's weight and domain: `normal(0, 1) on [-10, 10]`."""
    weight = table.weight
    text = _WEIGHTS.get(weight["kind"], "{kind}").format(**weight)
    return f"{text} on [{table.domain[0]:g}, {table.domain[1]:g}]"


_WEIGHTS = {
    "normal": "normal({mean:g}, {std:g})",
    "scales": "scales({low:g}, {high:g})",
    "callable": "{name}",
}
