"""The errors of optimal tables, compared with those that the paper prints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

from fewbit.catalog import paper
from fewbit.catalog.error_table import checked_bits, names_of
from fewbit.functions.callables import resolve
from fewbit.functions.function import Function
from fewbit.render.result import Result
from fewbit.render.view import Column, View
from fewbit.sizes import counted


@dataclass(frozen=True)
class ComparisonRow:
    """The errors of a function's tables with one number of bits: integrals of (f' - q)**2.

    Attributes:
        paper: The error that the paper prints, or None.
        discrete: The least error with breaks on a grid (the paper's eq. 9); None without `paper`.
        reproduced: Whether `discrete`, rounded, is the printed error; None without `paper`.
        intervals: The least error in form "intervals".
        intervals_lower_bound: A lower bound on `intervals`.
        levels: The least error in form "levels".
        levels_lower_bound: A lower bound on `levels`.
        ratio: `intervals` / `levels`; None if `levels` is 0.
        parity: Whether f' is even. Then, as in the paper, pieces in form "intervals" lie in x >= 0, q(-x) = q(x), and `intervals` is
            the error of both halves.
    """

    function: str
    bits: int
    paper: float | None
    discrete: float | None
    reproduced: bool | None
    intervals: float
    intervals_lower_bound: float
    levels: float
    levels_lower_bound: float
    ratio: float | None
    parity: bool


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """A `ComparisonRow` for each function and number of bits."""

    rows: tuple[ComparisonRow, ...]

    title = "Error at the same memory: the paper's intervals, and levels that pieces share"

    def records(self) -> list[dict]:
        return [asdict(row) for row in self.rows]

    def view(self) -> View:
        columns = (
            Column(
                "function", lambda row: row.function + "*" * row.parity, "name", once=True, least=16
            ),
            Column("bits", lambda row: str(row.bits)),
            Column("paper", lambda row: _printed(row.paper), drop=4),
            Column("eq. 9", lambda row: _printed(row.discrete), drop=3),
            Column("intervals", lambda row: _digits(row.intervals)),
            Column("levels", lambda row: _digits(row.levels)),
            Column("lower", lambda row: f"{row.ratio:.2f}x" if row.ratio else "-", drop=2),
            Column("bound", lambda row: _digits(row.levels_lower_bound), drop=1),
        )
        notes = [*self._verdict(), "", *self._legend()] if self.rows else []
        return View(self.title, columns, self.rows, notes)

    def _verdict(self) -> Iterator[str]:
        printed = [row for row in self.rows if row.paper is not None]
        if printed:
            same = sum(row.reproduced for row in printed)
            yield f"The paper's discrete problem (eq. 9) gives {same} of {len(printed)} printed figures."
            above = sum(round(row.intervals, paper.DECIMALS) > row.paper for row in printed)
            below = sum(round(row.intervals, paper.DECIMALS) < row.paper for row in printed)
            yield f"Over all breaks, intervals are lower than printed in {below}, higher in {above}."
        worse = sum(row.levels > row.intervals * (1 + 1e-9) for row in self.rows)
        if worse:
            yield f"Levels are above intervals in {worse} of {len(self.rows)} rows."
        else:
            yield "Levels are nowhere above intervals."

    def _legend(self) -> Iterator[str]:
        if any(row.paper is not None for row in self.rows):
            yield f"paper: {paper.CITATION}."
            yield f"eq. 9: its problem, breaks on a grid of {paper.CELLS} cells, solved exactly."
        yield "intervals, levels: over all breaks; integral of (f' - q)^2, uniform weight."
        yield "lower: intervals / levels. bound: no table of so many levels is below it."
        if any(row.parity for row in self.rows):
            yield "* f' is even: intervals of |x|, as in the paper's table; the error of both halves."


def _printed(value: float | None) -> str:
    return "-" if value is None else f"{value:.{paper.DECIMALS}f}"


def _digits(value: float) -> str:
    return f"{value:.4g}" if value == 0 or value >= 1e-4 else f"{value:.3e}"


def compare(
    functions: str | Iterable[str] | None = None,
    bits: int | Iterable[int] = (1, 2, 3, 4),
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> Comparison:
    """Solve tables of both forms anew, and compare their errors with the paper's Table 3.

    Args:
        functions: Names or aliases; by default the paper's functions (ReLU with 1 bit only), and Mish, without a printed error.
        bits: A number of bits, or several.
        progress: Called as ``progress(what, done, total)`` before each pair of tables is solved.

    Raises:
        FewbitError: A name or a number of bits cannot be used.
    """
    bits = checked_bits(bits)
    names = [*paper.TABLE_3, "mish"] if functions is None else names_of(functions)
    resolved = {name: resolve(name) for name in names}
    problems = [(name, count) for name in dict.fromkeys(names) for count in bits]
    if functions is None:
        # ReLU's derivative has two values, so one bit is exact. The paper has no figure for more bits.
        problems = [(name, count) for name, count in problems if name != "relu" or count == 1]
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # warnings about unbounded derivatives
        for done, (name, count) in enumerate(problems):
            if progress is not None:
                progress(f"{name}, {counted(count, 'bit')}", done, len(problems))
            rows.append(_compare(name, resolved[name], count))
    return Comparison(tuple(rows))


def _compare(name: str, f: Function, bits: int) -> ComparisonRow:
    from fewbit.solver.solve import solve

    printed = paper.printed_error(name, bits)
    discrete = None if printed is None else paper.discrete_optimum(name, bits)
    levels = solve(name, bits)
    low, high = f.domain
    parity = f.even_derivative and low == -high
    half = (0.0, high) if parity else None
    intervals = solve(name, bits, form="intervals", domain=half)
    halves = 2 if parity else 1
    error, bound = halves * intervals.error, halves * intervals.lower_bound
    return ComparisonRow(
        function=name,
        bits=bits,
        paper=printed,
        discrete=discrete,
        reproduced=None if printed is None else paper.same_digits(discrete, printed),
        intervals=error,
        intervals_lower_bound=bound,
        levels=levels.error,
        levels_lower_bound=levels.lower_bound,
        ratio=error / levels.error if levels.error > 0 else None,
        parity=parity,
    )
