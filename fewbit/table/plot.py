"""Pictures of tables, which import matplotlib when they are drawn, and pyplot never."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fewbit.errors import FewbitError
from fewbit.render import figures
from fewbit.render.figures import ERROR, INK, MUTED, literal
from fewbit.sizes import counted
from fewbit.table import FLOAT32_MAX, Table, describe_function, describe_weight

# ---------------------------------------------------------------------------------------------------------
# The numbers that are drawn, computed without matplotlib


class Curve(NamedTuple):
    """Points of a curve. NaN separates parts that are not joined."""

    x: np.ndarray
    y: np.ndarray


class Step(NamedTuple):
    """A piece of q: its ends, its level's value, and the level's index (`code`)."""

    start: float
    end: float
    value: float
    code: int


def window(table: Table, function=None) -> tuple[float, float]:
    """Return the ends of the part of the domain in which f' (or q if f' is unknown) changes, with a margin."""
    low, high = table.domain
    x = np.linspace(low, high, 4001)
    y = _finite(table(x) if function is None else _derivative(function, x))
    if function is not None and np.isinf(function.slopes).any():
        # Half the largest distance of two levels: with levels of equal distances, the outermost pieces are not longer
        # than the others.
        slack = 0.5 * np.diff(np.sort(table.levels)).max(initial=0.0)
        y = np.clip(y, table.levels.min() - slack, table.levels.max() + slack)
    # q is constant where f' differs from its final value by less than about half the distance between levels.
    tolerance = np.ptp(y) * min(0.01, 0.25 / len(table.levels))
    moving = x[(np.abs(y - y[0]) > tolerance) & (np.abs(y - y[-1]) > tolerance)]
    edge = x[1:][np.abs(np.diff(y)) > tolerance]
    points = np.concatenate([moving, edge])
    if points.size == 0:
        return low, high
    start, end = points.min(), points.max()
    margin = max(0.08 * (end - start), 0.5 * (0.2 * (high - low) - (end - start)))
    return max(low, start - margin), min(high, end + margin)


def derivative_curve(function, low: float, high: float, n: int = 2000) -> Curve:
    """Return the curve of f' on [low, high], with gaps at kinks."""
    kinks = [kink for kink in map(float, function.kinks) if low < kink < high]
    nudge = 1e-9 * (high - low)  # the value at a jump belongs to neither side
    ends = zip(
        [low, *(kink + nudge for kink in kinks)],
        [*(kink - nudge for kink in kinks), high],
        strict=False,
    )
    parts = [
        np.append(np.linspace(a, b, max(16, round(n * (b - a) / (high - low)))), np.nan)
        for a, b in ends
    ]
    x = np.concatenate(parts)[:-1]
    y = _derivative(function, x)
    return Curve(x, np.where(np.isfinite(y), y, np.nan))


def steps(table: Table, low: float, high: float) -> list[Step]:
    """Return the pieces of q, cut off at `low` and `high`."""
    edges = [-np.inf, *table.breaks.tolist(), np.inf]
    pieces = zip(
        edges, edges[1:], table.levels[table.codes].tolist(), table.codes.tolist(), strict=False
    )
    return [
        Step(max(a, low), min(b, high), value, code)
        for a, b, value, code in pieces
        if a < high and b > low
    ]


def value_limits(table: Table, curve: Curve | None) -> tuple[float, float]:
    """Return limits of the vertical axis, with all levels and nearby values of f'."""
    low, high = float(table.levels.min()), float(table.levels.max())
    slack = (high - low) or 1.0
    if curve is not None and np.isfinite(curve.y).any():
        low, high = (
            min(low, max(np.nanmin(curve.y), low - slack)),
            max(high, min(np.nanmax(curve.y), high + slack)),
        )
    margin = 0.06 * ((high - low) or 2.0)
    return low - margin, high + margin


