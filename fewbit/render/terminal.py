"""Views as text: tables that fit the width of a terminal. rich is imported when something is shown."""

from __future__ import annotations

import io
import shutil
import textwrap
from collections.abc import Iterator, Sequence

from fewbit.render.view import Column, Line, View

MOST_ROWS = 20
"""The number of rows to which a longer table is cut."""
GAP = 2
LEAST_WIDTH, FILE_WIDTH = 80, 100
"""The least characters per line of `str(result)`, and the number without a terminal."""


def shown(view: View, width: int) -> Iterator:
    """Yield the objects that rich prints in lines of `width` characters."""
    from rich.text import Text

    if view.title:
        yield Text(view.title, style="bold")
    if view.code:
        # rich may break the line. Inside the parentheses of a call this does no harm.
        yield ""
        yield Text(view.code, style="cyan")
    left_out = []
    if view.columns:
        table, left_out = grid(view, width)
        yield from ["", table] if view.title else [table]
    notes = [note for note in view.notes if note.partition(":")[0] not in left_out]
    if left_out:
        notes.append(f"columns left out: {', '.join(left_out)}")
    if notes:
        yield ""
    for note in notes:
        yield Text(_wrapped(note, width), style="dim")
    for part in view.more:
        yield ""
        yield from shown(part, width)


def grid(view: View, width: int) -> tuple:
    """Return a rich table that fits `width`, and the titles of the columns left out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    lines = list(view.lines(MOST_ROWS))
    places, texts, widths = fit(view.columns, [line.cells for line in lines], width)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for place, room in zip(places, widths, strict=True):
        column = view.columns[place]
        # A cell that is still too wide continues on the next line.
        table.add_column(
            column.title,
            justify=column.side,
            no_wrap=column.kind == "name",
            overflow="fold",
            max_width=room if column.kind == "text" else None,
        )
    for number, (line, cells) in enumerate(zip(lines, texts, strict=True)):
        table.add_row(
            *(
                Text("" if _is_repeated(view.columns, lines, number, place) else cell, style)
                for place, cell, style in zip(places, cells, _at(line.styles, places), strict=True)
            ),
            style=line.style,
            end_section=view.total is not None and number == len(lines) - 2,
        )
    left_out = [
        view.columns[place].title for place in range(len(view.columns)) if place not in places
    ]
    return table, list(dict.fromkeys(left_out))


def _wrapped(note: str, width: int) -> str:
    return textwrap.fill(note, width, subsequent_indent="  ", break_on_hyphens=False)


def _is_repeated(columns: Sequence[Column], lines: Sequence[Line], number: int, place: int) -> bool:
    is_first = number == 0 or lines[number].cells[place] != lines[number - 1].cells[place]
    return columns[place].once and not is_first


def fit(columns: Sequence[Column], rows: Sequence[tuple[str, ...]], width: int) -> tuple:
    """Choose columns and widths so that the table fits `width` characters: drop columns in the order of `drop`, then narrow "name" and "text".

    Return (indices of the shown columns, texts of their cells for each row, widths in characters).
    """
    widths = [
        max(map(len, cells))
        for cells in zip([column.title for column in columns], *rows, strict=True)
    ]
    least = [
        min(room, max(column.least, len(column.title))) if column.is_flexible else room
        for column, room in zip(columns, widths, strict=True)
    ]
    places = list(range(len(columns)))
    droppable = [place for place in places if columns[place].drop]
    for place in sorted(droppable, key=lambda place: columns[place].drop):
        if _total(_at(least, places)) <= width:
            break
        places.remove(place)
    columns, widths = _at(columns, places), _at(widths, places)
    floors = [max(Column.least, len(column.title)) for column in columns]
    while _total(widths) > width:
        wide = [i for i, room in enumerate(widths) if columns[i].is_flexible and room > floors[i]]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    cells = list(zip(*(_at(row, places) for row in rows), strict=True))
    for i, column in enumerate(columns):
        if column.kind == "name" and rows:
            cells[i] = shortened_alike(cells[i], widths[i])
    return places, list(zip(*cells, strict=True)), widths


def _at(values: Sequence, places: Sequence[int]) -> list:
    return [values[place] for place in places]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * len(widths) - 1


def shortened_alike(names: Sequence[str], room: int) -> Sequence[str]:
    """Shorten names to `room` characters by an ellipsis, at the place that keeps as many as possible different."""
    if max(map(len, names)) <= room:
        return names
    heads = range((room - 1) // 3, room - 1)
    head = max(heads, key=lambda head: len({shortened(name, room, head) for name in names}))
    return [shortened(name, room, head) for name in names]


def shortened(path: str, room: int, head: int | None = None) -> str:
    """Shorten a dotted path to `room` characters by an ellipsis after `head` characters, by default a third of `room`."""
    if len(path) <= room:
        return path
    head = (room - 1) // 3 if head is None else head
    return f"{path[:head]}…{path[len(path) - (room - 1 - head) :]}"


def show(result) -> None:
    """Print a result as rich does, or `str(result)` without rich."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        print(result)
    else:
        Console().print(result)


def plain(renderable, width: int = LEAST_WIDTH) -> str:
    """Return what rich prints, as text without colors in lines of `width` characters."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def plain_width() -> int:
    """Return $COLUMNS if set, else the terminal's width, at least 80."""
    return max(LEAST_WIDTH, shutil.get_terminal_size((FILE_WIDTH, 24)).columns)
