"""The base of all configuration objects, and checks of fields, which return the value to store or raise InputError."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from numbers import Real
from typing import Any, ClassVar

from fewbit.config.limits import check_average, check_bits, is_whole, plain_number, require
from fewbit.errors import InputError
from fewbit.printable import meant


def number_field(check: Callable) -> Callable:
    """Return a check that stores the result of `plain_number`, which `check` tests."""

    def checked(value, name: str):
        value = plain_number(value)
        check(value, name)
        return value

    return checked


bits_field, average_field = number_field(check_bits), number_field(check_average)
interval_field = number_field(
    lambda value, name: require(is_whole(value, 1), "a positive whole number", name, value)
)


def positive(value, name: str) -> float:
    """Check a finite number above 0."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:
        number = math.inf
    require(0 < number < math.inf, "a finite number above 0", name, value)
    return number


def flag(value, name: str) -> bool:
    """Check True or False."""
    return require(isinstance(value, bool), "True or False", name, value)


def one_of(choices: tuple[str, ...], expected: str, noun: str) -> Callable:
    """Return a check for one of `choices`. The error message calls the field `noun`."""
    return lambda value, name: require(
        isinstance(value, str) and value in choices, expected, noun, value
    )


def optional(check: Callable) -> Callable:
    """Return a check for None, or a value that satisfies `check`."""
    return lambda value, name: None if value is None else check(value, name)


class Config:
    """The base of frozen dataclasses that check their fields and have plain JSON values."""

    _checks: ClassVar[Mapping[str, Callable]] = {}
    """{field: check}, applied when an object is made."""

    def __post_init__(self):
        for name, check in self._checks.items():
            object.__setattr__(self, name, check(getattr(self, name), name))

    def __repr__(self) -> str:
        shown = []
        for number, field in enumerate(fields(self)):
            value = getattr(self, field.name)
            if number == 0 and value is not None:
                shown.append(self._shown(field.name))
            elif value != field.default:
                shown.append(f"{field.name}={self._shown(field.name)}")
        is_own = type(self).__module__.startswith("fewbit.config.")
        package = "fewbit." if is_own else ""
        return f"{package}{type(self).__name__}({', '.join(shown)})"

    def _shown(self, name: str) -> str:
        return repr(getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """Return {field: value} of plain JSON values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]):
        """Make an object from the result of `to_dict`. Missing fields get their default values. Raise InputError for others."""
        if not isinstance(values, Mapping):
            raise InputError(
                f"expected a mapping of the fields of {cls.__name__}, got {type(values).__name__}"
            )
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise InputError(
                    f"expected {', '.join(names)} for {cls.__name__}, got {name!r}{meant(name, names)}"
                )
        for field in fields(cls):
            has_default = field.default is not MISSING or field.default_factory is not MISSING
            if not has_default and field.name not in values:
                raise InputError(f"expected a value of {field.name} for {cls.__name__}, got none")
        return cls(**values)
