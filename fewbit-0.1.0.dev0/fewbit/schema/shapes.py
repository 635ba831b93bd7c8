"""Validators for the entries of a controller's saved state: types, lengths, ranges and finiteness.

A controller is the object that `compress_` returns. Its state comes from a file and may contain anything. A validator,
here called a shape, is a function (value, where). It returns a copy of the value in plain Python objects, or raises
InputError. The message is one line with the entry's place `where`, such as "slots[3].bits", the expected value and the
value found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fewbit.errors import InputError
from fewbit.text import shorten

Shape = Callable[[object, str], object]

MOST_STEPS = 2**53
"""Largest number of training steps. A training with more steps saves this number."""
MOST_ELEMENTS = 2**40
MOST_SLOTS = 64
"""Largest number of inputs of one layer."""
MOST_ROWS = 2**20
MOST_NUMBER = 1e100
"""Largest squared norm of a gradient. For float32 it stays below 1e90. The product of two such numbers fits float64."""
MOST_RATIO = 1e250
"""Largest quotient of two squared norms."""
MOST_WEIGHT = 1e30
"""Largest number that an entry may have if it is used in float32 computations."""
LEAST_NUMBER = 1e-100
"""Smallest squared norm that does not count as 0."""


def wrong(where: str, expected: str, got: object) -> InputError:
    """Return the InputError for an invalid entry."""
    return InputError(f"{where}: expected {expected}, got {shorten(got)}")


def whole(least: int = 0, most: int = MOST_STEPS) -> Shape:
    """Make a validator for integers from `least` to `most`."""

    def check(value, where):
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not (is_whole and least <= value <= most):
            raise wrong(where, f"a whole number from {least} to {most}", value)
        return int(value)

    return check


def real(least: float = 0.0, most: float = MOST_NUMBER) -> Shape:
    """Make a validator for numbers from `least` to `most`. It returns floats; absolute values below 1e-100 become 0."""

    def check(value, where):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Comparing never overflows; converting a large integer to float could.
        if not (is_number and least <= value <= most):
            raise wrong(where, f"a number from {least:g} to {most:g}", value)
        return 0.0 if abs(value) < LEAST_NUMBER else float(value)

    return check


def flag(value, where) -> bool:
    """Return a bool unchanged. Raise InputError for any other value."""
    if not isinstance(value, bool):
        raise wrong(where, "true or false", value)
    return value


def text(value, where) -> str:
    """Return a string unchanged. Raise InputError for any other value."""
    if not isinstance(value, str):
        raise wrong(where, "a string", value)
    return str(value)


def choice(*values) -> Shape:
    """Make a validator for values that equal one of the given values and have the same type."""

    def check(value, where):
        if not any(type(value) is type(allowed) and value == allowed for allowed in values):
            raise wrong(where, " or ".join(map(repr, values)), value)
        return value

    return check


def optional(shape: Shape) -> Shape:
    """Make a validator that accepts None, and checks any other value with the validator `shape`."""
    return lambda value, where: None if value is None else shape(value, where)


def listed(shape: Shape, least: int = 0, most: int = MOST_ROWS) -> Shape:
    """Make a validator for lists of `least` to `most` entries, which checks every entry with the validator `shape`."""

    def check(value, where):
        if not isinstance(value, list | tuple):
            raise wrong(where, "a list", value)
        if not least <= len(value) <= most:
            expected = f"{least}" if least == most else f"{least} to {most}"
            raise wrong(where, f"a list of {expected} entries", len(value))
        return [shape(entry, f"{where}[{i}]") for i, entry in enumerate(value)]

    return check


def entries(*shapes: Shape) -> Shape:
    """Make a validator for lists of fixed length with one validator for each entry, in order. It returns a tuple."""

    def check(value, where):
        if not isinstance(value, list | tuple) or len(value) != len(shapes):
            raise wrong(where, f"a list of {len(shapes)} entries", value)
        pairs = zip(shapes, value, strict=True)
        return tuple(shape(entry, f"{where}[{i}]") for i, (shape, entry) in enumerate(pairs))

    return check


def record(**shapes: Shape) -> Shape:
    """Make a validator for mappings with exactly the given keys. Each argument is the validator of the key's value."""

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
    """Raise InputError if a state contains a name that the model lacks.

    Args:
        name: The name in the state.
        names: The names of the model's layers or modules.
        kind: The noun before the name in the message, such as "layer".
    """
    if name not in names:
        raise InputError(
            f"expected the state of this model's controller, got one with a {kind} {shorten(name)}, which it lacks"
        )


def capped(value: float, most: float = MOST_NUMBER) -> float:
    """Return min(value, most).

    Policies use this for numbers that they will save. Training that continues from a state with numbers close to `most`
    could otherwise save a state that cannot be loaded.
    """
    return min(value, most)
