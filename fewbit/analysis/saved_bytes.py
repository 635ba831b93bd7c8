"""The result of `fewbit.saved_bytes`, as sums, a table and a picture."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from fewbit.errors import FewbitError
from fewbit.render import figures
from fewbit.render.formats import amount, module_name, share, unit_of
from fewbit.render.result import Result
from fewbit.render.terminal import shortened
from fewbit.render.view import Column, View
from fewbit.sizes import counted

MOST_BARS = 14
MOST_LABEL = 36
"""The most characters of a bar's name."""
STATE = ("parameter", "buffer")
"""The kinds of storages that exist even if they are not saved."""
IN_FULL = ("activation", "integer", "mask")
"""The kinds of storages that fewbit could save with fewer bytes."""
MOST_LEFT = 4
"""The most lines about tensors in full below the table."""
LEAST_LEFT = 0.01
"""The least part of the total for which there is such a line."""
NOTHING = (
    "Nothing is saved for backward: no output depends on anything that requires grad, "
    "or the forward switches gradients off (torch.no_grad)."
)
# The order and the colors of kinds that stand side by side. The colors are safe for color-blind readers.
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


@dataclass(frozen=True)
class Entry:
    """One storage, the memory of a tensor and its views, as one module saved it.

    Attributes:
        module: The dotted path of the innermost running module, "" for the model itself and for code outside of modules.
        module_type: The name of the module's class.
        kind: activation, input, integer, mask, packed, range, statistic, cast, parameter or buffer
            (docs/guides/meter.md).
        shape: The shape of the first saved tensor in this storage.
        dtype: The dtype of the first saved tensor.
        device: The device of the first saved tensor.
        bytes: The size of the whole storage; 0 if an earlier module saved it.
        viewed_bytes: An upper bound of the storage's bytes that the saved tensors of all modules occupy.
        saves: The number of the storage's tensors that this module saved.
        node: The name of an autograd node that holds the storage, or "".
        first_saver: The earlier module that saved the storage, or None.
        shared_with: The modules that saved the storage later.
        reason: Why a compressed model saves the storage in full, and the setting that would compress it; or "".
    """

    module: str
    module_type: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int
    viewed_bytes: int
    saves: int
    node: str
    first_saver: str | None = None
    shared_with: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, repr=False)
