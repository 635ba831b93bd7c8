"""What measurements have in common: they are saved as JSON documents, and show a picture beside their table."""

from __future__ import annotations

import base64
import html
import json
from typing import ClassVar, Self

from fewbit.catalog.report import _Report
from fewbit.errors import FewbitError, InputError
from fewbit.files import write_atomic
from fewbit.schema import find_error, format_path, shorten
from fewbit.schema.documents import parse_json, read_text
from fewbit.table import plot


class Document:
    """Saved and loaded by a JSON schema; a subclass has `_schema`, its name, `to_dict` and `_of_document`."""

    _schema: ClassVar[str]

    def to_json(self) -> str:
        """`to_dict()` as JSON text; `from_json` has every number back exactly."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """InputError for what is not a document of the class's schema."""
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

    def save(self, path, force: bool = False) -> None:
        """Writes `to_json()` to `path`; OutputExistsError if it exists, unless `force`."""
        write_atomic(path, self.to_json(), force=force)

    @classmethod
    def load(cls, path) -> Self:
        """What `save` wrote; InputError for a file that cannot be read, and as `from_json`."""
        text = read_text(path, InputError)
        try:
            return cls.from_json(text)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


def _check_texts(value, where: tuple = ()) -> None:
    """Raise InputError if a text contains control characters, since the file may come from an untrusted source."""
    if isinstance(value, dict):
        for key, inside in value.items():
            _check_texts(key, where)
            _check_texts(inside, (*where, key))
    elif isinstance(value, list):
        for i, inside in enumerate(value):
            _check_texts(inside, (*where, i))
    elif isinstance(value, str) and not value.isprintable():
        place = f"{format_path(where)}: " if where else ""
        raise InputError(f"{place}expected printable characters, got {shorten(value)}")


class PicturedReport(_Report):
    """A report whose HTML has the picture below the table; a subclass has `plot()`."""

    def _repr_html_(self) -> str:
        return f"<div>{super()._repr_html_()}{self._html_picture()}</div>"

    def _html_picture(self) -> str:
        try:
            picture = base64.b64encode(plot.render(self.plot(), dpi=110)).decode()
        except FewbitError:  # no matplotlib
            return ""
        alt = html.escape(self.title, quote=True)
        return f'<img alt="{alt}" style="max-width:100%" src="data:image/png;base64,{picture}">'
