"""A table as HTML for notebooks: its properties, its picture, its levels and pieces."""

from __future__ import annotations

from functools import partial

from fewbit.render import html
from fewbit.render.view import Column, View
from fewbit.sizes import counted
from fewbit.table import Table, describe_weight
from fewbit.table.plot import headline, plot_table

FACTS = (Column("", lambda fact: fact[0], "word"), Column("", lambda fact: fact[1], "text"))


def table_html(table: Table) -> str:
    """Return a table as HTML, with a picture if matplotlib is installed."""
    facts = [
        ("weight", describe_weight(table)),
        ("form", f"{table.form}, tails {table.tails}"),
        ("size", f"{counted(len(table.levels), 'level')}, {counted(table.n_pieces, 'piece')}"),
        (
            "error",
            f"{table.error:.6g} (lower bound {table.lower_bound:.6g}, gap {100 * table.gap:.2g} %)",
        ),
        ("relative error", f"{table.relative_error:.6g}"),
        (
            "solver",
            f"fewbit {table.solver['version']}, grid {table.solver['grid']}, revision {table.revision}",
        ),
    ]
    if table.knots is not None:
        knots = f"{len(table.knots.points)} knots, error {table.knots_error:.3g}"
        facts.append(("stand-in", knots))
    picture = partial(plot_table, table)
    return html.block(View(headline(table), FACTS, facts, figure=picture, more=[_pieces(table)]))


def _pieces(table: Table) -> View:
    pieces = intervals(table)
    columns = (
        Column("piece", str),
        Column("x", lambda i: pieces[i].replace("inf", "∞")),
        Column("level", lambda i: str(table.codes[i])),
        Column("value", lambda i: f"{table.levels[table.codes[i]]:.8g}"),
    )
    title = "lower level of each piece" if table.objective == "unbiased" else "levels and pieces"
    return View(title, columns, range(table.n_pieces), is_folded=True)


def intervals(table: Table) -> list[str]:
    """Return each piece as text, such as `(0, 1]`."""
    reach = max(map(abs, table.domain))
    left, right = ["(-inf"], []
    for x, side in zip(table.breaks.tolist(), table.closed, strict=True):
        number = "0" if abs(x) < 1e-12 * reach else f"{x:.6g}"  # the solver's 0, up to rounding
        right.append(number + (")" if side == "left" else "]"))
        left.append(("[" if side == "left" else "(") + number)
    return [f"{start}, {end}" for start, end in zip(left, [*right, "inf)"], strict=True)]
