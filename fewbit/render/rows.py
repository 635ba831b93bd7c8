"""The base class of results that are a sequence of rows about the layers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fewbit.render.result import Result
from fewbit.render.view import View

NAMED = 4
"""The most layers that a line names."""


class Rows(Result, Sequence):
    """A result that is a sequence of rows, equal to another of its class with equal rows.

    A subclass defines the title `_headline`, and the method `_full`, which returns the view, for results with rows.

    Args:
        rows: Named tuples, in the order in which the forward pass reaches the layers.
        empty: The line that is shown if there are no rows.
        ended: The reason why the model is not trained any more, with which the title begins, or "".
        unobserved: {path of a layer: the reason why its saved tensors were not measured}, in the order of the model.
    """

    _not_observed = "not observed"  # the beginning of a line that names unobserved layers

    def __init__(
        self, rows: Iterable, empty: str, ended: str, unobserved: Mapping[str, str] | None = None
    ):
        self._rows = tuple(rows)
        self._why = dict(unobserved or {})
        self._empty = "; ".join([empty, *self._of_unobserved()])
        self._ended = ended

    @property
    def unobserved(self) -> tuple[str, ...]:
        """The paths of the layers whose saved tensors were not measured."""
        return tuple(self._why)

    def _of_unobserved(self) -> list[str]:
        by_reason = {}
        for name, why in self._why.items():
            by_reason.setdefault(why, []).append(name or "the model")
        lines = []
        for why, names in by_reason.items():
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            lines.append(f"{self._not_observed}: {', '.join(names[:NAMED])}{more} ({why})")
        return lines

    def __getitem__(self, index):
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other) -> bool:
        return isinstance(other, type(self)) and self._rows == other._rows

    __hash__ = None

    @property
    def title(self) -> str:
        text = self._headline if self else self._empty
        return f"{self._ended}: {text}" if self._ended else text

    def records(self) -> list[dict]:
        return [row._asdict() for row in self]

    def view(self) -> View:
        return self._full() if self else View(self.title)
