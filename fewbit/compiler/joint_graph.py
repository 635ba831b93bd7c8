"""The analysis of a joint graph: which tensors the backward pass uses, and which of them to quantize.

A node is *backward* if it depends on the tangents, and the *frontier* is the set of the other nodes that backward nodes
use. Backward nodes are linear in the frontier, so gradients from unbiased copies of it are exact in expectation.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fewbit.compiler import uses
from fewbit.compiler.graphs import (
    backward_nodes,
    is_floating,
    is_from_fewbit,
    is_recomputed,
    modules_of,
    size_in_bytes,
)
from fewbit.compiler.normal_form import STATISTIC
from fewbit.compiler.symbolic_sizes import SizeNodes, count
from fewbit.runtime.format.groups import LEAST_ELEMENTS

STATISTIC_REASON = "a statistic of larger tensors"
_AS_STRIDED = torch.ops.aten.as_strided.default
MOST_STEPS_OF_STATISTIC = 16
"""The most nodes by which a norm computes its statistics."""


@dataclass
class Root:
    """A tensor to quantize.

    Attributes:
        roles: why the tensor has other bits than most: pairs of "attention", "gates", "activations" or "norms", and the
            number of the input among those of the layer, for example ("attention", 1) for keys.
        is_derivative: whether only the backward pass uses it, as a nonlinear function of one tensor.
        is_probability: whether it is a result of exp, as in softmax.
        modules: the dotted paths of the modules whose backward passes use it.
    """

    node: fx.Node
    roles: set[tuple[str, int]] = field(default_factory=set)
    is_derivative: bool = False
    is_probability: bool = False
    modules: set[str] = field(default_factory=set)

    @property
    def is_attention(self) -> bool:
        """True for a query, key or value of an attention, or a result of softmax in a batched product."""
        return any(role == "attention" for role, _ in self.roles)

    @property
    def codes(self) -> int | None:
        """The number of values of a mask or an index, or None."""
        return uses.codes_of(self.node)


@dataclass
class JointGraph:
    """The parts of a joint graph without dead nodes: its backward nodes, and the tensors to quantize or to leave exact.

    `forward_outputs` is the number of results of the forward graph, `static` the numbers of inputs that are parameters
    or buffers.

    Attributes:
        changed: the inputs that the model changes in place, such as running means, and what depends on them.
        backward: the nodes that depend on tangents, in their order.
        forward: the nodes on which results of the forward graph depend.
        random: large constants that depend on random numbers, such as masks of dropout, which backward draws again.
        constants: nodes that follow from parameters, inputs without gradient, small tensors and statistics of large ones.
        statistics: those of them that are large, and a number for each row or channel of a larger tensor.
        exact: {frontier node that stays exact: the reason}.
        roots: {node: Root} of the tensors to quantize. Each other node of the frontier is a view or an affine function
            of one of them, or in `again`.
        again: nodes that the backward pass computes again from copies of roots (`computed_again.py`).
    """

    graph: fx.Graph
    forward_outputs: int
    static: frozenset[int]
    changed: set[fx.Node] = field(default_factory=set)
    backward: dict[fx.Node, None] = field(default_factory=dict)
    forward: set[fx.Node] = field(default_factory=set)
    parameters: set[fx.Node] = field(default_factory=set)
    random: set[fx.Node] = field(default_factory=set)
    constants: set[fx.Node] = field(default_factory=set)
    statistics: set[fx.Node] = field(default_factory=set)
    exact: dict[fx.Node, str] = field(default_factory=dict)
    roots: dict[fx.Node, Root] = field(default_factory=dict)
    again: set[fx.Node] = field(default_factory=set)
    sizes: SizeNodes = field(init=False)

    def __post_init__(self):
        self.sizes = SizeNodes(self.graph)
        self.changed = _changed(self.graph)
        self.backward = backward_nodes(self.graph)
        self.forward = self._needed_by_forward()
        self._find_constants()
        frontier = self._frontier()
        self.exact = {
            node: why for node, uses_ in frontier.items() if (why := self._why_exact(node, uses_))
        }
        self._find_constants()  # what exact tensors suffice to compute needs no copy
        self.exact |= dict.fromkeys(self.statistics, STATISTIC_REASON)
        for node, uses_ in frontier.items():
            if node not in self.constants and node not in self.exact:
                self._add_root(node, uses_)
        for node in [*self.roots]:
            if self._is_derived(node):
                del self.roots[node]
        for node in frontier:
            root = self.root_of(node)
            if root is not None:
                users = [user for user in node.users if user in self.backward]
                root.modules |= {path for user in users for path in modules_of(user)}
        for node, root in self.roots.items():
            if _is_normalized(node) or _has_variance(node):
                root.roles.add(("norms", 0))

    def source_of(self, node: fx.Node) -> fx.Node | None:
        """Return the only input, besides constants and masks, of a view or an affine function; a mask if it has only these."""
        if node.op != "call_function" or node.target not in uses.AFFINE | uses.OF_OFFSETS:
            return None
        if any(x in self.changed for x in node.all_input_nodes):
            return None  # the backward pass would compute it from the new values
        sources = [x for x in node.all_input_nodes if self.varies(x)]
        others = [x for x in sources if uses.codes_of(x) is None]
        if len(others or sources) != 1:
            return None
        source = (others or sources)[0]
        if is_floating(source) and (not is_floating(node) or node.meta["val"].itemsize == 1):
            return None  # rounding to integers or to 8 bits is not affine
        return source if list(node.args).count(source) == 1 else None

    def is_cast_parameter(self, node: fx.Node) -> bool:
        """Return whether a large node is a parameter in another dtype, perhaps viewed."""
        is_cast = False
        while node.op == "call_function" and node.target in uses.VIEWS | uses.CASTS:
            is_cast |= node.target in uses.CASTS
            node = node.all_input_nodes[0]
        is_unchanged = node in self.parameters and node not in self.changed
        return is_cast and is_unchanged and not _is_small(node)

    def bytes_to_recompute(self) -> int:
        """Return the bytes of the tensors from which pointwise ops and views compute all tensors to quantize."""
        _, leaves = self.part(self.roots, _is_pointwise)
        return sum(map(size_in_bytes, leaves))

    def part(self, nodes, is_inner) -> tuple[set[fx.Node], set[fx.Node]]:
        """Return the varying nodes with `is_inner` by which nodes are computed, and those from which these are computed."""
        inner, leaves, todo = set(), set(), [*nodes]
        while todo:
            node = todo.pop()
            if node in inner or not self.varies(node):
                continue
            if is_inner(node):
                inner.add(node)
                todo += node.all_input_nodes
            else:
                leaves.add(node)
        return inner, leaves

    def source_beside_roots(self, node: fx.Node) -> fx.Node | None:
        """Return the source of a node whose other inputs, such as masks, are views of roots; or None."""
        source = self.source_of(node)
        if source is None:
            return None
        others = [x for x in node.all_input_nodes if x is not source and self.varies(x)]
        return source if all(self.viewed(x) in self.roots for x in others) else None

    def varies(self, node) -> bool:
        """Return whether the backward pass can have a node of the forward part only if it is saved or computed again."""
        return not (node in self.constants or node in self.exact or node in self.backward)

    def _needed_by_forward(self) -> set[fx.Node]:
        outputs = self.graph.output_node().args[0][: self.forward_outputs]
        found, todo = set(), [x for x in outputs if isinstance(x, fx.Node)]
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += node.all_input_nodes
        return found

    def _find_constants(self) -> None:
        outputs = self.graph.output_node().args[0]
        gradients = outputs[self.forward_outputs :]
        primals = [x for x in self.graph.find_nodes(op="placeholder") if x not in self.backward]
        data = set()
        for number, node in enumerate(primals):
            has_gradient = number < len(gradients) and gradients[number] is not None
            if number in self.static:
                self.parameters.add(node)
            if number in self.static or not has_gradient:
                self.constants.add(node)
                if number not in self.static and is_floating(node):
                    data.add(node)
        for node in self.graph.nodes:
            if node in self.backward or node.op in ("output", "placeholder"):
                continue
            inputs = node.all_input_nodes
            if _is_small(node) or node.op == "get_attr" or is_from_fewbit(node):
                self.constants.add(node)
            elif _is_reduced(node):
                self.constants.add(node)
                self.statistics.add(node)
            elif node.target in uses.POINTWISE | {_AS_STRIDED} and all(
                x in self.constants or x in self.exact for x in inputs
            ):
                # torch would save functions of the data, which take more operations than a view.
                is_data = any(x in data for x in inputs) and is_floating(node)
                if not is_data or node.target in uses.VIEWS:
                    self.constants.add(node)
                if node.target in uses.RANDOM or any(x in self.random for x in inputs):
                    self.random.add(node)
                if not is_data and any(x in self.statistics for x in inputs):
                    self.statistics.add(node)
                if is_data:
                    data.add(node)

    def _frontier(self) -> dict[fx.Node, set]:
        found = {}
        for user in self.backward:
            for node in user.all_input_nodes:
                if node not in self.backward and node not in self.constants:
                    found.setdefault(node, set()).add(uses.use_of(user, node) or f"{user.target}")
        return found

    def _why_exact(self, node, uses_) -> str:
        value = node.meta["val"]
        if not self.sizes.knows(value):
            return "its size depends on values of tensors"
        known = {uses.LINEAR, uses.UNUSED, *uses.ATTENTION.values()}
        unknown = sorted(uses_ - known, key=str)
        if unknown and self._codes_behind(node) is None:
            return f"{unknown[0]} needs it exactly"
        if is_recomputed(node):
            return "a checkpointed region computes it again"
        if not value.is_floating_point() and self._codes_behind(node) is None:
            return "integers"
        return STATISTIC_REASON if self._is_factor_of_rows(node) else ""

    def _is_factor_of_rows(self, node) -> bool:
        """Return whether all products with the node are much larger than the node, as with a gate for each channel.

        A group would mix factors of very different sizes.
        """
        value = node.meta["val"]
        users = [user.meta.get("val") for user in node.users if user in self.backward]
        sizes = [count(x) for x in users if isinstance(x, torch.Tensor)]
        is_reduced = value.is_floating_point() and any(
            isinstance(size, int) and size == 1 for size in value.shape
        )
        return is_reduced and bool(sizes) and min(sizes) >= STATISTIC * count(value)

    def _add_root(self, node, uses_) -> None:
        if uses_ <= {uses.UNUSED}:
            return
        is_product = any(user.target is torch.ops.aten.bmm.default for user in node.users)
        roles = {use for use in uses_ if isinstance(use, tuple)}
        if is_product and is_probability(node):
            roles.add(("attention", 0))
        node = self._codes_behind(node) or self.viewed(node)
        root = self.roots.setdefault(node, Root(node))
        root.roles |= roles
        root.is_probability = is_probability(node)
        root.is_derivative = not root.is_probability and self._is_derivative(node)

    def root_of(self, node) -> Root | None:
        """Return the root from which a node of the frontier is restored, or None."""
        while node is not None and node not in self.roots:
            node = self.source_of(node) if self.varies(node) else None
        return self.roots.get(node)

    def viewed(self, node) -> fx.Node:
        """Return the tensor of which a node is a view, unless this tensor has more elements."""
        while node.op == "call_function" and node.target in uses.VIEWS:
            source = node.all_input_nodes[0]
            if source in self.constants or count(source.meta["val"]) > count(node.meta["val"]):
                break
            node = source
        return node

    def _codes_behind(self, node) -> fx.Node | None:
        """Return the mask or index that a node casts, scales or views, or None."""
        while node is not None and uses.codes_of(node) is None:
            node = self.source_of(node)
        return None if node is None else self.viewed(node)

    def _is_derived(self, node) -> bool:
        """Return whether the node is an affine function of another root, perhaps masked by roots."""
        if uses.codes_of(node) is not None:
            return False
        while (source := self.source_beside_roots(node)) is not None:
            if source in self.roots:
                return True
            node = source
        return False

    def _is_derivative(self, node) -> bool:
        """Return whether a node is a nonlinear pointwise function of one large tensor, and no result needs it."""
        if node in self.forward:
            return False
        inner, leaves = self.part([node], _is_pointwise)
        return len(leaves) == 1 and any(x.target not in uses.AFFINE for x in inner)


def _changed(graph: fx.Graph) -> set[fx.Node]:
    """Return the inputs that the model changes in place, by copy_ or in aot_eager by results, and what depends on them."""
    inputs = graph.find_nodes(op="placeholder")
    results = graph.output_node().meta.get("desc") or ()
    returned = [x.mutated_input for x in results if hasattr(x, "mutated_input")]
    found = {node for node in inputs if node.meta.get("desc") in returned}
    found |= {
        node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default
    }.intersection(inputs)
    for node in graph.nodes if found else ():
        if any(x in found for x in node.all_input_nodes):
            found.add(node)
    return found


def _is_pointwise(node) -> bool:
    return node.target in uses.POINTWISE


def _is_reduced(node) -> bool:
    """Return whether a node multiplies many elements by a statistic of them, such as a mean."""
    producer, value = (
        node.args[0] if node.target is operator.getitem else node,
        node.meta.get("val"),
    )
    if producer.target not in uses.REDUCTIONS or not isinstance(value, torch.Tensor):
        return False
    is_small = STATISTIC * count(value) <= count(producer.args[0].meta["val"])
    return is_small and _is_broadcast(node)


def _is_broadcast(node) -> bool:
    """Return whether elementwise operations combine a node, or what follows from it, with much larger tensors."""
    least, seen, todo = STATISTIC * count(node.meta["val"]), set(), [node]
    while todo and len(seen) < MOST_STEPS_OF_STATISTIC:
        for user in todo.pop().users:
            if user in seen or user.target not in uses.POINTWISE | {_AS_STRIDED}:
                continue
            seen.add(user)
            if user.target not in uses.VIEWS and count(user.meta["val"]) >= least:
                return True
            todo.append(user)
    return False


def _is_normalized(node) -> bool:
    """Return whether a node is a tensor divided by a statistic of its rows or channels."""
    while node.target in uses.VIEWS | uses.CASTS:
        node = node.all_input_nodes[0]
    inputs = node.all_input_nodes
    if (
        node.target not in (torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor)
        or len(inputs) != 2
    ):
        return False
    statistic, x = sorted(inputs, key=lambda y: count(y.meta["val"]))
    if count(statistic.meta["val"]) * STATISTIC > count(x.meta["val"]):
        return False
    origins, seen, todo = {x, *x.all_input_nodes}, set(), [statistic]
    while todo and len(seen) < MOST_STEPS_OF_STATISTIC:
        y = todo.pop()
        if y in origins and y is not statistic:
            return True
        if y not in seen:
            seen.add(y)
            todo += y.all_input_nodes
    return False


def _has_variance(node) -> bool:
    """Return whether a norm takes the variance of a node, whose backward pass uses the node itself."""
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user.target in uses.VARIANCES:
                return True
            todo += [user] if user.target in uses.VIEWS else []
    return False


def _is_small(node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return not isinstance(value, tuple | list)
    return not free_unbacked_symbols(value) and count(value) < LEAST_ELEMENTS


def is_probability(node) -> bool:
    """Return whether the node is an exponential, perhaps divided by its sum, scaled, cast or viewed."""
    while node.target in uses.AFFINE | uses.DIVISIONS and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.target in (torch.ops.aten.exp.default, torch.ops.aten._softmax.default)
