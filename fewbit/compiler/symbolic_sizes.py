"""Sizes that vary: `torch.SymInt`s in a graph that torch.compile traced for batches of several sizes.

Decisions use the *hint*, the value when the graph was traced: a comparison of the size itself would add a guard.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import (
    find_symbol_binding_fx_nodes,
    free_symbols,
    free_unbacked_symbols,
    statically_known_true,
)
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

try:
    from torch.fx.experimental.symbolic_shapes import optimization_hint
except ImportError:  # torch < 2.13
    from torch.fx.experimental.symbolic_shapes import size_hint

    # The fallback is Inductor's guess for a size that depends on values of tensors.
    optimization_hint = partial(size_hint, fallback=8192)


def hints(sizes) -> list[int]:
    """Return sizes or strides, with hints, or torch's guess, for those that vary."""
    return [optimization_hint(size) for size in sizes]


def count(value: torch.Tensor) -> int:
    """Return the number of elements of a tensor, by hints."""
    return math.prod(hints(value.shape))


def is_same(shape, other) -> bool:
    """Return whether two shapes are the same for all values of the sizes that vary."""
    return len(shape) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(shape, other, strict=True)
    )


class SizeNodes:
    """The nodes of a joint graph that compute sizes from those of the graph's inputs."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self._symbols = find_symbol_binding_fx_nodes(graph)
        self._made: dict = {}

    def knows(self, value: torch.Tensor) -> bool:
        """Return whether a tensor's sizes follow from those of the inputs, unlike those of `torch.nonzero`."""
        return not free_unbacked_symbols(value) and free_symbols(value) <= self._symbols.keys()

    def of(self, size: int | torch.SymInt) -> int | fx.Node:
        """Return a size, or a node at the graph's beginning that computes a size that varies."""
        if isinstance(size, int) or size.node.expr.is_number:
            return int(size)
        formula = size.node.expr
        if formula not in self._made:
            self._made[formula] = self._node(formula)
        return self._made[formula]

    def _node(self, formula) -> fx.Node:
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        tracer = fx.proxy.GraphAppendingTracer(self.graph)
        proxies = {symbol: fx.Proxy(node, tracer) for symbol, node in self._symbols.items()}
        last = first.prev
        with self.graph.inserting_before(first):
            result = sympy_interp(PythonReferenceAnalysis, proxies, formula).node
        while last.next is not first:
            last = last.next
            last.meta["val"] = last.target(*fx.node.map_arg(last.args, lambda x: x.meta["val"]))
        return result
