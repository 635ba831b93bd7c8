"""Products of one gradient with several saved tensors become products with a single saved tensor.

If t depends on tangents, and a and b do not, (t * a) * b is t * (a * b), and t * a + t * b is t * (a + b): a copy of one factor
replaces those of a and b.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import fx

from fewbit.compiler import uses
from fewbit.compiler.graphs import (
    MODULES,
    backward_nodes,
    has_module,
    insert,
    is_floating,
    is_recomputed,
    modules_of,
)
from fewbit.compiler.symbolic_sizes import count, is_same
from fewbit.runtime.format.groups import LEAST_ELEMENTS

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_MULTIPLY, _DIVIDE, _NEGATE = aten.mul.Tensor, aten.div.Tensor, aten.neg.default
_SIGNS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}
_BITS = 3
"""The bits per element of a copy, in the comparison of bytes. A mask has 1."""


class Multiple(NamedTuple):
    """A backward node as the elementwise product gradient * number * factor.

    The factor has the gradient's shape and does not depend on tangents; None stands for 1.
    """

    gradient: fx.Node
    number: float = 1
    factor: fx.Node | None = None


def merge(graph: fx.Graph) -> None:
    """Let backward nodes multiply a gradient by one tensor instead of several, if that saves bytes."""
    merger = _Merger(graph)
    for members in merger.groups():
        merger.merge(members)
    graph.eliminate_dead_code()


class _Merger:
    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.backward = backward_nodes(graph)
        self.multiples: dict[fx.Node, Multiple] = {}
        self.sources: dict[fx.Node, fx.Node | None] = {}
        self.users: dict[fx.Node, set[fx.Node]] = {}
        self.replaced: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if node not in self.backward and node.op != "output":
                self._find_source(node)
        for node in self.backward:
            for x in node.all_input_nodes:
                if self.sources.get(x) is not None:
                    self.users.setdefault(self.sources[x], set()).add(node)

    def groups(self) -> Iterable[list[fx.Node]]:
        groups: dict[fx.Node, list[fx.Node]] = {}
        for node in self.backward:
            multiple = self._multiple_of(node)
            if multiple is not None:
                self.multiples[node] = multiple
                if multiple.factor is not None:
                    groups.setdefault(multiple.gradient, []).append(node)
        return groups.values()

    def merge(self, members: list[fx.Node]) -> None:
        """Compute each result of a group directly from the gradient, if fewer bytes are saved then."""
        inside, paid, kept = set(members), set(), set()
        for node in members:
            if inside.issuperset(node.users):
                continue
            steps = self._steps_to(node, inside - kept)
            before = self._sources_of(x for step in steps for x in step.all_input_nodes)
            after = self._sources_of([self.multiples[node].factor])
            # Other nodes use these tensors, so they are saved anyway.
            paid |= {x for x in before | after if self.users.get(x, set()) - inside}
            bits, needed = _bits(after - paid), _bits(before - paid)
            if bits < needed or (bits == needed and self._uses_twice(steps)):
                self._compute_directly(node, steps)
                paid |= after
            else:
                kept |= steps
                paid |= before
        for users in self.users.values():
            users -= inside - kept

    def _steps_to(self, node, members) -> set[fx.Node]:
        steps, todo = set(), [node]
        while todo:
            step = todo.pop()
            if step not in steps:
                steps.add(step)
                todo += [x for x in step.all_input_nodes if x in members]
        return steps

    def _uses_twice(self, steps) -> bool:
        """Return whether two steps use the same source. Products of two factors from one copy have a biased mean."""
        sources = [source for step in steps for source in self._sources_of(step.all_input_nodes)]
        return len(sources) > len(set(sources))

    def _compute_directly(self, node, steps) -> None:
        gradient, number, factor = self.multiples[node]
        gradient = self.replaced.get(gradient, gradient)
        dtype = node.meta["val"].dtype
        with self.graph.inserting_before(node):
            parts = [self._cast(x, wide(dtype), node) for x in (gradient, factor)]
            product = user = self._insert(_MULTIPLY, parts, node)
            if number != 1:
                product = self._insert(_MULTIPLY, (product, number), node)
            product = self._cast(product, dtype, node)
        node.replace_all_uses_with(product)
        self.replaced[node] = product
        if self.sources[factor] is not None:
            self.users.setdefault(self.sources[factor], set()).add(user)
        user.meta[MODULES] = {path for x in steps if has_module(x) for path in modules_of(x)}

    # -- Which tensors are saved ---------------------------------------------------------------------------------

    def _find_source(self, node) -> None:
        inputs = [x for x in node.all_input_nodes if self.sources[x] is not None]
        value = node.meta.get("val")
        is_large = isinstance(value, torch.Tensor) and count(value) >= LEAST_ELEMENTS
        if node.op == "placeholder" or (node.target in uses.POINTWISE and not inputs):
            source = None
        elif isinstance(value, torch.Tensor) and not is_large:
            source = None
        elif node.target in uses.AFFINE and len(inputs) == 1 and node.args.count(inputs[0]) == 1:
            source = self.sources[inputs[0]]
        else:
            source = node
        self.sources[node] = source

    def _sources_of(self, nodes) -> set[fx.Node]:
        return {self.sources[x] for x in nodes if self.sources.get(x) is not None}

    # -- What is a multiple of what ------------------------------------------------------------------------------

    def _multiple_of(self, node: fx.Node) -> Multiple | None:
        if node.op != "call_function" or node.kwargs or not is_floating(node):
            return None
        inputs = [self.multiples.get(x, Multiple(x)) for x in node.args if x in self.backward]
        if not inputs or not all(_has_same_shape(x.gradient, node) for x in inputs):
            return None
        if node.target in _SIGNS and len(inputs) == 2:
            first, second = inputs
            return self._sum(first, second, _SIGNS[node.target], node)
        if len(inputs) > 1:
            return None
        gradient, number, factor = inputs[0]
        if node.target is _CONVERT:
            return inputs[0]
        if node.target is _NEGATE:
            return Multiple(gradient, -number, factor)
        if node.target not in (_MULTIPLY, _DIVIDE, aten.mul.Scalar, aten.div.Scalar):
            return None
        (other,) = [x for x in node.args if x not in self.backward] or (None,)
        if isinstance(other, int | float):
            is_quotient = node.target in (_DIVIDE, aten.div.Scalar)
            return _scaled(inputs[0], other, node.args[0] is other, is_quotient)
        if node.target is not _MULTIPLY or not self._is_factor(other, node):
            return None
        if factor is not None:
            with self.graph.inserting_before(node):
                other = self._insert_factor(_MULTIPLY, (factor, other), node)
        return Multiple(gradient, number, other)

    def _sum(self, first: Multiple, second: Multiple, sign: int, node) -> Multiple | None:
        gradient = first.gradient
        second = second._replace(number=sign * second.number)
        if second.gradient is not gradient:
            return None
        if first.factor is None:
            first, second = second, first
        if first.factor is None:
            return Multiple(gradient, first.number + second.number)
        ratio = second.number / first.number if first.number else math.inf
        if not math.isfinite(ratio):
            return None
        with self.graph.inserting_before(node):
            other = ratio
            if second.factor is not None:
                other = second.factor
                if ratio != 1:
                    other = self._insert_factor(_MULTIPLY, (other, ratio), node)
            factor = self._insert_factor(aten.add.Tensor, (first.factor, other), node)
        return Multiple(gradient, first.number, factor)

    def _is_factor(self, x, node) -> bool:
        """Return whether a node may be part of a factor. Tensors that broadcast may have rows of very different sizes."""
        return isinstance(x, fx.Node) and _has_same_shape(x, node) and not is_recomputed(x)

    # -- New nodes -----------------------------------------------------------------------------------------------

    def _insert(self, target: Callable, args, like) -> fx.Node:
        return insert(self.graph, like.meta["val"].fake_mode, target, args, like=like)

    def _insert_factor(self, target: Callable, args, like) -> fx.Node:
        """Insert a part of a factor, in float32 in place of float16, because it may be large where t is small."""
        args = [
            self._cast(x, wide(x.meta["val"].dtype), like) if isinstance(x, fx.Node) else x
            for x in args
        ]
        node = self._insert(target, args, like)
        self._find_source(node)
        return node

    def _cast(self, node, dtype, like) -> fx.Node:
        if node.meta["val"].dtype == dtype:
            return node
        cast = self._insert(_CONVERT, (node, dtype), like)
        if node in self.sources:
            self.sources[cast] = self.sources[node]
        return cast


def _scaled(multiple: Multiple, other: float, is_first: bool, is_quotient: bool) -> Multiple | None:
    if is_quotient and (is_first or other == 0):
        return None
    number = multiple.number / other if is_quotient else multiple.number * other
    return multiple._replace(number=number) if math.isfinite(number) else None


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for factors of gradients: float32 in place of float16, whose range is small."""
    return torch.float32 if dtype == torch.float16 else dtype


def _bits(sources) -> int:
    return sum(count(x.meta["val"]) * (1 if uses.codes_of(x) else _BITS) for x in sources)


def _has_same_shape(x, node) -> bool:
    return is_floating(x) and is_same(x.meta["val"].shape, node.meta["val"].shape)
