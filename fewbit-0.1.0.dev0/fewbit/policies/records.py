"""Records: frozen dataclasses that can be stored in a controller's state and merged over processes.

Each field is declared once, with its shape and a rule for merging. A shape (`fewbit.schema.shapes`) is a function that
checks one entry of a state and returns the field's value. Conversion to plain values, validation and merging of a
record follow from these declarations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from typing import Self

from fewbit.schema.shapes import MOST_ROWS, Shape, entries, listed, record, wrong


def first(values: list):
    """Return the value of the first process, for values that are the same in all processes, such as names."""
    return values[0]


def mean(values: list) -> float:
    """Return the mean of the values of all processes."""
    return sum(values) / len(values)


def rounded_mean(values: list) -> int:
    """Return the mean of the values of all processes, rounded to a whole number."""
    return round(mean(values))


def root_sum_square(values: list) -> float:
    """Return the root of the sum of squares, for errors that are independent, because their squares add up."""
    return math.sqrt(sum(value**2 for value in values))


def vector_sum(values: list[tuple | None]) -> tuple | None:
    """Return the sum of vectors, with zeros appended to shorter ones. Skip arguments that are `None`.

    If no argument is a vector, the result is None.
    """
    vectors = [vector for vector in values if vector is not None]
    length = max(map(len, vectors), default=0)
    padded = [(*vector, *[0.0] * (length - len(vector))) for vector in vectors]
    return tuple(map(sum, zip(*padded, strict=True))) if vectors else None


def vector_mean(values: list[tuple | None]) -> tuple | None:
    """Return the mean of vectors. Skip arguments that are `None`.

    If no argument is a vector, or if the vectors have different lengths, the result is None.
    """
    vectors = [vector for vector in values if vector is not None]
    if len(set(map(len, vectors))) != 1:
        return None
    return tuple(mean(numbers) for numbers in zip(*vectors, strict=True))


def merge_by_key(values: list[Mapping]) -> dict:
    """Merge the mappings of all processes. Records with the same key become one; keys stay in order of appearance."""
    by_key: dict = {}
    for mapping in values:
        for key, value in mapping.items():
            by_key.setdefault(key, []).append(value)
    return {key: type(records[0]).merged(records) for key, records in by_key.items()}


def entry(shape: Shape, merge: Callable[[list], object] = first, key: str = "", **options):
    """Return a dataclass field for a record.

    Args:
        shape: a function that checks the field's entry in a state and returns the field's value
            (`fewbit.schema.shapes`).
        merge: a function that makes one value from the list of the values of all processes.
        key: the key of the field's entry in a state, if it differs from the field's name.
        options: further arguments of `dataclasses.field`.
    """
    return field(metadata={"shape": shape, "merge": merge, "key": key}, **options)


class Record:
    """The base of dataclasses whose fields are made with `entry`."""

    def to_plain(self) -> dict:
        """Return the record as entries of a state: plain numbers, strings, lists and dictionaries."""
        return {_key(item): plain(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def shapes(cls) -> dict[str, Shape]:
        """Return the shape of each entry, by the entry's key."""
        return {_key(item): item.metadata["shape"] for item in fields(cls)}

    @classmethod
    def from_entries(cls, values: Mapping, where: str = "") -> Self:
        """Make a record from entries that its `shapes` have checked.

        Args:
            values: the entries by key. Entries with other keys than the record's are ignored.
            where: the text with which the messages of errors begin.
        """
        made = cls(**{item.name: values[_key(item)] for item in fields(cls)})
        made.check(where)
        return made

    @classmethod
    def read(cls, value, where: str) -> Self:
        """Check the plain form of a record in a state, and return the record. This method is itself a shape.

        Raises:
            InputError: the value is not the plain form of a valid record. The message begins with `where`.
        """
        return cls.from_entries(record(**cls.shapes())(value, where), where)

    def check(self, where: str) -> None:
        """Raise InputError if fields contradict each other. The message begins with `where`."""

    @classmethod
    def merged(cls, records: list[Self]) -> Self:
        """Merge the records of all processes about one thing, such as a slot, in rank order, into one record."""
        merged = {
            item.name: item.metadata["merge"]([getattr(made, item.name) for made in records])
            for item in fields(cls)
        }
        return cls(**merged)


def plain(value):
    """Return a value as a state stores it.

    A mapping becomes the list of its values. Its keys are not stored, because they follow from the values.
    """
    if isinstance(value, Record):
        return value.to_plain()
    if isinstance(value, Mapping):
        return [plain(item) for item in value.values()]
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def vector(shape: Shape, least: int = 0, most: int = MOST_ROWS) -> Shape:
    """Return the shape of a list with `least` to `most` entries. The field's value is a tuple.

    Args:
        shape: the shape of one entry of the list.
        least: the fewest entries.
        most: the most entries.
    """
    check = listed(shape, least, most)
    return lambda value, where: tuple(check(value, where))


def named_tuple(cls: type, *shapes: Shape) -> Shape:
    """Return the shape of a list with one entry for each field of a NamedTuple. The field's value is such a tuple.

    Args:
        cls: the NamedTuple.
        shapes: the shape of each entry.
    """
    check = entries(*shapes)
    return lambda value, where: cls(*check(value, where))


def keyed(shape: Shape, key: Callable, expected: str) -> Shape:
    """Return the shape of a list of records. The field's value is a mapping from keys to the records.

    Args:
        shape: the shape of one record.
        key: a function that returns the key of a record.
        expected: describes the list in the error message for two records with the same key.
    """
    check = listed(shape)

    def read(value, where):
        made: Iterable = check(value, where)
        found = {}
        for item in made:
            if key(item) in found:
                raise wrong(where, expected, key(item))
            found[key(item)] = item
        return found

    return read


def _key(item) -> str:
    return item.metadata["key"] or item.name
