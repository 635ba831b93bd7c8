"""A small picture of a table for the terminal."""

from __future__ import annotations

import numpy as np

from fewbit.sizes import counted
from fewbit.table.plot import Curve, Step, derivative_curve, steps, value_limits, window

BRAILLE = 0x2800
DOTS = np.array(
    [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]]
)  # the bit of the dot at [row, column] of a braille character
BARS = "▔─▁"  # a bar in the upper, middle or lower third of a character
MARGIN = 9  # columns left of the picture: a label of up to 7 characters, a blank and the axis


def sketch(table, width: int = 72, height: int = 16) -> str:
    """Draw q as bars, and f' (or the stand-in of an unbiased table) as braille dots, over the part of the domain in which they change.

    `width`, at least 24, and `height`, at least 6, count characters, with axes and legend.
    """
    columns, rows = max(width, 24) - MARGIN, max(height, 6) - 3
    function = table.activation
    low, high = window(table, function)
    curve = None if function is None else derivative_curve(function, low, high, n=8 * columns)
    if table.objective == "unbiased":
        curve = curve or _stand_in(table, low, high, 8 * columns)
        pieces = [Step(low, high, level, code) for code, level in enumerate(table.levels.tolist())]
    else:
        pieces = steps(table, low, high)
    bottom, top = value_limits(table, curve)
    canvas = np.full((rows, columns), " ")
    limits = (low, high), (bottom, top)
    # A later drawing covers an earlier one. The curve would hide steps between many levels, so steps are drawn last.
    # The bars of an unbiased table are as wide as the picture and would hide the curve, so they are drawn first.
    if table.objective == "unbiased":
        _draw_bars(canvas, pieces, *limits)
    if curve is not None:
        _draw_dots(canvas, curve, *limits)
    if table.objective != "unbiased":
        _draw_bars(canvas, pieces, *limits)
    return "\n".join(
        [*_with_labels(canvas, bottom, top), *_axis(columns, low, high), _legend(table, curve)]
    )


def _stand_in(table, low: float, high: float, n: int) -> Curve:
    x = np.linspace(low, high, n)
    return Curve(x, table(x))


def _draw_bars(canvas: np.ndarray, pieces: list[Step], x_limits, y_limits) -> None:
    rows, columns = canvas.shape
    for piece in pieces:
        third = int(_scale(piece.value, y_limits[::-1], 3 * rows))
        first, last = (round(_scale(x, x_limits, columns)) for x in (piece.start, piece.end))
        canvas[third // 3, first : max(last, first + 1)] = BARS[third % 3]


def _draw_dots(canvas: np.ndarray, curve: Curve, x_limits, y_limits) -> None:
    rows, columns = canvas.shape
    inside = np.isfinite(curve.y) & (curve.y >= y_limits[0]) & (curve.y <= y_limits[1])
    x = _scale(curve.x[inside], x_limits, 2 * columns).astype(int)
    y = _scale(curve.y[inside], y_limits[::-1], 4 * rows).astype(int)
    dots = np.zeros((rows, columns), int)
    np.bitwise_or.at(dots, (y // 4, x // 2), DOTS[y % 4, x % 2])
    canvas[dots > 0] = [chr(BRAILLE + bits) for bits in dots[dots > 0]]


def _scale(value, limits, n: int):
    return np.clip((value - limits[0]) / (limits[1] - limits[0]) * n, 0, n - 1e-6)


def _with_labels(canvas: np.ndarray, bottom: float, top: float) -> list[str]:
    rows = len(canvas)
    labels = {}
    for tick in _ticks(bottom, top, max(2, rows // 3)):
        labels[int(_scale(tick, (top, bottom), rows))] = f"{tick:.4g}"
    return [
        f"{labels.get(i, ''):>7} {'┤' if i in labels else '│'}{''.join(row)}"
        for i, row in enumerate(canvas)
    ]


def _axis(columns: int, low: float, high: float) -> list[str]:
    line, text = ["─"] * columns, [" "] * (columns + 7)
    for tick in _ticks(low, high, max(2, columns // 10)):
        column, label = int(_scale(tick, (low, high), columns)), f"{tick:.4g}"
        line[column] = "┬"
        start = max(0, MARGIN + column - len(label) // 2 - (len(label) > 1 and label[0] == "-"))
        text[len(text) :] = " " * max(0, start + len(label) - len(text))
        text[start : start + len(label)] = label
    return [" " * (MARGIN - 1) + "└" + "".join(line), "".join(text)[: MARGIN + columns].rstrip()]


def _ticks(low: float, high: float, most: int) -> np.ndarray:
    rough = (high - low) / most
    power = 10.0 ** np.floor(np.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = np.ceil(low / step - 1e-9), np.floor(high / step + 1e-9)
    return np.arange(first, last + 1) * step + 0.0  # adding 0.0 turns -0.0 into 0.0


def _legend(table, curve: Curve | None) -> str:
    bars = "levels to draw from" if table.objective == "unbiased" else "q"
    quality = "exact" if table.exact else f"error {table.error:.4g}"
    dots = "⣀⠤⠒ f'   " if curve is not None else ""
    return f"{'':{MARGIN}}{dots}── {bars}   ({counted(table.bits, 'bit')}, {quality})"
