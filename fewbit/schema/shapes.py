"""Validators for the entries of a controller's saved state: types, lengths, ranges and finiteness.

A controller is the object that `compress_` returns. A validator is called a shape: a function (value, where) that returns a
copy of the value in plain Python objects, or raises InputError with one line: the place `where`, the expected value and the
value found. States come from files and may contain anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fewbit.errors import InputError
from fewbit.schema import shorten

Shape = Callable[[object, str], object]

MOST_STEPS = 2**53
"""Largest count of steps. A training that goes on from a larger one saves this number."""
MOST_ELEMENTS = 2**40
MOST_SLOTS = 64
"""Largest number of inputs of one layer."""
MOST_ROWS = 2**20
MOST_NUMBER = 1e100
"""Largest squared norm. Squared norms of float32 gradients stay below 1e90, and products of two stay within float64."""
MOST_RATIO = 1e250
"""Largest quotient of two squared norms."""
MOST_WEIGHT = 1e30
"""Largest number that is used in float32."""
LEAST_NUMBER = 1e-100
"""Smallest squared norm that does not count as 0."""


def wrong(where: str, expected: str, got: object) -> InputError:
    """Return the InputError for an invalid entry."""
    return InputError(f"{where}: expected {expected}, got {shorten(got)}")


def whole(least: int = 0, most: int = MOST_STEPS) -> Shape:
    """Return the shape of an integer from `least` to `most`."""

    def check(value, where):
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not (is_whole and least <= value <= most):
            raise wrong(where, f"a whole number from {least} to {most}", value)
        return int(value)

    return check


def real(least: float = 0.0, most: float = MOST_NUMBER) -> Shape:
    """Return the shape of a finite number from `least` to `most`."""

    def check(value, where):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Comparing never overflows; converting a large integer to float could.
        if not (is_number and least <= value <= most):
            raise wrong(where, f"a number from {least:g} to {most:g}", value)
        return 0.0 if abs(value) < LEAST_NUMBER else float(value)

    return check


def flag(value, where) -> bool:
    """Check a bool."""
    if not isinstance(value, bool):
        raise wrong(where, "true or false", value)
    return value


def text(value, where) -> str:
    """Check a string."""
    if not isinstance(value, str):
        raise wrong(where, "a string", value)
    return str(value)


def choice(*values) -> Shape:
    """Return the shape of a value that equals one of the given ones."""

    def check(value, where):
        if not any(type(value) is type(allowed) and value == allowed for allowed in values):
            raise wrong(where, " or ".join(map(repr, values)), value)
        return value

    return check


def optional(shape: Shape) -> Shape:
    """Return the shape of a value that is None or of the given shape."""
    return lambda value, where: None if value is None else shape(value, where)


def listed(shape: Shape, least: int = 0, most: int = MOST_ROWS) -> Shape:
    """Return the shape of a list of `least` to `most` entries, each of `shape`."""

    def check(value, where):
        if not isinstance(value, list | tuple):
            raise wrong(where, "a list", value)
        if not least <= len(value) <= most:
            expected = f"{least}" if least == most else f"{least} to {most}"
            raise wrong(where, f"a list of {expected} entries", len(value))
        return [shape(entry, f"{where}[{i}]") for i, entry in enumerate(value)]

    return check


def entries(*shapes: Shape) -> Shape:
    """Return the shape of a list whose entries have the given shapes, in order. The list becomes a tuple."""

    def check(value, where):
        if not isinstance(value, list | tuple) or len(value) != len(shapes):
            raise wrong(where, f"a list of {len(shapes)} entries", value)
        pairs = zip(shapes, value, strict=True)
        return tuple(shape(entry, f"{where}[{i}]") for i, (shape, entry) in enumerate(pairs))

    return check


def record(**shapes: Shape) -> Shape:
    """Return the shape of a mapping with exactly these keys, each value of the key's shape."""

    def check(value, where):
        if not isinstance(value, Mapping):
            raise wrong(where, f"the fields {', '.join(shapes)}", value)
        prefix = f"{where}." if where else ""
        for key in shapes:
            if key not in value:
                raise InputError(f"{prefix}{key}: expected a value, got none")
        for key in value:
            if key not in shapes:
                raise wrong(where or "state", f"no other field than {', '.join(shapes)}", key)
        return {key: shape(value[key], f"{prefix}{key}") for key, shape in shapes.items()}

    return check


def check_layer(name: str, names, kind: str = "layer") -> None:
    """Raise InputError if `name` is not among `names`, the names of the model's layers (or modules, as `kind` says)."""
    if name not in names:
        raise InputError(
            f"expected the state of this model's controller, got one with a {kind} {shorten(name)}, which it lacks"
        )


def capped(value: float, most: float = MOST_NUMBER) -> float:
    """Limit a number to the range that a state allows. Training that continues from an extreme state can exceed the range."""
    return min(value, most)