def _derivative(function, x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        y = np.asarray(function.derivative(x), np.float64)
    # A NaN in x separates parts of a curve, and f' may have turned it into a number. Numbers beyond float32 become NaN
    # too, because matplotlib cannot scale an axis for them.
    return np.where(np.isnan(x) | (np.abs(y) > FLOAT32_MAX), np.nan, y)


def _finite(y: np.ndarray) -> np.ndarray:
    return np.nan_to_num(y, nan=0.0, posinf=0.0, neginf=0.0)


# ---------------------------------------------------------------------------------------------------------
# Figures


def plot_table(table: Table, path: str | os.PathLike | None = None, ax=None, force: bool = False):
    """Draw f', if it is known, and q, and below them their difference, as `Table.plot`."""
    if ax is None:
        return figures.draw(lambda figure: _draw_figure(figure, table), path, force)
    return figures.draw(lambda _: _draw_axes(ax, table), path, force, ax.figure)


def plot_grid(tables: Sequence[Table], path: str | os.PathLike | None = None, force: bool = False):
    """Draw tables, a row for each function and a column for each form and number of bits. Return the matplotlib Figure.

    Arguments and errors are those of `Table.plot`. Of several tables for one place, the last one is drawn.
    """
    cells = {(describe_function(table), (table.form, table.bits)): table for table in tables}
    if not cells:
        raise FewbitError("tables: expected at least one table to plot, got none")
    return figures.draw(lambda figure: _draw_grid(figure, cells), path, force)


def _draw_grid(figure, cells: dict[tuple, Table]) -> None:
    rows = list(dict.fromkeys(name for name, _ in cells))
    columns = sorted({column for _, column in cells})
    forms = {form for form, _ in columns}
    figure.set_size_inches(0.6 + 2.7 * len(columns), 0.4 + 1.9 * len(rows))
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    for i, name in enumerate(rows):
        for j, column in enumerate(columns):
            _draw_cell(
                axes[i, j],
                cells.get((name, column)),
                legend=i == 0 and j == 0,
                label=name if j == 0 else None,
                form=column[0] if len(forms) > 1 else None,
            )


def headline(table: Table) -> str:
    """Describe a table in one line: its function, bits and error."""
    quality = "exact" if table.exact else f"error {table.error:.4g}"
    kind = {"mse": "", "unbiased": ", unbiased", "minimax": ", minimax"}[table.objective]
    return f"{describe_function(table)}, {counted(table.bits, 'bit')}{kind}: {quality}"


def _draw_axes(axes, table: Table) -> None:
    _draw_values(axes, table, legend=True)
    axes.set_title(literal(headline(table)), loc="left")


def _draw_figure(figure, table: Table) -> None:
    function = table.activation
    figure.set_size_inches(7.2, 5.0 if function is not None else 3.6)
    if function is None:
        axes = figure.subplots()
        _draw_values(axes, table, legend=True)
        axes.set_xlabel("x")
    else:
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, 1])
        _draw_values(axes, table, legend=True)
        _draw_error(below, table, function)
    axes.set_title(literal(headline(table)), loc="left", color=INK, fontweight="bold")
    axes.set_title(literal(describe_weight(table)), loc="right", color=MUTED, fontsize=9)


def _level_colors(table: Table) -> np.ndarray:
    # viridis is safe for color-blind readers; its light end is too faint on white.
    return figures.matplotlib().colormaps["viridis"](np.linspace(0.0, 0.86, len(table.levels)))


_DERIVATIVE = "f\u200a′"
"""The label of f', with a hair space because the prime would touch the f."""


def _draw_values(axes, table: Table, legend: bool, wide: float = 2.6) -> None:
    function = table.activation
    low, high = window(table, function)
    curve = None if function is None else derivative_curve(function, low, high)
    if table.objective == "unbiased":
        _draw_band(axes, table, low, high)
    else:
        _draw_steps(axes, table, low, high, wide)
    if curve is not None:
        axes.plot(*curve, color=INK, linewidth=1.1, label=_DERIVATIVE, zorder=3)
    axes.set_xlim(low, high)
    axes.set_ylim(*value_limits(table, curve))
    if legend:
        axes.legend(loc="best", handlelength=1.6)


