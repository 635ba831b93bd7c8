"""The description of how a result is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True)
class Column:
    """A column of a table, which makes the texts of its cells from the objects that stand for rows.

    Args:
        cell: Makes the text of a cell from a row.
        kind: In a narrow terminal "number" (right-aligned) and "word" are whole or absent, "name" is shortened, "text" wrapped.
        drop: The order in which columns are left out, 1 first; 0 for never.
        least: The width below which a "name" or "text" shrinks only after columns have been left out.
        once: Whether a terminal leaves a cell empty that equals the one above.
        style: Makes the style of a cell, as rich names styles, from a row.
    """

    title: str
    cell: Callable[[Any], str]
    kind: Literal["number", "word", "name", "text"] = "number"
    drop: int = 0
    least: int = 8
    once: bool = False
    style: Callable[[Any], str] | None = None

    @property
    def side(self) -> str:
        """The alignment of the column's cells."""
        return "right" if self.kind == "number" else "left"

    @property
    def is_flexible(self) -> bool:
        """Return whether the column can be narrower than its text."""
        return self.kind in ("name", "text")


class Line(NamedTuple):
    """The texts of a line's cells, their styles and the style of the line, as rich names styles."""

    cells: tuple[str, ...]
    styles: tuple[str, ...]
    style: str = ""


@dataclass(frozen=True)
class View:
    """A result as it is shown, in a terminal or as HTML.

    Args:
        title: One line, or "".
        rows: One object, of any class, for each row.
        notes: Lines below the table. One that begins with a column's title and a colon is shown only together with this column.
        total: A row for the last line, if any.
        rest: Returns, for (name, rows), one row of this name for the rows for which a long table has no room. If None, all rows
            are shown.
        bar: (label, fraction of the whole, color) for each part of a bar, for HTML.
        figure: Makes a matplotlib Figure, for HTML.
        more: Further views, shown below.
        is_folded: Whether HTML shows only the title until the reader opens the view.
        code: A Python expression to paste, shown below the title; or "".
    """

    title: str
    columns: Sequence[Column] = ()
    rows: Sequence = ()
    notes: Sequence[str] = ()
    total: Any = None
    rest: Callable[[str, Sequence], Any] | None = None
    bar: Sequence[tuple[str, float, str]] = ()
    figure: Callable[[], Any] | None = None
    more: Sequence[View] = ()
    is_folded: bool = False
    code: str = ""

    def __rich_console__(self, console, options):
        from fewbit.render.terminal import shown

        return shown(self, options.max_width)

    def lines(self, most: int) -> Iterator[Line]:
        """Yield the lines of the table. If `rest` is set, rows after the first `most` (and one more) share one line."""
        # If only one row were left out, the line that says "1 more" would take as much room as the row.
        is_cut = self.rest is not None and len(self.rows) > most + 1
        count = most if is_cut else len(self.rows)
        yield from (self._line(row) for row in self.rows[:count])
        if is_cut:
            rest = self.rows[count:]
            yield self._line(self.rest(f"… and {len(rest)} more", rest), "dim")
        if self.total is not None:
            yield self._line(self.total, "bold")

    def _line(self, row, style: str = "") -> Line:
        styles = (column.style(row) if column.style else "" for column in self.columns)
        return Line(tuple(column.cell(row) for column in self.columns), tuple(styles), style)
