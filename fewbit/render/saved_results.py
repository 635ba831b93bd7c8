"""Results that are saved as JSON documents of a schema, and loaded again."""

from __future__ import annotations

import os
from typing import ClassVar, Self

from fewbit.errors import InputError
from fewbit.printable import shorten
from fewbit.render.result import Result
from fewbit.schema import find_error, format_path
from fewbit.schema.documents import parse_json, read_text


class Document(Result):
    """A result that can be saved as JSON and loaded again without loss of precision.

    A subclass defines the name of its JSON Schema, `_schema`, `to_dict`, and the class method `_of_document`, its inverse.
    """

    _schema: ClassVar[str]

    def document(self) -> dict:
        """Return the result of `to_dict`."""
        return self.to_dict()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Make a result from JSON text.

        Raises:
            InputError: The text is not a document of the class's schema.
        """
        document = parse_json(text, error=InputError)
        found = document.get("schema") if isinstance(document, dict) else None
        if found != cls._schema:
            raise InputError(f"expected the schema {cls._schema!r}, got {shorten(found)}")
        problem = find_error(document, cls._schema)
        if problem is not None:
            path, message = problem
            raise InputError(f"{path}: {message}" if path else message)
        _check_texts(document)
        return cls._of_document(document)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Make a result from a file that `save` wrote.

        Raises:
            InputError: The file cannot be read, or is not a document of the class's schema.
        """
        text = read_text(path, InputError)
        try:
            return cls.from_json(text)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


def _check_texts(value, place: tuple = ()) -> None:
    """Raise InputError, with the path `place`, if a text has unprintable characters: files may be untrusted."""
    if isinstance(value, dict):
        for key, inside in value.items():
            _check_texts(key, place)
            _check_texts(inside, (*place, key))
    elif isinstance(value, list):
        for i, inside in enumerate(value):
            _check_texts(inside, (*place, i))
    elif isinstance(value, str) and not value.isprintable():
        start = f"{format_path(place)}: " if place else ""
        raise InputError(f"{start}expected printable characters, got {shorten(value)}")