def _draw_steps(axes, table: Table, low: float, high: float, wide: float) -> None:
    from matplotlib.collections import LineCollection

    colors, pieces = _level_colors(table), steps(table, low, high)
    rises = [[(a.end, a.value), (a.end, b.value)] for a, b in zip(pieces, pieces[1:], strict=False)]
    axes.add_collection(
        LineCollection(rises, colors="#b6bcc4", linewidths=0.8, zorder=1), autolim=False
    )
    bars = [[(piece.start, piece.value), (piece.end, piece.value)] for piece in pieces]
    collection = LineCollection(
        bars,
        colors=[colors[piece.code] for piece in pieces],
        linewidths=wide,
        capstyle="butt",
        zorder=2,
    )
    axes.add_collection(collection, autolim=False)
    axes.plot([], [], color=colors[len(colors) // 2], linewidth=wide, label="q")  # for the legend


def _draw_band(axes, table: Table, low: float, high: float) -> None:
    x = np.linspace(low, high, 2000)
    lower = table.code(x)
    colors = _level_colors(table)
    for level, color in zip(table.levels, colors, strict=False):
        axes.axhline(level, color=color, linewidth=0.8, alpha=0.7, zorder=1)
    below, above = table.levels[lower], table.levels[lower + 1]
    axes.fill_between(
        x,
        below,
        above,
        color=colors[len(colors) // 2],
        alpha=0.16,
        linewidth=0,
        label="drawn from",
    )
    axes.plot(
        x,
        table(x),
        color=ERROR,
        linewidth=2.2,
        linestyle=(0, (2, 1.2)),
        label="mean of q",
        zorder=2,
    )


def _draw_error(axes, table: Table, function) -> None:
    low, high = window(table, function)
    edges = sorted(
        edge for edge in {*table.breaks.tolist(), *map(float, function.kinks)} if low < edge < high
    )
    x = _between([low, *edges, high])
    exact = _derivative(function, x)
    difference = np.where(np.isfinite(exact), exact - table(x), np.nan)
    axes.axhline(0.0, color="#b6bcc4", linewidth=0.8)
    if table.objective == "unbiased":
        lower = table.code(x)
        spread = np.sqrt(
            np.maximum(0, (table.levels[lower + 1] - table(x)) * (table(x) - table.levels[lower]))
        )
        axes.fill_between(x, -spread, spread, color=ERROR, alpha=0.22, linewidth=0)
        axes.set_ylabel("± std of a draw")
    else:
        axes.fill_between(x, 0.0, difference, color=ERROR, alpha=0.18, linewidth=0)
        axes.plot(x, difference, color=ERROR, linewidth=1.0)
        axes.set_ylabel(f"{_DERIVATIVE} − q")
    if table.exact:
        axes.set_ylim(-1.0, 1.0)
    axes.set_xlabel("x")


def _between(edges: list[float], n: int = 2400) -> np.ndarray:
    """Return points between each two edges, with NaN between intervals."""
    total = edges[-1] - edges[0]
    parts = []
    for a, b in zip(edges, edges[1:], strict=False):
        nudge = 1e-6 * (b - a)
        parts += [np.linspace(a + nudge, b - nudge, max(8, round(n * (b - a) / total))), [np.nan]]
    return np.concatenate(parts[:-1])


def _draw_cell(axes, table: Table | None, legend: bool, label: str | None, form: str | None):
    if table is None:
        axes.set_axis_off()
        return
    _draw_values(axes, table, legend=legend, wide=1.9)
    quality = "exact" if table.exact else f"error {table.error:.3g}"
    title = f"{counted(table.bits, 'bit')}{f', {form}' if form else ''}: {quality}"
    axes.set_title(title, loc="left", fontsize=9, color=MUTED)
    axes.tick_params(labelsize=8)
    if label:
        # Every parameter gets its own line, because a long label would overlap the labels of the neighboring rows.
        name, _, parameters = label.rstrip(")").partition("(")
        lines = "\n".join([name, *filter(None, parameters.split(", "))])
        size = 10 if "\n" not in lines else 8
        axes.set_ylabel(literal(lines), fontsize=size, color=INK, fontweight="bold")
