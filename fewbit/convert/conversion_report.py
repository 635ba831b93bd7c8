"""The report of a conversion: which modules were converted and which were not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fewbit.render.formats import amount, bits_or_exact, module_name, module_pattern, unit_of
from fewbit.render.result import Result
from fewbit.render.view import Column, View
from fewbit.sizes import counted

LEAST_PARENT = 12
"""From this length on, a path that all modules share is printed only once."""
MOST_ROWS = 16
"""From this number of rows on, modules with equal last names and cells share a row."""


class ConvertedModule(NamedTuple):
    """A module that was converted.

    Attributes:
        path: The dotted path, "" for the model itself.
        before: The name of the class before the conversion.
        after: The name of the class after the conversion.
        bits: The bits per element, perhaps an average, that the module saves of its input, or of an activation's derivative.
            None if the module's gradients stay exact.
        exact: If `bits` is None, what the module saves, such as "1-bit mask".
        shared: Whether the module only uses what a norm has saved in fixed point; None if that is not known.
        attention: The bits per element of q, k and v of attention, if they are not `bits`.
        frozen: Whether the module saves no input, because its weight needs no gradient.
        evaluated: Whether the module is in evaluation mode, and saves what torch's module does, while others train.
    """

    path: str
    before: str
    after: str
    bits: float | None
    exact: str = "exact"
    shared: bool | None = False
    attention: float | None = None
    frozen: bool = False
    evaluated: bool = False

    @property
    def saves(self) -> str:
        """The text for the bits that the module saves."""
        if self.evaluated:
            return "as torch, in eval()"
        if self.frozen:
            return "no input"
        if self.shared:
            return "the norm's"
        text = (self.exact if self.bits is None else bits_or_exact(self.bits)) + (
            " or the norm's" if self.shared is None else ""
        )
        return text if self.attention is None else f"{text}, q k v {bits_or_exact(self.attention)}"


class SkippedModule(NamedTuple):
    """A module that was left as it is.

    Attributes:
        path: The dotted path, "" for the model itself.
        kind: The name of the module's class, or of a function that the module has or calls.
        reason: A text for the report.
    """

    path: str
    kind: str
    reason: str


@dataclass(frozen=True, repr=False)
class Report(Result):
    """The modules that a conversion has changed, and those that it left as they are.

    Attributes:
        saved: Two dicts, before and after the conversion: {class of modules: bytes that they save for the backward pass}.
            None if `compress_` got no `sample`.
        functions: For functions that a forward pass calls, the bits per element of quantized inputs, of q, k and v of
            attention (None if no call of attention was seen or is likely), and of activations. None if functions are not compressed.
        notes: Lines about the model as a whole.
    """

    converted: tuple[ConvertedModule, ...]
    left_alone: tuple[SkippedModule, ...]
    saved: tuple[dict[str, int], dict[str, int]] | None = None
    functions: tuple[int, int | None, int] | None = None
    notes: tuple[str, ...] = ()

    def records(self) -> list[dict]:
        """Return a dict for each module that was converted."""
        return [row._asdict() for row in self.converted]

    def view(self) -> View:
        count, parent = len(self.converted), _common_parent([row.path for row in self.converted])
        title = f"{counted(count, 'module')} converted" if count else "no module converted"
        if parent:
            title += f" in {parent}"
        columns = (
            Column("modules", lambda row: row[0][0], "name"),
            Column("was", lambda row: row[0][1], "name"),
            Column("is", lambda row: row[0][2], "name"),
            Column("saves", lambda row: row[0][3], "word"),
            Column("count", lambda row: str(row[1])),
        )
        start = len(parent) + 1 if parent else 0
        rows = _grouped(
            (row.path[start:], (row.before, _is(row), row.saves)) for row in self.converted
        )
        rows = list(rows.items()) if len(rows) <= MOST_ROWS else _merged(rows)
        more = [] if self.saved is None else [self._bytes()]
        return View(title, columns if count else (), rows, list(self._lines()), more=more)

    def _lines(self) -> Iterator[str]:
        if evaluated := sum(row.evaluated for row in self.converted):
            yield (
                f"in evaluation mode, in which nothing is compressed: {counted(evaluated, 'module')}; "
                "call train() unless you froze these on purpose"
            )
        if self.functions is not None:
            inputs, attention, activations = self.functions
            line = f"called functions save {bits_or_exact(inputs)} of inputs, activations {bits_or_exact(activations)}"
            if attention not in (inputs, None):
                line += (
                    "; if the model calls attention, matrix products, softmax or squares, these save "
                    f"{bits_or_exact(attention)} of inputs"
                )
            yield line
        yield from self.notes
        reasons = _grouped((row.path, (row.kind, row.reason)) for row in self.left_alone)
        for (pattern, kind, reason), count in reasons.items():
            modules = f"{counted(count, 'module')} like {pattern}" if count > 1 else pattern
            yield f"left alone: {modules} ({kind}): {reason}"

    def _bytes(self) -> View:
        before, after = self.saved
        totals = sum(before.values()), sum(after.values())
        unit = unit_of(max(totals), "MiB")
        # Classes that save most now come first, because they are the next to compress.
        names = sorted(
            {*before, *after}, key=lambda name: (-after.get(name, 0), -before.get(name, 0), name)
        )
        rows = [(name, before.get(name, 0), after.get(name, 0)) for name in names]
        nothing = amount(0, unit)

        def is_shown(row: tuple[str, int, int]) -> bool:
            return any(amount(size, unit) != nothing for size in row[1:])

        hidden = [row for row in rows if not is_shown(row)]
        others = "others", sum(row[1] for row in hidden), sum(row[2] for row in hidden)
        rows = [row for row in [*filter(is_shown, rows), others] if is_shown(row)]
        ratio = f" ({totals[0] / totals[1]:.2f}x less)" if totals[1] else ""
        columns = (
            Column("saved for backward, by class", lambda row: row[0], "name"),
            Column(f"before, {unit[0]}", lambda row: amount(row[1], unit)),
            Column(f"now, {unit[0]}", lambda row: amount(row[2], unit)),
        )
        return View("", columns, rows, [], total=("total" + ratio, *totals))


def _common_parent(paths: list[str]) -> str:
    """Return the path of the innermost module that contains all modules; "" if this saves little."""
    parents = [path.split(".")[:-1] for path in paths]
    common = []
    for names in zip(*parents, strict=False):
        if len(set(names)) > 1 or names[0].isdigit():
            break
        common.append(names[0])
    parent = ".".join(common)
    return parent if len(paths) > 1 and len(parent) >= LEAST_PARENT else ""


def _is(row: ConvertedModule) -> str:
    old = row.before
    return "fewbit's" if row.after in (f"fewbit.{old}", f"fewbit.nn.{old}") else row.after


def _grouped(rows: Iterable[tuple[str, tuple]]) -> dict[tuple, int]:
    """Return {(path, *cells): number of rows} with the same cells and paths, in which numbers that differ become *."""
    rows = list(rows)
    counts = Counter((module_pattern(path), *cells) for path, cells in rows)
    result = {}
    for path, cells in rows:
        key = module_pattern(path), *cells
        if counts[key] == 1:
            result[module_name(path), *cells] = 1
        else:
            result[key] = counts[key]
    return result


def _merged(rows: dict[tuple, int]) -> list[tuple[tuple, int]]:
    """Merge rows of `_grouped` with the same last name and cells, such as *.q_proj.base_layer and *.k_proj.base_layer."""
    groups: dict[tuple, list] = {}
    for (path, *cells), count in rows.items():
        names = path.split(".")
        name = ".".join(names[-2:] if names[-1].isdigit() else names[-1:])
        groups.setdefault((name, *cells), []).append((path, count))
    found = []
    for (name, *cells), members in groups.items():
        path = members[0][0] if len(members) == 1 else f"*.{name}"
        found.append(((path, *cells), sum(count for _, count in members)))
    return found
