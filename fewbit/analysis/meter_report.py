"""How saved bytes show themselves: a table in a terminal, HTML in a notebook, a picture. No torch here."""

from __future__ import annotations

import html
import os
from collections import defaultdict
from typing import NamedTuple

from fewbit.catalog.report import laid_out, new_grid, plain_width, render_plain, shortened
from fewbit.errors import FewbitError
from fewbit.runtime.format.groups import FP32_MIN_COLUMNS
from fewbit.sizes import counted
from fewbit.table import plot

MOST_ROWS, MOST_ROWS_HTML, MOST_BARS = 20, 60, 14
PLAIN_WIDTH = 100
LEAST_NAME = 24  # characters; with less other columns go
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
NOTHING = (
    "Nothing is kept for backward: no output depends on anything that requires grad, "
    "or the forward switches gradients off (torch.no_grad)."
)
# In this order, and in these colors (safe for color-blind readers), wherever kinds stand side by side.
COLORS = {
    "activation": "#4477aa",
    "input": "#66ccee",
    "integer": "#ccbb44",
    "mask": "#ee6677",
    "packed": "#228833",
    "range": "#88bb66",
    "statistic": "#bbbbbb",
    "cast": "#aa3377",
    "parameter": "#8c959f",
    "buffer": "#c9ced4",
}


class Row(NamedTuple):
    """Entries that differ only in which of several alike modules they belong to."""

    module: str
    module_type: str
    count: int
    kind: str
    shape: str
    dtype: str
    bytes: int


def rows(entries) -> list[Row]:
    """Entries with bytes, alike ones in one row, largest first."""
    groups = defaultdict(list)
    for entry in entries:
        if entry.bytes:
            # `layers.0.norm` and `layers.1.norm` are alike, `norm1` and `norm2` are not.
            place = tuple("*" if part.isdecimal() else part for part in entry.module.split("."))
            alike = (entry.module_type, entry.kind, entry.shape, entry.dtype, entry.bytes)
            groups[place, *alike].append(entry)
    found = [
        Row(
            module=_common([entry.module for entry in group]) or "(model)",
            module_type=module_type,
            count=len(group),
            kind=kind,
            shape="×".join(map(str, shape)) or "scalar",
            dtype=dtype,
            bytes=size * len(group),
        )
        for (_, module_type, kind, shape, dtype, size), group in groups.items()
    ]
    return sorted(found, key=lambda row: -row.bytes)


def _common(paths) -> str:
    """The paths' common form, with * for the parts in which they differ."""
    parts = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(same[0] if len(set(same)) == 1 else "*" for same in parts)


def unit_of(size: int, most: str = "GiB") -> tuple[str, int]:
    """Name and bytes of the largest unit, up to ``most``, of which there is at least one."""
    units = UNITS[[name for name, _ in UNITS].index(most) :]
    return next((unit for unit in units if size >= unit[1]), units[-1])


def amount(size: int, unit: tuple[str, int] | None = None) -> str:
    """`12.34 MiB`, in the unit that suits the number or in the one given (then without its name)."""
    name, scale = unit or unit_of(size)
    text = f"{size / scale:,.2f}" if scale > 1 else f"{size:,d}"
    return text if unit else f"{text} {name}"


def share(size: int, total: int) -> str:
    percent = 100 * size / total if total else 0.0
    return "<0.1%" if 0 < percent < 0.05 else f"{percent:.1f}%"


