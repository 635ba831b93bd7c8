"""Tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fewbit.catalog import paper
from fewbit.render.formats import short
from fewbit.render.view import Column, View
from fewbit.sizes import counted
from fewbit.table import Table, describe_function, describe_weight
from fewbit.table.notebook import intervals

MOST_LEVELS = 16
"""The most levels that are listed."""
MOST_INTERVALS = 16
"""The most pieces that are listed for one level."""
PICTURE_WIDTH = 80


class TableReport:
    """A table that the library rich prints with its facts, picture and levels."""

    def __init__(self, table: Table):
        self.table = table

    def __rich_console__(self, console, options):
        from rich.text import Text

        from fewbit.table.sketch import sketch

        table = self.table
        levels, pieces = counted(len(table.levels), "level"), counted(table.n_pieces, "piece")
        name = f"{describe_function(table)}, {counted(table.bits, 'bit')}"
        how = "drawn in" if table.objective == "unbiased" else "in"
        yield Text(f"{name}: {levels} {how} {pieces}", style="bold")
        yield ""
        yield _facts_grid(table)
        yield ""
        picture = Text(sketch(table, width=min(options.max_width, PICTURE_WIDTH) - 1), no_wrap=True)
        picture.highlight_regex("[\u2800-\u28ff]+", "cyan")
        yield picture
        if len(table.levels) <= MOST_LEVELS:
            yield ""
            yield _levels(table)


_ERRORS = {
    "mse": "integral of w (f' - q)^2",
    "unbiased": "expected integral of w (f' - draw)^2",
    "minimax": "largest |f' - q|",
}
_RELATIVE = {
    "mse": "sqrt(error / integral of w f'^2)",
    "unbiased": "sqrt(error / integral of w f'^2)",
    "minimax": "error / largest |f'|",
}
_STATUS = {
    "exact": "q is f' wherever the weight counts",
    "stationary": "the gradient vanishes",
    "optimal": "to the last bit",
    "unrefined": "the optimum of the discrete problem",
    "stalled": "no further step lowered the error",
}


def _facts_grid(table: Table):
    from rich.table import Table as Grid
    from rich.text import Text

    facts = list(_facts(table))
    # Only values with a comment determine the column's width. Other values may extend into the column of comments.
    column = max(len(value) for _, value, comment in facts if comment)
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value, comment in facts:
        line = Text(value)
        if comment:
            line = Text.assemble((f"{value:<{column}}", "bold"), (f"  {comment}", "dim"))
        grid.add_row(name, line)
    return grid


def _facts(table: Table) -> Iterator[tuple[str, str, str]]:
    gap = "" if table.exact else f"; gap {_percent(table.gap)}"
    yield "weight", describe_weight(table), ""
    yield "problem", f"form {table.form}, objective {table.objective}, tails {table.tails}", ""
    yield "error", f"{table.error:.6g}", _ERRORS[table.objective]
    yield "lower bound", f"{table.lower_bound:.6g}", f"no table of this size is below it{gap}"
    yield "relative error", _percent(table.relative_error), _RELATIVE[table.objective]
    if table.knots is not None:
        knots = f"of f' drawn as {len(table.knots.points)} knots"
        yield "stand-in error", f"{table.knots_error:.3g}", knots
    printed = paper.counterpart(table)
    if printed is not None:
        yield "paper", f"{printed:.{paper.DECIMALS}f}", _against(table.error, printed)
    status = table.solver.get("status")
    if status:
        yield "status", status, _STATUS.get(status, "")
    how = [f"grid {table.solver['grid']}", f"fewbit {table.solver['version']}"]
    if "seconds" in table.solver:
        how.insert(0, f"{table.solver['seconds']:.2f} s")
    yield "solver", ", ".join(how), ""


def _percent(fraction: float) -> str:
    return "0 %" if fraction < 1e-12 else f"{100 * fraction:.3g} %"


def _against(error: float, printed: float) -> str:
    source = "Few-bit Backward, Table 3"
    if paper.same_digits(error, printed):
        return f"the same digits as {source}"
    if error > printed:
        return f"{error / printed:.3g}x higher than {source}" if printed else f"above {source}"
    return f"{printed / error:.3g}x lower than {source}" if error else f"below {source}"


def _levels(table: Table) -> View:
    place = "where x is in"
    if table.objective == "unbiased":
        place = "draws between this level and the next where x is in"
    pieces = [[] for _ in table.levels]
    for code, piece in zip(table.codes, intervals(table), strict=True):
        pieces[code].append(piece)
    columns = (
        Column("code", lambda code: str(code)),
        Column("level", lambda code: f"{table.levels[code]:.6g}"),
        Column(place, lambda code: _listed(pieces[code]), "text"),
    )
    return View("", columns, range(len(table.levels)))


def _listed(pieces: list[str]) -> str:
    rest = len(pieces) - MOST_INTERVALS
    more = [f"and {rest} more"] if rest > 0 else []
    return "  ".join([*pieces[:MOST_INTERVALS], *more]) or "-"


def tables_report(title: str, tables: Sequence[Table]) -> View:
    """Return a list of tables, with a line for each."""
    columns = (
        Column("bits", lambda table: str(table.bits)),
        Column("form", _form, "word"),
        Column("weight", _weight, "name", least=16),
        Column("levels", lambda table: str(len(table.levels)), drop=2),
        Column("pieces", lambda table: str(table.n_pieces), drop=1),
        Column("error", lambda table: short(table.error)),
        Column("gap", lambda table: _gap(table.gap), drop=3),
        Column("relative", lambda table: f"{100 * table.relative_error:.3g} %"),
    )
    return View(title, columns, tables)


def _weight(table: Table) -> str:
    return describe_weight(table).partition(" on ")[0]


def _form(table: Table) -> str:
    return table.form if table.objective == "mse" else f"{table.form}, {table.objective}"


def _gap(gap: float) -> str:
    if gap == 0:
        return "0 %"
    return f"{100 * gap:.2g} %" if gap >= 1e-4 else "<.01 %"
