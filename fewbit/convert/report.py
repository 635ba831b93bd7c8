"""What a conversion did, module by module, and how it shows itself."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from fewbit.catalog.report import fitted, new_grid, plain_width
from fewbit.sizes import counted


class ConvertedModule(NamedTuple):
    """One module: its dotted path ("" for the model itself), its old and new class, what it keeps now.

    bits: of its quantized input (an average, at level L2.5 and above) or its codes; None for what keeps less and stays exact.
    shared: whether it keeps nothing of its own, as what a norm keeps in fixed point serves (`fuse`); None: where it
    follows such a norm, which no sample has shown.
    """

    path: str
    before: str
    after: str
    bits: float | None
    shared: bool | None = False

    @property
    def keeps(self) -> str:
        """In words."""
        if self.shared:
            return "the norm's"
        return _bits(self.bits) + (" or the norm's" if self.shared is None else "")


class SkippedModule(NamedTuple):
    """A module that was left as it is, and why."""

    path: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    kept: bytes kept for backward (before, after) by op, if a sample was given; is_training: in training mode.
    functions: bits of functions that a forward calls (inputs, attention, activations), if those are compressed.
    notes: what is to be said of the model as a whole.
    """

    converted: tuple[ConvertedModule, ...]
    left_alone: tuple[SkippedModule, ...]
    kept: tuple[dict[str, int], dict[str, int]] | None = None
    functions: tuple[int, int, int] | None = None
    is_training: bool = True
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=plain_width(100), color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()

    def __rich_console__(self, console, options):
        from rich.text import Text

        if self.converted:
            yield self._table(options.max_width)
            yield f"{counted(len(self.converted), 'module')} converted"
        else:
            yield "no module converted"
        if self.functions is not None:
            inputs, attention, activations = self.functions
            yield (
                f"called functions keep {_bits(inputs)} of inputs, {attention:.4g} of attention, "
                f"{activations} of activations"
            )
        yield from self.notes
        for (pattern, kind, reason), count in self._reasons().items():
            where = f"{counted(count, 'module')} like {pattern}" if count > 1 else pattern
            yield Text(f"left alone: {where} ({kind}): {reason}")
        if self.kept is not None:
            yield ""
            yield self._bytes()
            if not self.is_training:
                yield "the model is in evaluation mode, in which nothing is compressed"

    def _table(self, width: int):
        rows = [(*key, str(count)) for key, count in self._rows().items()]
        names = ("modules", "was", "is", "keeps", "count")
        table = new_grid()
        for name in names:
            table.add_column(name, no_wrap=True, justify="right" if name == "count" else "left")
        for cells in fitted(names, rows, (0, 1, 2), width):
            table.add_row(*cells)
        return table

    def _rows(self) -> dict:
        """{(path, was, is, what it keeps): how many}; of several alike modules with numbers as *."""
        return _grouped((row.path, (row.before, _is(row), row.keeps)) for row in self.converted)

    def _reasons(self) -> dict:
        return _grouped((row.path, (row.kind, row.reason)) for row in self.left_alone)

    def _bytes(self):
        from fewbit.analysis.meter_report import amount, unit_of

        before, after = self.kept
        totals = sum(before.values()), sum(after.values())
        unit = unit_of(max(totals), "MiB")
        table = new_grid()
        table.add_column("kept for backward, by op")
        table.add_column(f"before, {unit[0]}", justify="right")
        table.add_column(f"now, {unit[0]}", justify="right")
        rest, nothing = [0, 0], amount(0, unit)
        # What is kept now says what to do next, and what is gone what was done.
        for name in sorted(
            {*before, *after}, key=lambda each: (-after.get(each, 0), -before.get(each, 0), each)
        ):
            sizes = before.get(name, 0), after.get(name, 0)
            shown = [amount(each, unit) for each in sizes]
            if shown == [nothing, nothing]:
                rest = [sum(each) for each in zip(rest, sizes, strict=True)]
            else:
                table.add_row(name, *shown)
        shown = [amount(each, unit) for each in rest]
        if shown != [nothing, nothing]:
            table.add_row("others", *shown)
        ratio = f" ({totals[0] / totals[1]:.2f}x less)" if totals[1] else ""
        table.add_row("total" + ratio, *(amount(each, unit) for each in totals), style="bold")
        return table


def _is(row: ConvertedModule) -> str:
    """The new class, shortly where it has the old one's name."""
    old = row.before
    return "fewbit's" if row.after in (f"fewbit.{old}", f"fewbit.nn.{old}") else row.after


def _grouped(rows) -> dict[tuple, int]:
    """{(path, *cells): how many}, in the order in which each was first seen."""
    rows = list(rows)
    counts = Counter((_pattern(path), *cells) for path, cells in rows)
    result = {}
    for path, cells in rows:
        key = _pattern(path), *cells
        if counts[key] == 1:
            result[path or "(the model)", *cells] = 1
        else:
            result[key] = counts[key]
    return result


def _pattern(path: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path) or "(the model)"


def _bits(bits: float | None) -> str:
    return "exact" if bits is None else counted(float(f"{bits:.4g}"), "bit")
