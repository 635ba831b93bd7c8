"""The partitioner that torch.compile calls, with few-bit copies among the tensors that it saves."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fewbit.compiler.compiler_report import CompileReport, SavedRow, rows_of, saved_bytes_of
from fewbit.compiler.joint_graph import JointGraph, Root
from fewbit.compiler.normal_form import simplify, undo_reshapes
from fewbit.compiler.rewrite import Copy, Rewriter
from fewbit.compiler.seed_counters import counter_of
from fewbit.convert.module_settings import ResolvedSettings

_FOLDERS = "compiler", "runtime/ops", "runtime/format"
_FILES = tuple(
    str(path)
    for folder in _FOLDERS
    for path in sorted((Path(__file__).parents[1] / folder).glob("*.py"))
)
"""The files on which compiled graphs depend."""
_FEWER = "torch's own partition saves fewer bytes than copies would have"


class Partitioner(CustomPartitionerFn):
    """Cuts a joint graph into a forward and a backward graph, between which a few bits per element are saved.

    Args:
        settings: the settings of all modules that `own` does not have.
        own: {dotted path of a module: its settings, or None to leave its tensors exact}.
        paths: the paths of all modules of the model, if they are known.
        is_inductor: whether Inductor generates code for the graphs.
    """

    def __init__(
        self,
        settings: ResolvedSettings,
        own: Mapping[str, ResolvedSettings | None] | None = None,
        paths: Iterable[str] = (),
        is_inductor: bool = False,
    ):
        self.settings = settings
        self.own = dict(own or {})
        self.paths = frozenset(paths)
        self.is_inductor = is_inductor
        self._rows = []
        self._graphs = 0

    def __call__(
        self, joint_module, joint_inputs, **options
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition a joint graph, with the arguments of torch's `min_cut_rematerialization_partition`."""
        joint_module.graph.eliminate_dead_code()
        exact_graph = _copy(joint_module.graph)
        joint, copies = self._rewrite(joint_module, options)
        recomputable = joint.bytes_to_recompute()
        graphs = _partition(joint_module, joint_inputs, options)
        rows = _rows(graphs, joint, copies)
        # The two modules share nested graphs, and torch's partitioner changes graphs.
        has_parts = any(isinstance(child, fx.GraphModule) for child in joint_module.children())
        if copies and not has_parts and recomputable < saved_bytes_of(rows):
            exact_module = fx.GraphModule(joint_module, exact_graph)
            exact = _partition(exact_module, joint_inputs, options)
            exact_rows = _rows(exact, joint, {})
            if saved_bytes_of(exact_rows) <= saved_bytes_of(rows):
                graphs, rows = exact, [row._replace(reason=_FEWER) for row in exact_rows]
        self._rows += rows
        self._graphs += 1
        return graphs

    def _rewrite(self, module, options) -> tuple[JointGraph, Mapping[fx.Node, Copy]]:
        undo_reshapes(module.graph)
        graph = fx_graph_cse(module.graph)
        simplify(graph)
        graph = fx_graph_cse(graph)
        static = frozenset(options.get("static_lifetime_input_indices") or ())
        joint = JointGraph(graph, options["num_fwd_outputs"], static)
        copies = Rewriter(joint, self._settings_of, self.is_inductor).run()
        with unset_fake_temporarily():
            for copy in copies.values():
                counter_of(copy.root.node.meta["val"].device)
        module.graph = graph  # once, because torch generates the module's code each time
        return joint, copies

    @property
    def report(self) -> CompileReport:
        """The tensors that the graphs save; none before they run, or if torch's cache on disk has their code."""
        return CompileReport(tuple(self._rows), self._graphs)

    @property
    def compresses(self) -> bool:
        """False if overrides leave the tensors of all modules exact."""
        return not self.paths or any(self.own.get(path, self.settings) for path in self.paths)

    def uuid(self):
        """Return the key by which torch's cache of compiled code knows these settings and this version of the code."""
        return get_hash_for_files(_FILES, repr((self.settings, self.own, self.is_inductor)))

    def __deepcopy__(self, memo):
        # Inductor copies its options, and the report must reach the object that the user has.
        return self

    def __repr__(self) -> str:
        return f"Partitioner({self.settings.bits} bits, {self._graphs} graphs compiled)"

    def _settings_of(self, root: Root) -> ResolvedSettings | None:
        unknown = sorted(root.modules - self.paths) if self.own and self.paths else ()
        if unknown:
            warnings.warn(
                f"overrides: torch.compile calls a module {unknown[0]!r}, which is no path in the model, probably because "
                "the compiled code begins inside the model after a graph break; overrides may not hold there",
                stacklevel=2,
            )
        found = [self.own.get(path, self.settings) for path in sorted(root.modules)]
        if not found or None in found:
            return None if found else self.settings
        return max(found, key=lambda settings: settings.bits)


def _copy(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    results, output = copy.graph_copy(graph, {}, return_output_node=True)
    copy.output(results).meta.update(output.meta)
    return copy


def _partition(module, inputs, options) -> tuple[fx.GraphModule, fx.GraphModule]:
    # With a budget below 1, torch would save no copies, and compute the forward pass and the copies again.
    with functorch_config.patch(activation_memory_budget=1.0):
        return min_cut_rematerialization_partition(module, inputs, **options)


def _rows(graphs, joint: JointGraph, copies: Mapping[fx.Node, Copy]) -> list[SavedRow]:
    return [*rows_of(graphs[0], joint.forward_outputs, joint, copies)]
