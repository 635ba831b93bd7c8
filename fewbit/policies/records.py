"""Records: frozen dataclasses that a controller's state stores, by `plain` and `read`, and that processes merge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from functools import cache
from typing import Self, get_args, get_origin, get_type_hints

from fewbit.errors import InputError
from fewbit.printable import shorten

MOST = 1e100
"""The largest squared norm of a gradient: the product of two fits float64."""
_EXPECTED = {bool: "true or false", int: "a whole number", str: "a string"}


def first(values: list):
    """Return the first process's value."""
    return values[0]


def mean(values: list) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def rounded_mean(values: list) -> int:
    """Return the mean, rounded to a whole number."""
    return round(mean(values))


def root_sum_square(values: list) -> float:
    """Return the root of the sum of squares."""
    return math.sqrt(sum(value**2 for value in values))


def vector_sum(values: list[tuple | None]) -> tuple | None:
    """Return the sum of the vectors that are not None, padded with zeros to one length."""
    vectors = [vector for vector in values if vector is not None]
    length = max(map(len, vectors), default=0)
    padded = [(*vector, *[0.0] * (length - len(vector))) for vector in vectors]
    return tuple(map(sum, zip(*padded, strict=True))) if vectors else None


def vector_mean(values: list[tuple | None]) -> tuple | None:
    """Return the mean of the vectors that are not None; None if their lengths differ."""
    vectors = [vector for vector in values if vector is not None]
    if len(set(map(len, vectors))) != 1:
        return None
    return tuple(mean(numbers) for numbers in zip(*vectors, strict=True))


def merge_by_key(values: list[Mapping]) -> dict:
    """Merge mappings; records with the same key become one."""
    by_key: dict = {}
    for mapping in values:
        for key, value in mapping.items():
            by_key.setdefault(key, []).append(value)
    return {key: type(records[0]).merged(records) for key, records in by_key.items()}


def merged_by(merge: Callable[[list], object], default=MISSING, **options):
    """Return a dataclass field whose values in all processes, in rank order, are merged by `merge`."""
    return field(metadata={"merge": merge}, default=default, **options)


class Record:
    """The base of parts of a state. A field without `merged_by` has the first process's value."""

    @property
    def key(self):
        """The record's key in a mapping."""
        raise NotImplementedError

    @classmethod
    def merged(cls, records: list[Self]) -> Self:
        """Merge all processes' records of one thing, in rank order."""
        merged = {
            item.name: item.metadata.get("merge", first)(
                [getattr(made, item.name) for made in records]
            )
            for item in fields(cls)
        }
        return cls(**merged)


def plain(value):
    """Return a value as a state stores it. A mapping becomes the list of its values."""
    if isinstance(value, Record):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return [plain(item) for item in value.values()]
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


_types_of = cache(get_type_hints)


def read(kind, value, where: str = ""):
    """Return a value of type `kind` from what `plain` has made of it.

    `kind` is the type of a number or string, a `Record`, a NamedTuple, a tuple, a mapping from keys to records, or one
    of these or None. `where` is the place in the state, such as "slots[3].bits".

    Raises:
        InputError: the entry has another type, an entry is missing or left over, or a number is not finite.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if type(None) in inner:
        return None if value is None else read(inner[0], value, where)
    if origin is None and issubclass(kind, Record):
        return read_fields(kind, value, where)
    if kind is float:
        if type(value) in (int, float) and abs(value) < math.inf:
            return float(value)
        raise wrong(where, "a finite number", value)
    if kind in _EXPECTED:
        if type(value) is kind:
            return value
        raise wrong(where, _EXPECTED[kind], value)
    if not isinstance(value, list | tuple):
        raise wrong(where, "a list", value)
    if origin is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
    elif origin is None:
        kinds = tuple(_types_of(kind).values())
    else:
        kinds = inner[1:] * len(value)
    if len(kinds) != len(value):
        raise wrong(where, f"a list of {len(kinds)} entries", value)
    parts = [
        read(part, entry, f"{where}[{i}]")
        for i, (part, entry) in enumerate(zip(kinds, value, strict=True))
    ]
    if origin is tuple:
        return tuple(parts)
    return kind(*parts) if origin is None else {part.key: part for part in parts}


def read_fields(kind: type[Record], value, where: str = "") -> Record:
    """Return a record; see `read`."""
    types = {item.name: _types_of(kind)[item.name] for item in fields(kind)}
    if not isinstance(value, Mapping) or value.keys() != types.keys():
        raise wrong(where or "state", f"the entries {', '.join(types)}", value)
    prefix = f"{where}." if where else ""
    return kind(**{name: read(part, value[name], prefix + name) for name, part in types.items()})


def wrong(where: str, expected: str, got) -> InputError:
    """Return an InputError for an entry of a state."""
    return InputError(f"{where}: expected {expected}, got {shorten(got)}")


def check_layer(name: str, names, kind: str = "layer") -> None:
    """Raise InputError unless a state's name is in `names`; `kind` is the noun in the message."""
    if name not in names:
        raise InputError(
            f"expected the state of this model's controller, got one with a {kind} {shorten(name)}, which it lacks"
        )