class SavedBytes(Result):
    """The storages that one forward of a model saves for backward, in the order of saving.

    Attributes:
        model: The class name of the model.
        entries: One `Entry` for each storage and module that saved it.
    """

    model: str
    entries: tuple[Entry, ...]

    @property
    def total(self) -> int:
        """The bytes saved for backward, without parameters and buffers, which exist anyway."""
        return sum(entry.bytes for entry in self.kept)

    @property
    def kept(self) -> tuple[Entry, ...]:
        """The entries that are counted in `total`."""
        return tuple(entry for entry in self.entries if entry.kind not in STATE)

    @property
    def parameters(self) -> int:
        """The bytes of saved parameters, which `total` does not have."""
        return self.by_kind().get("parameter", 0)

    @property
    def buffers(self) -> int:
        """The bytes of saved buffers, which `total` does not have."""
        return self.by_kind().get("buffer", 0)

    @property
    def inputs(self) -> int:
        """The bytes of the model's saved inputs, a part of `total`."""
        return self.by_kind().get("input", 0)

    def by_module(self, depth: int | None = None) -> dict[str, int]:
        """Return {path of a module: bytes}, largest first. The sum is `total`.

        Args:
            depth: Cut paths to this number of parts, so that a module includes those inside it.

        Raises:
            FewbitError: `depth` is neither None nor an integer of at least 0.
        """
        if depth is not None and (not isinstance(depth, int) or depth < 0):
            raise FewbitError(f"depth: expected None or an integer >= 0, got {depth!r}")
        return _sums(self.kept, lambda entry: _cut(entry.module, depth))

    def by_module_type(self) -> dict[str, int]:
        """Return {class name of modules: bytes}, largest first. The sum is `total`."""
        return _sums(self.kept, lambda entry: entry.module_type)

    def by_kind(self) -> dict[str, int]:
        """Return {kind: bytes}, largest first, with parameters and buffers."""
        return _sums(self.entries, lambda entry: entry.kind)

    def left_in_full(self) -> tuple[Entry, ...]:
        """Return the entries that a compressed model saves in full, largest first."""
        found = [entry for entry in self.entries if entry.reason and entry.bytes]
        return tuple(sorted(found, key=lambda entry: -entry.bytes))

    def records(self) -> list[dict]:
        """Return a dict of plain values for each entry."""
        return [
            asdict(entry) | {"shape": list(entry.shape), "shared_with": list(entry.shared_with)}
            for entry in self.entries
        ]

    def to_dict(self) -> dict:
        """Return all sums and entries as plain values."""
        return {
            "model": self.model,
            "total": self.total,
            "parameters": self.parameters,
            "buffers": self.buffers,
            "inputs": self.inputs,
            "by_kind": self.by_kind(),
            "by_module_type": self.by_module_type(),
            "by_module": self.by_module(),
            "entries": self.records(),
        }

    document = to_dict

    @property
    def title(self) -> str:
        """One line with `total` and the number of storages."""
        storages = sum(entry.bytes > 0 for entry in self.kept)
        name = f"{self.model}: " if self.model else ""
        return f"{name}{amount(self.total)} saved for backward, in {counted(storages, 'storage')}"

    def view(self) -> View:
        """Return a table of storages, largest first."""
        if not self.total:
            return View(self.title, notes=[NOTHING, *self._notes()])
        unit = unit_of(self.total, "MiB")
        columns = (
            Column("module", lambda row: row.module, "name", least=24),
            Column("type", lambda row: row.module_type, "name", drop=2, least=24),
            Column("×", lambda row: f"{row.count}" if row.count > 1 else ""),
            Column("kind", lambda row: row.kind, "word", drop=4),
            Column("shape", lambda row: row.shape, "word", drop=3),
            Column("dtype", lambda row: row.dtype, "word", drop=1),
            Column(unit[0], lambda row: amount(row.bytes, unit)),
            Column("share", lambda row: share(row.bytes, self.total)),
        )
        found = rows(self.kept)
        kinds = {kind: size for kind, size in self._kinds().items() if kind not in STATE}
        bar = [(f"{k}: {amount(n)}", n / self.total, COLORS[k]) for k, n in kinds.items()]
        parts = [f"{k} {amount(n)} ({share(n, self.total)})" for k, n in kinds.items()]
        notes = [f"by kind: {', '.join(parts)}", *self._notes(), *self._left()]
        return View(self.title, columns, found, notes, _sum("total", found), _sum, bar)

    def _notes(self) -> list[str]:
        lines = []
        apart = {"parameters": self.parameters, "buffers": self.buffers}
        apart = [f"{name} {amount(size)}" for name, size in apart.items() if size]
        if apart:
            lines.append(f"not in the total: {', '.join(apart)}, saved but existing anyway")
        shared = sum(entry.first_saver is not None for entry in self.kept)
        if shared:
            lines.append(
                f"in storages of earlier modules, 0 bytes: {counted(shared, 'more saved tensor')}"
            )
        idle = sum(entry.bytes - entry.viewed_bytes for entry in self.kept if entry.bytes)
        if idle:
            lines.append(
                f"{amount(idle)} of the total are memory that saved views keep alive without using it, such as the "
                "rest of a tensor of which a slice was passed; to measure the slice alone, pass a clone"
            )
        return lines

    def _left(self) -> list[str]:
        groups = defaultdict(int)
        for entry in self.left_in_full():
            place = tuple("*" if part.isdecimal() else part for part in entry.module.split("."))
            groups[module_name(".".join(place)), entry.reason] += entry.bytes
        found = sorted(groups.items(), key=lambda item: -item[1])
        named = [item for item in found if item[1] >= LEAST_LEFT * self.total][:MOST_LEFT]
        return [
            f"in full, {amount(size)} in {module}: {reason}" for (module, reason), size in named
        ]

    def _kinds(self) -> dict[str, int]:
        sizes = self.by_kind()
        return {kind: sizes[kind] for kind in COLORS if sizes.get(kind)}

    def plot(
        self,
        path: str | os.PathLike | None = None,
        by: str = "module_type",
        depth: int | None = None,
        force: bool = False,
    ):
        """Draw the bytes as horizontal bars, divided by kind, largest first.

        Args:
            path: Also save the figure in this .png or .svg file.
            by: "module_type" or "module": what each bar stands for.
            depth: With by="module", cut module paths to this number of parts.
            force: Replace the file if it exists.

        Returns:
            The matplotlib Figure.

        Raises:
            FewbitError: `by` or the ending of the file's name is none of these, or matplotlib is not installed.
            OutputExistsError: The file exists and `force` is false.
        """
        if by not in ("module_type", "module"):
            raise FewbitError(f"by: expected module_type or module, got {by!r}")
        bars = self._bars(by, depth)
        return figures.draw(lambda figure: _draw_bars(figure, bars, self), path, force)

    def _bars(self, by: str, depth: int | None) -> dict[str, dict[str, int]]:
        groups = defaultdict(lambda: defaultdict(int))
        sizes = self.by_module(depth) if by == "module" else self.by_module_type()
        names = [name for name, size in sizes.items() if size]
        first = names[: MOST_BARS - 1] if len(names) > MOST_BARS else names
        others = f"{len(names) - len(first)} others"
        for entry in self.kept:
            name = _cut(entry.module, depth) if by == "module" else entry.module_type
            if entry.bytes:
                groups[name if name in first else others][entry.kind] += entry.bytes
        order = [*first, *(group for group in groups if group not in first)]
        return {module_name(name): dict(groups[name]) for name in order}


