"""What the tables are worth: errors by function and bits, our errors beside the paper's, one table.

The objects hold plain data and show themselves in a terminal (rich, imported only then), in a
notebook (HTML) and as JSON-able records.
"""

from __future__ import annotations

import csv
import html
import io
import shutil
import warnings
from dataclasses import asdict, dataclass

from fewbit import functions
from fewbit.catalog import paper
from fewbit.errors import FewbitError
from fewbit.files import write_atomic
from fewbit.functions.callables import resolve
from fewbit.sizes import counted
from fewbit.table import describe_function, describe_weight

METRICS = ("error", "relative_error")
MOST_LEVELS = 16  # a table of more levels is not listed level by level
MOST_INTERVALS = 16  # largest number of pieces that are listed for one level
LEAST_NAME = 8  # characters that a name is shortened to at most
GAP = 2  # between columns
_WIDTH = 80


class _Report:
    """The ways to show that reports share; a subclass has ``title``, ``_header``, ``_cells``, ``_notes``.

    ``_cells()``: rows of text with names in full, as HTML shows them. ``_names``: the columns of names, which a
    terminal shortens where they do not fit; the others are numbers, which it shows in full or not at all. ``_spare``:
    columns that it leaves out, the first first, where names cannot be shortened any more.
    """

    _names, _spare = (0,), ()

    def __rich_console__(self, console, options):
        from rich.text import Text

        header, rows, previous = self._header, self._cells(), None
        width = options.max_width
        columns, shown = laid_out(header, rows, self._names, self._spare, width)
        grid = new_grid()
        for i in columns:
            # Should even so little be too wide, a number goes on in the next line.
            is_name = i in self._names
            grid.add_column(header[i], justify=self._side(i), no_wrap=is_name, overflow="fold")
        for cells, (name, *rest) in zip(rows, shown, strict=True):
            # A function's name stands once above its own rows.
            repeated, previous = cells[0] == previous, cells[0]
            grid.add_row(*map(Text, ("" if repeated else name, *rest)))
        yield Text(self.title, style="bold")
        yield ""
        yield grid
        yield ""
        for note in self._notes():
            yield Text(note, style="dim")
        left_out = dict.fromkeys(name for i, name in enumerate(header) if i not in columns)
        if left_out:
            yield Text(f"no room here for: {', '.join(left_out)}", style="dim")

    def _side(self, column):
        return "left" if column in self._names else "right"

    def __str__(self):
        return render_plain(self, plain_width())

    __repr__ = __str__

    def _repr_html_(self):
        def line(tag, cells):
            inner = "".join(
                f'<{tag} style="text-align:{self._side(i)};padding:2px 8px">'
                f"{html.escape(cell)}</{tag}>"
                for i, cell in enumerate(cells)
            )
            return f"<tr>{inner}</tr>"

        notes = "<br>".join(map(html.escape, self._notes()))
        return (
            f"<div><b>{html.escape(self.title)}</b>"
            f"<table><thead>{line('th', self._header)}</thead>"
            f"<tbody>{''.join(line('td', cells) for cells in self._cells())}</tbody></table>"
            f"<small>{notes}</small></div>"
        )

    def to_csv(self, path=None, force=False):
        """The records as CSV text; also written to ``path`` if given (OutputExistsError as for tables)."""
        buffer = io.StringIO()
        records = self.records()
        writer = csv.DictWriter(buffer, records[0] if records else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        if path is not None:
            write_atomic(path, buffer.getvalue(), force=force)
        return buffer.getvalue()


def new_grid():
    """An empty rich table with a line under its header and no other rules."""
    from rich import box
    from rich.table import Table as Grid

    return Grid(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")


def laid_out(header, rows, names, spare, width, least=LEAST_NAME):
    """(numbers of the columns to show, the rows of those, with names shortened): `columns_within`, then `fitted`."""
    columns = columns_within(header, rows, names, spare, width, least)
    lines = [tuple(cells[i] for i in columns) for cells in rows]
    names = [columns.index(each) for each in names if each in columns]
    return columns, fitted([header[i] for i in columns], lines, names, width)


def columns_within(header, rows, names, spare, width, least=LEAST_NAME):
    """Numbers of the columns to show: without those of `spare`, the first first, until the rest fits `width` characters.

    names: columns that can be shortened, to `least` characters each or what their header takes.
    """
    widths = _widths(header, rows)
    for each in names:
        widths[each] = min(widths[each], max(least, len(header[each])))
    columns = list(range(len(header)))
    for each in spare:
        if _excess([widths[i] for i in columns], width) <= 0:
            break
        columns.remove(each)
    return columns


def fitted(header, rows, names, width):
    """The rows with the cells of the columns `names` shortened, the widest first, as far as `width` characters demand.

    Different names stay different, where that room allows it.
    """
    widths = _widths(header, rows)
    while _excess(widths, width) > 0:
        wide = [each for each in names if widths[each] > max(LEAST_NAME, len(header[each]))]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    columns = map(_shortened_alike, zip(*rows, strict=True), widths)
    return list(zip(*columns, strict=True))


def _shortened_alike(paths, room):
    """All with a beginning of one length, the shortest that keeps them apart best."""
    if max(map(len, paths)) <= room:
        return paths
    heads = range((room - 1) // 3, room - 1)
    head = max(heads, key=lambda head: len({shortened(each, room, head) for each in paths}))
    return [shortened(each, room, head) for each in paths]


def _widths(header, rows):
    """Of the columns, in characters."""
    return [max(map(len, column)) for column in zip(header, *rows, strict=True)]


def _excess(widths, width):
    """By how much columns of those widths are wider, in a grid."""
    return sum(widths) + GAP * len(widths) - 1 - width  # after the last column there is one space


def _bits(number):
    return counted(number, "bit")


def shortened(path, room, head=None):
    """A dotted path in `room` characters: its end says most, its beginning which part of the model it is.

    head: characters of the beginning, by default a third of them.
    """
    if len(path) <= room:
        return path
    head = (room - 1) // 3 if head is None else head
    return f"{path[:head]}…{path[len(path) - (room - 1 - head) :]}"


def render_plain(renderable, width=_WIDTH):
    """What rich makes of it, as text without colors."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def plain_width(least=_WIDTH):
    """Characters of a line of `str()`: the terminal's (or those of COLUMNS), but at least so many."""
    return max(least, shutil.get_terminal_size((least, 24)).columns)


def short(value):
    """A number in at most 7 characters, with four decimals like the paper's where they say enough."""
    if value == 0:
        return "0"
    if 1e-3 <= value < 10:
        return f"{value:.4f}"
    if 10 <= value < 1e5:
        return f"{value:.5g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


# ---------------------------------------------------------------------------------------------------------
# Errors by function and bits


@dataclass(frozen=True)
class ErrorRow:
    """A function's tables, one for each number of bits asked for."""

    function: str
    tables: tuple


@dataclass(frozen=True, repr=False)
class ErrorTable(_Report):
    """``rows``: an ErrorRow per function; ``values()``: their metric as a dict of dicts."""

    rows: tuple[ErrorRow, ...]
    bits: tuple[int, ...]
    form: str
    metric: str

    @property
    def title(self):
        name = self.metric.replace("_", " ")
        return f"{name.capitalize()} of q, form {self.form}, by bits per element"

    def values(self):
        """{function: {bits: error}}, functions with parameters as ``elu(alpha=1)``."""
        return {
            row.function: {
                bits: getattr(table, self.metric)
                for bits, table in zip(self.bits, row.tables, strict=True)
            }
            for row in self.rows
        }

    def records(self):
        """One JSON-able dict per table."""
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

    @property
    def _header(self):
        return ("function", *(_bits(bits) for bits in self.bits))

    @property
    def _spare(self):
        return range(len(self.bits), 1, -1)

    def _cells(self):
        return [
            (name, *(short(value) for value in values.values()))
            for name, values in self.values().items()
        ]

    def _notes(self):
        if not self.rows:
            return []
        table = self.rows[0].tables[0]
        weight = table.weight["kind"] + " weight"
        what = f"Integral of w (f' - q)^2, {weight}."
        if self.metric == "relative_error":
            what = f"Norm of f' - q over the norm of f', {weight}."
        return [f"{what} 0: q is f' itself."]


def error_table(
    functions=None, bits=range(1, 9), *, weight="uniform", form="levels", metric="error"
):
    """The errors of the best tables, by function and bits: an :class:`ErrorTable`.

    functions: names or aliases, or one of them; by default all that fewbit knows. bits: a number or
    several. metric: ``"error"`` or ``"relative_error"``. Shipped tables are used where there are
    any, others are solved on first use (:func:`fewbit.load_table`).
    """
    from fewbit.catalog.store import load_table

    if metric not in METRICS:
        raise FewbitError(f"metric: expected {' or '.join(METRICS)}, got {metric!r}")
    bits = _as_tuple(bits, int)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # unbounded derivatives: the domain is stated
        for name in _names(functions):
            tables = tuple(load_table(name, each, weight=weight, form=form) for each in bits)
            rows.append(ErrorRow(name, tables))
    return ErrorTable(tuple(rows), bits, form, metric)


def _names(asked):
    names = functions.names() if asked is None else _as_tuple(asked, str)
    return [name if ":" in name else functions.canonical(name) for name in names]


def _as_tuple(value, kind):
    return (value,) if isinstance(value, kind) else tuple(value)


# ---------------------------------------------------------------------------------------------------------
# Beside the paper


@dataclass(frozen=True)
class ComparisonRow:
    """One function at one size. None where the paper has no figure.

    ``paper``: its printed figure. ``discrete``: the optimum of its own discrete problem, and
    ``reproduced``: whether that rounds to the printed figure. ``intervals``, ``levels``: the optima
    of our two forms over all breaks. ``parity``: the intervals are those of f'(|x|), as in the
    paper, with the error of both halves. ``ratio``: intervals / levels, None if both are 0.
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
class Comparison(_Report):
    """``rows``: a ComparisonRow per function and bits."""

    rows: tuple[ComparisonRow, ...]

    title = "Error at the same memory: the paper's intervals, and levels that pieces share"

    def records(self):
        """One JSON-able dict per row."""
        return [asdict(row) for row in self.rows]

    _header = ("function", "bits", "paper", "eq. 9", "intervals", "levels", "lower", "bound")
    _spare = (7, 6, 3, 2)

    def _cells(self):
        return [
            (
                row.function + "*" * row.parity,
                str(row.bits),
                "-" if row.paper is None else _printed(row.paper),
                "-" if row.discrete is None else _printed(row.discrete),
                _digits(row.intervals),
                _digits(row.levels),
                "-" if row.ratio is None else f"{row.ratio:.2f}x",
                _digits(row.levels_lower_bound),
            )
            for row in self.rows
        ]

    def _notes(self):
        return [*self._verdict(), "", *self._legend()] if self.rows else []

    def _verdict(self):
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

    def _legend(self):
        if any(row.paper is not None for row in self.rows):
            yield f"paper: {paper.CITATION}."
            yield f"eq. 9: its problem, breaks on a grid of {paper.CELLS} cells, solved exactly."
        yield "intervals, levels: over all breaks; integral of (f' - q)^2, uniform weight."
        yield "lower: intervals / levels. bound: no table of so many levels is below it."
        if any(row.parity for row in self.rows):
            yield "* f' is even: intervals of |x|, as in the paper's table; the error of both halves."


def _printed(value):
    return f"{value:.{paper.DECIMALS}f}"


def _digits(value):
    return f"{value:.4g}" if value == 0 or value >= 1e-4 else f"{value:.3e}"


def compare(functions=None, bits=(1, 2, 3, 4), *, progress=None):
    """Our errors beside the paper's Table 3, solved now and in both forms: a :class:`Comparison`.

    functions: names or aliases; by default those of the table, at its sizes, and Mish (for which
    the paper has no figure). progress: called as ``progress(what, done, total)``.
    """
    bits = _as_tuple(bits, int)
    names = [*paper.TABLE_3, "mish"] if functions is None else _names(functions)
    problems = [(name, each) for name in dict.fromkeys(names) for each in bits]
    if functions is None:
        # ReLU's derivative has two values: the paper stops at one bit, and more change nothing.
        problems = [(name, each) for name, each in problems if name != "relu" or each == 1]
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # unbounded derivatives
        for done, (name, each) in enumerate(problems):
            if progress is not None:
                progress(f"{name}, {_bits(each)}", done, len(problems))
            rows.append(_compare(name, each))
    return Comparison(tuple(rows))


def _compare(name, bits):
    from fewbit.solver.solve import solve

    printed = paper.printed_error(name, bits)
    discrete = None if printed is None else paper.discrete_optimum(name, bits)
    levels = solve(name, bits)
    f = resolve(name)
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


# ---------------------------------------------------------------------------------------------------------
# One table


class TableReport:
    """A table for the terminal: what it is worth, its picture, its levels."""

    def __init__(self, table):
        self.table = table

    def __rich_console__(self, console, options):
        from rich.text import Text

        from fewbit.table.sketch import sketch

        table = self.table
        yield Text(_headline(table), style="bold")
        yield ""
        facts = list(_facts(table))
        # A value without a comment may run on into the comments' column.
        column = max(len(value) for _, value, comment in facts if comment)
        for name, value, comment in facts:
            line = Text()
            line.append(f"{name:<16}", style="dim")
            line.append(f"{value:<{column}}", style="bold" if comment else "")
            line.append(f"  {comment}", style="dim")
            line.rstrip()
            yield line
        yield ""
        picture = Text(sketch(table, width=min(options.max_width, _WIDTH) - 1), no_wrap=True)
        picture.highlight_regex("[\u2800-\u28ff]+", "cyan")
        yield picture
        if len(table.levels) <= MOST_LEVELS:
            yield ""
            yield _levels_grid(table)


def _headline(table):
    levels, pieces = counted(len(table.levels), "level"), counted(table.n_pieces, "piece")
    return f"{describe_function(table)}, {_bits(table.bits)}: {levels} in {pieces}"


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


def _facts(table):
    """(name, value, comment) of each line of a summary."""
    gap = "" if table.exact else f"; gap {_percent(table.gap)}"
    yield "weight", describe_weight(table), ""
    yield "problem", f"form {table.form}, objective {table.objective}, tails {table.tails}", ""
    yield "error", f"{table.error:.6g}", _ERRORS[table.objective]
    yield "lower bound", f"{table.lower_bound:.6g}", f"no table of this size is below it{gap}"
    yield "relative error", _percent(table.relative_error), _RELATIVE[table.objective]
    if table.knots is not None:
        yield (
            "stand-in error",
            f"{table.knots_error:.3g}",
            f"of f' drawn as {len(table.knots.points)} knots",
        )
    printed = paper.counterpart(table)
    if printed is not None:
        yield "paper", _printed(printed), _against(table.error, printed)
    status = table.solver.get("status")
    if status:
        yield "status", status, _STATUS.get(status, "")
    how = [f"grid {table.solver['grid']}", f"fewbit {table.solver['version']}"]
    if "seconds" in table.solver:
        how.insert(0, f"{table.solver['seconds']:.2f} s")
    yield "solver", ", ".join(how), ""


def _percent(fraction):
    return "0 %" if fraction < 1e-12 else f"{100 * fraction:.3g} %"


def _against(error, printed):
    source = "Few-bit Backward, Table 3"
    if paper.same_digits(error, printed):
        return f"the same digits as {source}"
    if error > printed:
        return f"{error / printed:.3g}x higher than {source}" if printed else f"above {source}"
    return f"{printed / error:.3g}x lower than {source}" if error else f"below {source}"


def _levels_grid(table):
    from rich.text import Text

    drawn = table.objective == "unbiased"
    grid = new_grid()
    grid.add_column("code", justify="right", no_wrap=True)
    grid.add_column("level", justify="right", no_wrap=True)
    grid.add_column(
        "draws between this level and the next where x is in" if drawn else "where x is in"
    )
    pieces = [[] for _ in table.levels]
    for code, piece in zip(table.codes, _pieces(table), strict=True):
        pieces[code].append(piece)
    for code, level in enumerate(table.levels.tolist()):
        listed = pieces[code][:MOST_INTERVALS]
        if len(pieces[code]) > len(listed):
            listed.append(f"and {len(pieces[code]) - len(listed)} more")
        grid.add_row(str(code), Text(f"{level:.6g}"), Text("  ".join(listed) or "-"))
    return grid


def _pieces(table):
    """Each piece as an interval; the bracket says which of the two pieces a break belongs to."""
    reach = max(map(abs, table.domain))
    left, right = ["(-inf"], []
    for x, side in zip(table.breaks.tolist(), table.closed, strict=True):
        number = "0" if abs(x) < 1e-12 * reach else f"{x:.6g}"  # a solver's zero
        right.append(number + (")" if side == "left" else "]"))
        left.append(("[" if side == "left" else "(") + number)
    return [f"{a}, {b}" for a, b in zip(left, [*right, "inf)"], strict=True)]


def tables_report(title, tables):
    """Several tables, a line each, for the terminal."""
    from rich.console import Group
    from rich.text import Text

    grid = new_grid()
    for name in ("bits", "form", "weight", "levels", "pieces", "error", "gap", "relative"):
        left = name in ("form", "weight")
        grid.add_column(name, justify="left" if left else "right", no_wrap=not left)
    for table in tables:
        objective = "" if table.objective == "mse" else f", {table.objective}"
        grid.add_row(
            str(table.bits),
            Text(table.form + objective),
            Text(describe_weight(table).partition(" on ")[0]),
            str(len(table.levels)),
            str(table.n_pieces),
            short(table.error),
            "0 %"
            if table.gap == 0
            else f"{100 * table.gap:.2g} %"
            if table.gap >= 1e-4
            else "<.01 %",
            f"{100 * table.relative_error:.3g} %",
        )
    return Group(Text(title, style="bold"), "", grid)
