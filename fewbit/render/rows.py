"""What tables of what a controller has found have in common: rows as a sequence, and a line where there are none. No torch here."""

from __future__ import annotations

import html
from collections.abc import Sequence

from fewbit.catalog.report import _Report


class Rows(_Report, Sequence):
    """Rows, the same whatever asks for them; a subclass has `_found`, the title where there are some, and `__eq__`.

    empty: what is said where there are none. ended: what has become of the model, where the rows are none of a model that trains
    any more.
    """

    def __init__(self, rows, empty: str, ended: str):
        self._rows = tuple(rows)
        self._empty = empty
        self._ended = ended

    def __getitem__(self, index):
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    __hash__ = None

    @property
    def title(self) -> str:
        text = self._found if self else self._empty
        return f"{self._ended}: {text}" if self._ended else text

    def __rich_console__(self, console, options):
        return super().__rich_console__(console, options) if self else [self.title]

    def _repr_html_(self) -> str:
        return super()._repr_html_() if self else f"<div><b>{html.escape(self.title)}</b></div>"