class SavedBytesReport:
    """The ways to show a result that has model, entries, kept, total, parameters, buffers, by_kind()."""

    @property
    def title(self) -> str:
        storages = sum(entry.bytes > 0 for entry in self.kept)
        name = f"{self.model}: " if self.model else ""
        return f"{name}{amount(self.total)} kept for backward, in {counted(storages, 'storage')}"

    def notes(self) -> list[str]:
        """What the table does not say by itself, as lines of text."""
        lines = [] if self.total else [NOTHING]
        if self.total:
            kinds = {
                k: size for k, size in self._kinds().items() if k not in ("parameter", "buffer")
            }
            parts = [
                f"{kind} {amount(size)} ({share(size, self.total)})" for kind, size in kinds.items()
            ]
            lines.append("by kind: " + ", ".join(parts))
        apart = {"parameters": self.parameters, "buffers": self.buffers}
        apart = [f"{name} {amount(size)}" for name, size in apart.items() if size]
        if apart:
            lines.append(f"not in the total: {', '.join(apart)}, saved but existing anyway")
        shared = sum(entry.first_saver is not None for entry in self.kept)
        if shared:
            lines.append(
                f"in storages of earlier modules, 0 bytes: {counted(shared, 'more saved tensor')}"
            )
        wide = [
            e
            for e in self.kept
            if e.kind == "range" and e.shape[1:] == (FP32_MIN_COLUMNS,) and e.bytes
        ]
        if wide:
            names = sorted({entry.module or "(the model)" for entry in wide})
            more = ", ..." * (len(names) > 3)
            lines.append(
                f"{len(wide)} quantized with float32 minimums, as their offset is large against "
                f"their range: {', '.join(names[:3])}{more}"
            )
        idle = sum(entry.bytes - entry.viewed_bytes for entry in self.kept if entry.bytes)
        if idle:
            lines.append(
                f"{amount(idle)} of the total are parts of storages that no saved view reaches"
            )
        return lines

    def _kinds(self) -> dict[str, int]:
        """by_kind() in the order of the colors, without what has no bytes."""
        sizes = self.by_kind()
        return {kind: sizes[kind] for kind in COLORS if sizes.get(kind)}

    def __rich_console__(self, console, options):
        from rich.text import Text

        yield Text(self.title, style="bold")
        if self.total:
            yield ""
            yield self._grid(options.max_width)
        yield ""
        for note in self.notes():
            yield Text(note, style="dim")

    def _cells(self, most: int):
        """(header, rows of text, what is cut off or None)."""
        found, unit = rows(self.kept), unit_of(self.total, "MiB")
        # One line that says "1 more" would take the place of that one.
        shown = found if len(found) <= most + 1 else found[:most]
        body = [
            (
                row.module,
                row.module_type,
                f"{row.count}" if row.count > 1 else "",
                row.kind,
                row.shape,
                row.dtype,
                amount(row.bytes, unit),
                share(row.bytes, self.total),
            )
            for row in shown
        ]
        header = ("module", "type", "×", "kind", "shape", "dtype", unit[0], "share")
        rest = sum(row.bytes for row in found[len(shown) :])
        cut = None
        if len(shown) < len(found):
            text = f"… and {len(found) - len(shown)} more"
            cut = (text, "", "", "", "", "", amount(rest, unit), share(rest, self.total))
        total = (
            "total",
            "",
            "",
            "",
            "",
            "",
            amount(self.total, unit),
            share(self.total, self.total),
        )
        return header, body, cut, total

    def _grid(self, width: int):
        from rich.text import Text

        header, body, cut, total = self._cells(MOST_ROWS)
        lines = [*body, *([cut] if cut else []), total]
        # A narrow terminal keeps the module's name readable and goes without dtype, type, shape and kind.
        columns, lines = laid_out(header, lines, (0, 1), (5, 1, 4, 3), width, LEAST_NAME)
        grid = new_grid()
        for i in columns:
            grid.add_column(header[i], justify="right" if i in (2, 6, 7) else "left", no_wrap=True)
        for number, line in enumerate(lines):
            texts = [Text(each) for each in line]
            style = (
                "bold"
                if number == len(lines) - 1
                else "dim"
                if cut and number == len(lines) - 2
                else ""
            )
            grid.add_row(*texts, style=style, end_section=number == len(lines) - 2)
        return grid

    def __str__(self) -> str:
        return render_plain(self, plain_width(PLAIN_WIDTH))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = "<br>".join(map(html.escape, self.notes()))
        body = self._html_bar() + self._html_table() if self.total else ""
        return (
            '<div style="font-family:system-ui,sans-serif;font-size:13px;max-width:860px">'
            f"<b>{html.escape(self.title)}</b>{body}<small>{notes}</small></div>"
        )

    def _html_bar(self) -> str:
        parts, legend = [], []
        for kind, size in self._kinds().items():
            if kind in ("parameter", "buffer"):
                continue
            percent, color = 100 * size / self.total, COLORS[kind]
            title = f"{kind}: {amount(size)}"
            parts.append(
                f'<div title="{title}" style="width:{percent:.3f}%;background:{color}"></div>'
            )
            legend.append(f'<span style="color:{color}">■</span> {title}')
        return (
            f'<div style="display:flex;height:14px;margin:6px 0 2px">{"".join(parts)}</div>'
            f'<div style="margin-bottom:6px">{" &nbsp; ".join(legend)}</div>'
        )

    def _html_table(self) -> str:
        def line(tag, cells, style=""):
            inner = "".join(
                f'<{tag} style="text-align:{"right" if i in (2, 6, 7) else "left"};'
                f'padding:1px 10px 1px 0;{style}">{html.escape(cell)}</{tag}>'
                for i, cell in enumerate(cells)
            )
            return f"<tr>{inner}</tr>"

        header, body, cut, total = self._cells(MOST_ROWS_HTML)
        lines = [line("td", cells) for cells in body]
        if cut:
            lines.append(line("td", cut, "color:#6e7781;"))
        lines.append(line("td", total, "font-weight:600;border-top:1px solid #c9ced4;"))
        return (
            '<table style="border-collapse:collapse;font-variant-numeric:tabular-nums">'
            f"<thead>{line('th', header)}</thead><tbody>{''.join(lines)}</tbody></table>"
        )

    def plot(
        self,
        path: str | os.PathLike | None = None,
        by: str = "module_type",
        depth: int | None = None,
        force: bool = False,
    ):
        """Bytes as horizontal bars, largest first, stacked by kind. Returns the matplotlib Figure.

        path: also save as .png or .svg (OutputExistsError if it exists, unless ``force``).
        by: ``module_type`` or ``module``. depth: module paths cut to so many parts, as for by_module.
        Raises FewbitError for another ``by`` or suffix, or if matplotlib is not installed.
        """
        if by not in ("module_type", "module"):
            raise FewbitError(f"by: expected module_type or module, got {by!r}")
        plot._check_suffix(path)
        bars = self._bars(by, depth)
        with plot._style():
            figure = plot._new_figure(7.2, 1.3 + 0.3 * max(1, len(bars)))
            _draw(figure.subplots(), bars, self)
        return plot._finish(figure, path, force)

    def _bars(self, by: str, depth: int | None) -> dict[str, dict[str, int]]:
        """{bar: {kind: bytes}}, largest first, the smallest ones together in the last."""
        groups = defaultdict(lambda: defaultdict(int))
        sizes = self.by_module(depth) if by == "module" else self.by_module_type()
        names = [name for name, size in sizes.items() if size]
        last = names[: MOST_BARS - 1] if len(names) > MOST_BARS else names
        for entry in self.kept:
            name = entry.module_type
            if by == "module":
                name = ".".join(entry.module.split(".")[:depth])
            if entry.bytes:
                group = name if name in last else f"{len(names) - len(last)} others"
                groups[group][entry.kind] += entry.bytes
        order = [*last, *(group for group in groups if group not in last)]
        return {name or "(model)": dict(groups[name]) for name in order}


def _draw(axes, bars: dict[str, dict[str, int]], report: SavedBytesReport) -> None:
    unit, names = unit_of(report.total, "MiB"), list(bars)
    left = [0.0] * len(names)
    for kind in report._kinds():
        sizes = [bars[name].get(kind, 0) / unit[1] for name in names]
        if any(sizes):
            axes.barh(
                range(len(names)), sizes, left=left, color=COLORS[kind], label=kind, height=0.7
            )
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    for i, name in enumerate(names):
        size = sum(bars[name].values())
        axes.annotate(
            f"{amount(size, unit)}  ({share(size, report.total)})",
            (left[i], i),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=plot.MUTED,
        )
    axes.set_yticks(range(len(names)), [shortened(name, 36) for name in names], color=plot.INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.22 * max(left, default=1) or 1)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"kept for backward, {unit[0]}")
    axes.set_title(report.title, loc="left", color=plot.INK, fontweight="bold")
    if len(axes.containers) > 1:
        axes.legend(loc="lower right")
    if not bars:
        axes.text(
            0.5, 0.5, "nothing is kept", transform=axes.transAxes, ha="center", color=plot.MUTED
        )
