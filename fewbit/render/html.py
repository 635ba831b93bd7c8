"""Views as HTML, in which texts are escaped."""

from __future__ import annotations

import base64
from html import escape

from fewbit.errors import FewbitError
from fewbit.render import figures
from fewbit.render.view import Column, Line, View

MOST_ROWS = 60
"""The number of rows to which a longer table is cut."""
STYLES = {
    "": "",
    "dim": "opacity:.6",  # opacity instead of a color, because a notebook may be light or dark
    "bold": "font-weight:600;border-top:1px solid #c9ced4",
}


def page(view: View) -> str:
    """Return a whole HTML document."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(view.title)}</title></head>\n'
        f"<body>{block(view)}</body></html>\n"
    )


def block(view: View) -> str:
    """Return a <div>, or <details> if the view is folded."""
    notes = "<br>".join(map(escape, view.notes))
    inside = (
        (f"<pre>{escape(view.code)}</pre>" if view.code else "")
        + bar(view)
        + table(view)
        + (f"<small>{notes}</small>" if notes else "")
        + picture(view)
        + "".join(map(block, view.more))
    )
    title = escape(view.title)
    if view.is_folded:
        return f"<details><summary>{title}</summary>{inside}</details>"
    return (
        '<div style="font-family:system-ui,sans-serif;font-size:13px;max-width:860px">'
        f"<b>{title}</b>{inside}</div>"
    )


def table(view: View) -> str:
    """Return the <table>, or "" without columns."""
    if not view.columns:
        return ""
    titles = tuple(column.title for column in view.columns)
    head = f"<thead>{_line('th', view.columns, Line(titles, ()))}</thead>" if any(titles) else ""
    body = "".join(_line("td", view.columns, line) for line in view.lines(MOST_ROWS))
    return (
        '<table style="border-collapse:collapse;font-variant-numeric:tabular-nums;margin:6px 0">'
        f"{head}<tbody>{body}</tbody></table>"
    )


def _line(tag: str, columns: tuple[Column, ...], line: Line) -> str:
    style = STYLES[line.style]
    cells = "".join(
        f'<{tag} style="text-align:{column.side};padding:1px 12px 1px 0;{style}">{escape(cell)}</{tag}>'
        for column, cell in zip(columns, line.cells, strict=True)
    )
    return f"<tr>{cells}</tr>"


def bar(view: View) -> str:
    """Return a bar of colored parts with a legend, or ""."""
    if not view.bar:
        return ""
    parts = "".join(
        f'<div title="{escape(label)}" style="width:{100 * share:.3f}%;background:{color}"></div>'
        for label, share, color in view.bar
    )
    legend = " &nbsp; ".join(
        f'<span style="color:{color}">■</span> {escape(label)}' for label, _, color in view.bar
    )
    return (
        f'<div style="display:flex;height:14px;margin:6px 0 2px">{parts}</div>'
        f'<div style="margin-bottom:6px">{legend}</div>'
    )


def picture(view: View) -> str:
    """Return an <img> of the view's figure, or "" without figure or matplotlib."""
    if view.figure is None:
        return ""
    try:
        data = base64.b64encode(figures.render(view.figure(), dpi=110)).decode()
    except FewbitError:
        return ""
    return (
        f'<img alt="{escape(view.title)}" style="display:block;max-width:100%" '
        f'src="data:image/png;base64,{data}">'
    )
