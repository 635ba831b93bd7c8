"""The report of the compiler mode: which tensors the compiled graphs save."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from fewbit.compiler.graphs import is_from_fewbit, module_of, size_in_bytes
from fewbit.compiler.joint_graph import JointGraph
from fewbit.compiler.rewrite import Copy
from fewbit.compiler.symbolic_sizes import count, hints
from fewbit.compiler.uses import VIEWS
from fewbit.render.formats import amount, bits_or_exact, module_pattern, unit_of
from fewbit.render.result import Result
from fewbit.render.view import Column, View
from fewbit.runtime.format.groups import LEAST_ELEMENTS


class SavedRow(NamedTuple):
    """A tensor that a compiled graph saves.

    Attributes:
        module: the dotted path of the module whose backward pass uses the tensor, or, if there are several or it is exact,
            that made it.
        op: the op of ATen that made the tensor, such as "gelu_backward"; "input" for a result of an earlier graph.
        dtype: the dtype, for example "float32".
        exact_bytes: the bytes of the tensor itself.
        saved_bytes: the bytes that the graph saves for it.
        bits: the bits per element of a copy or mask; None if the tensor is saved as it is.
        reason: why the tensor is saved as it is, "" for a copy.
    """

    module: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    exact_bytes: int
    saved_bytes: int
    bits: int | None
    reason: str


@dataclass(frozen=True, repr=False)
class CompileReport(Result):
    """The tensors that the graphs of a compiled model save for the backward pass, besides parameters, buffers and plain inputs.

    Attributes:
        graphs: the number of graphs: several if torch breaks the graph, or compiles again for other sizes.
    """

    rows: tuple[SavedRow, ...]
    graphs: int

    @property
    def saved_bytes(self) -> int:
        """The bytes that the graphs save."""
        return sum(row.saved_bytes for row in self.rows)

    def records(self) -> list[dict]:
        return [row._asdict() for row in self.rows]

    def view(self) -> View:
        if not self.rows:
            why = [
                "The model has not run yet, or torch found its compiled code in the cache on disk, or torch.compile could "
                "not compile the code that saves tensors: TORCH_LOGS=graph_breaks prints where it gave up."
            ]
            return View("no graph compiled", (), [], why)
        groups: dict[tuple, list[SavedRow]] = {}
        for row in sorted(self.rows, key=lambda row: -row.saved_bytes):
            key = module_pattern(row.module), row.op, row.bits, row.reason
            groups.setdefault(key, []).append(row)
        exact, saved = (sum(getattr(row, name) for row in self.rows) for name in _SIZES)
        unit = unit_of(saved, "MiB")
        columns = (
            Column("module", lambda group: group[0][0], "name"),
            Column("op", lambda group: group[0][1], "name"),
            Column("count", lambda group: str(len(group[1]))),
            Column("saved as", lambda group: _saved_as(*group[0][2:]), "word"),
            Column(f"saved, {unit[0]}", lambda group: amount(saved_bytes_of(group[1]), unit)),
            Column("why exact", lambda group: group[0][3], "text", drop=1),
        )
        rows = sorted(groups.items(), key=lambda group: -saved_bytes_of(group[1]))
        title = f"{amount(saved)} saved for backward, in place of {amount(exact)}"
        if self.graphs > 1:
            title += (
                f", summed over {self.graphs} graphs (parts of the model, or other input sizes)"
            )
        return View(title, columns, rows)


_SIZES = "exact_bytes", "saved_bytes"
_CODES = "a layer of fewbit has quantized it already"


def _saved_as(bits: int | None, reason: str) -> str:
    return "codes" if reason == _CODES else bits_or_exact(bits)


def saved_bytes_of(rows: Iterable[SavedRow]) -> int:
    """Return the bytes that graphs save for tensors together."""
    return sum(row.saved_bytes for row in rows)


def rows_of(
    forward: fx.GraphModule, outputs: int, joint: JointGraph, copies: Mapping[fx.Node, Copy]
) -> Iterator[SavedRow]:
    """Yield a row for each tensor that a forward graph saves besides its first `outputs` results.

    `copies` is {node of the joint graph: the copy of its tensor}.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    # An input with a gradient is a result of an earlier graph, if the graph was broken.
    given = {node.name for node in placeholders if node in joint.constants}
    reasons = {node.name: reason for node, reason in joint.exact.items()}
    saved = {
        node.name: node
        for node in forward.graph.output_node().args[0][outputs:]
        if _is_tensor(node)
    }
    for copy in copies.values():
        parts = [saved.pop(node.name) for node in copy.saved if node.name in saved]
        if parts:
            node, size = copy.root.node, sum(map(size_in_bytes, parts))
            # A tensor that several modules use is listed under the module that made it.
            (module,) = copy.root.modules if len(copy.root.modules) == 1 else (module_of(node),)
            yield _row(node, module, size, copy.bits, "")
    for node in saved.values():
        if _given(node) not in given:
            yield _row(
                node,
                module_of(node),
                size_in_bytes(node),
                None,
                reasons.get(node.name) or _why_saved(node),
            )


def _is_tensor(node) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _given(node) -> str | None:
    while node.op == "call_function" and node.target in VIEWS - {torch.ops.aten.clone.default}:
        node = node.all_input_nodes[0]
    return node.name if node.op == "placeholder" else None


def _why_saved(node) -> str:
    producer = node.args[0] if node.target is operator.getitem else node
    if is_from_fewbit(producer):
        return _CODES
    if count(node.meta["val"]) < LEAST_ELEMENTS:
        return f"fewer than {LEAST_ELEMENTS:,} elements"
    return "torch saves it to compute exact tensors again"


def _row(node, module: str, saved: int, bits: int | None, reason: str) -> SavedRow:
    value = node.meta["val"]
    dtype = str(value.dtype).removeprefix("torch.")
    # Without a graph break, the inputs of a graph are the model's, which are not counted.
    op = "input" if node.op == "placeholder" else node.meta.get("original_aten") or node.target
    op = str(op).removeprefix("aten.").split(".")[0]
    shape = tuple(hints(value.shape))
    return SavedRow(module, op, shape, dtype, size_in_bytes(node), saved, bits, reason)