def _sums(entries: Iterable[Entry], key: Callable[[Entry], str]) -> dict[str, int]:
    sums = defaultdict(int)
    for entry in entries:
        sums[key(entry)] += entry.bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _cut(path: str, depth: int | None) -> str:
    return ".".join(path.split(".")[:depth])


class Row(NamedTuple):
    """One row of the table: equal storages of modules whose paths differ only in numbers, or a sum of rows."""

    module: str
    module_type: str
    count: int
    kind: str
    shape: str
    dtype: str
    bytes: int


def rows(entries: Iterable[Entry]) -> list[Row]:
    """Return the rows of the table, largest first, without entries of 0 bytes."""
    groups = defaultdict(list)
    for entry in entries:
        if entry.bytes:
            # `layers.0.norm` and `layers.1.norm` are alike, `norm1` and `norm2` are not.
            place = tuple("*" if part.isdecimal() else part for part in entry.module.split("."))
            alike = (entry.module_type, entry.kind, entry.shape, entry.dtype, entry.bytes)
            groups[place, *alike].append(entry)
    found = [
        Row(
            module=module_name(_common([entry.module for entry in group])),
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


def _sum(name: str, rows: Sequence[Row]) -> Row:
    return Row(name, "", 0, "", "", "", sum(row.bytes for row in rows))


def _common(paths: Sequence[str]) -> str:
    """Return one path for several paths of the same length, with * for the parts in which they differ."""
    parts = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(same[0] if len(set(same)) == 1 else "*" for same in parts)


def _draw_bars(figure, bars: dict[str, dict[str, int]], saved: SavedBytes) -> None:
    figure.set_size_inches(7.2, 1.3 + 0.3 * max(1, len(bars)))
    axes, unit, names = figure.subplots(), unit_of(saved.total, "MiB"), list(bars)
    left = [0.0] * len(names)
    for kind in saved._kinds():
        sizes = [bars[name].get(kind, 0) / unit[1] for name in names]
        if any(sizes):
            axes.barh(
                range(len(names)), sizes, left=left, color=COLORS[kind], label=kind, height=0.7
            )
            left = [start + size for start, size in zip(left, sizes, strict=True)]
    for i, name in enumerate(names):
        size = sum(bars[name].values())
        axes.annotate(
            f"{amount(size, unit)}  ({share(size, saved.total)})",
            (left[i], i),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=figures.MUTED,
        )
    labels = [figures.literal(shortened(name, MOST_LABEL)) for name in names]
    axes.set_yticks(range(len(names)), labels, color=figures.INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.22 * max(left, default=1) or 1)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"saved for backward, {unit[0]}")
    figures.title(axes, saved.title)
    if len(axes.containers) > 1:
        axes.legend(loc="lower right")
    if not bars:
        where = {"transform": axes.transAxes, "ha": "center", "color": figures.MUTED}
        axes.text(0.5, 0.5, "nothing is saved", **where)
