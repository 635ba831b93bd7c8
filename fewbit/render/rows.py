"""What tables of what a controller has found have in common: rows as a sequence, and a line where there are none. No torch here."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from fewbit.catalog.report import _Report

NAMED = 4
"""Largest number of layers that a line names."""


class Rows(_Report, Sequence):
    """Rows, the same whatever asks for them; a subclass has `_found`, the title where there are some, and `__eq__`.

    empty: what is said where there are none. ended: what has become of the model, where the rows are none of a model that trains
    any more. unobserved: {name: why, in words} of layers of which no observation knows what they keep.
    """

    _not_observed = "not observed"  # how the line begins that names such layers

    def __init__(self, rows, empty: str, ended: str, unobserved: Mapping[str, str] | None = None):
        self._rows = tuple(rows)
        self._why = dict(unobserved or {})
        self._empty = "; ".join([empty, *self._of_unobserved()])
        self._ended = ended

    @property
    def unobserved(self) -> tuple[str, ...]:
        """Names of the layers of which no observation knows what they keep, in the order of the model."""
        return tuple(self._why)

    def _of_unobserved(self) -> list[str]:
        """Return a line for each reason."""
        by_reason = {}
        for name, why in self._why.items():
            by_reason.setdefault(why, []).append(name or "the model")
        lines = []
        for why, names in by_reason.items():
            rest = len(names) - NAMED
            more = f" and {rest} more" if rest > 0 else ""
            named = ", ".join(names[:NAMED]) + more
            lines.append(f"{self._not_observed}: {named} ({why})")
        return lines

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
