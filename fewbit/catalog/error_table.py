"""The errors of the best tables for each function and number of bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral

from fewbit import functions as known
from fewbit.errors import FewbitError
from fewbit.render.formats import short
from fewbit.render.result import Result
from fewbit.render.view import Column, View
from fewbit.sizes import counted
from fewbit.solver.request import count_levels
from fewbit.table import Table, describe_weight

METRICS = ("error", "relative_error")


@dataclass(frozen=True)
class ErrorRow:
    """The tables of a function, one for each number of bits."""

    function: str
    tables: tuple[Table, ...]


@dataclass(frozen=True, repr=False)
class ErrorTable(Result):
    """The errors of tables, with an `ErrorRow` for each function.

    Attributes:
        bits: The numbers of bits, in the order of each row's tables.
        form: The form of the tables, "levels" or "intervals".
        metric: The number that is shown for each table: "error" or "relative_error".
    """

    rows: tuple[ErrorRow, ...]
    bits: tuple[int, ...]
    form: str
    metric: str

    @property
    def title(self) -> str:
        name = self.metric.replace("_", " ")
        return f"{name.capitalize()} of q, form {self.form}, by bits per element"

    def values(self) -> dict[str, dict[int, float]]:
        """Return {function: {bits: error}}, relative if `metric` says so."""
        return {
            row.function: {bits: self._value(row, bits) for bits in self.bits} for row in self.rows
        }

    def _value(self, row: ErrorRow, bits: int) -> float:
        return getattr(row.tables[self.bits.index(bits)], self.metric)

    def records(self) -> list[dict]:
        return [
            {
                "function": table.function,
                "bits": bits,
                "form": table.form,
                "weight": describe_weight(table),
                "levels": len(table.levels),
                "pieces": table.n_pieces,
                "error": table.error,
                "lower_bound": table.lower_bound,
                "relative_error": table.relative_error,
            }
            for row in self.rows
            for bits, table in zip(self.bits, row.tables, strict=True)
        ]

    def view(self) -> View:
        # In a narrow terminal, columns are left out from the last one on. The first one always stays.
        numbers = [
            Column(
                counted(bits, "bit"),
                lambda row, bits=bits: short(self._value(row, bits)),
                drop=len(self.bits) - place if place else 0,
            )
            for place, bits in enumerate(self.bits)
        ]
        name = Column("function", lambda row: row.function, "name", least=16)
        return View(self.title, (name, *numbers), self.rows, self._notes())

    def _notes(self) -> list[str]:
        if not self.rows:
            return []
        weight = self.rows[0].tables[0].weight["kind"]
        metric = "Integral of w (f' - q)^2"
        if self.metric == "relative_error":
            metric = "Norm of f' - q over the norm of f'"
        return [f"{metric}, {weight} weight. 0: q is f' itself."]


def error_table(
    functions: str | Iterable[str] | None = None,
    bits: int | Iterable[int] = range(1, 9),
    *,
    weight: object = "uniform",
    form: str = "levels",
    metric: str = "error",
) -> ErrorTable:
    """Look up the errors of the best tables. Those that are not shipped are solved on first use (`fewbit.load_table`).

    Args:
        functions: A name or an alias, or several; by default all functions that fewbit knows.
        bits: A number of bits, or several.
        weight: The density by which errors count, as in `fewbit.solve`.
        form: "levels" or "intervals", as in `fewbit.solve`.
        metric: "error" or "relative_error".

    Raises:
        FewbitError: `metric` is neither of the two, or a table cannot be solved.
    """
    from fewbit.catalog.store import load_table

    if metric not in METRICS:
        raise FewbitError(f"metric: expected {' or '.join(METRICS)}, got {metric!r}")
    bits = checked_bits(bits)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an unbounded derivative
        for name in names_of(functions):
            tables = tuple(load_table(name, count, weight=weight, form=form) for count in bits)
            rows.append(ErrorRow(name, tables))
    return ErrorTable(tuple(rows), bits, form, metric)


def names_of(functions: str | Iterable[str] | None) -> list[str]:
    """Return canonical names, by default of all functions. "package.module:name" stays."""
    names = known.names() if functions is None else _as_tuple("functions", functions, str, "str")
    return [name if ":" in name else known.canonical(name) for name in names]


def checked_bits(bits: int | Iterable[int]) -> tuple[int, ...]:
    """Return numbers of bits as a tuple. Raise SolveError if one is out of range."""
    return tuple(count_levels(count, None)[1] for count in _as_tuple("bits", bits, Integral, "int"))


def _as_tuple(argument: str, value, kind: type, described: str) -> tuple:
    if not isinstance(value, kind | Iterable):
        raise FewbitError(f"{argument}: expected one or several of type {described}, got {value!r}")
    values = (value,) if isinstance(value, kind) else tuple(value)
    for item in values:
        if not isinstance(item, kind):
            raise FewbitError(f"{argument}: expected values of type {described}, got {item!r}")
    return values
