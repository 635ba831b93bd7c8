"""Changes of a joint graph that change its results by rounding only and let more tensors be quantized.

Backward passes divide by tensors of the forward pass, and multiply the same gradient by several of them. A copy of a
divisor would make the gradient wrong in expectation. Copies of two factors have twice the bytes of a copy of their
product, and if one factor is large where the other is small, as in the derivative of softplus, also a larger error.
"""

from __future__ import annotations

import torch
from torch import fx

from fewbit.compiler.graphs import backward_nodes, insert

aten = torch.ops.aten
_DIVIDE, _MULTIPLY = aten.div.Tensor, aten.mul.Tensor


def simplify(graph: fx.Graph) -> None:
    """Replace t / d by t * (1 / d), and (t * a) * b by t * (a * b), if t depends on tangents and a, b and d do not."""
    backward = set(backward_nodes(graph))
    for node in [node for node in graph.nodes if node in backward]:
        if node.target is _DIVIDE and _is_free(node.args[1], backward):
            node = _multiplied(graph, node)
            backward.add(node)
        if node.target is _MULTIPLY:
            _reassociate(graph, node, backward)


def _is_free(x, backward) -> bool:
    return isinstance(x, fx.Node) and isinstance(x.meta["val"], torch.Tensor) and x not in backward


def _multiplied(graph, node) -> fx.Node:
    gradient, divisor = node.args
    with graph.inserting_before(node):
        mode = node.meta["val"].fake_mode
        reciprocal = insert(graph, mode, aten.reciprocal.default, (divisor,), like=node)
        product = insert(graph, mode, _MULTIPLY, (gradient, reciprocal), like=node)
    node.replace_all_uses_with(product)
    graph.erase_node(node)
    return product


def _reassociate(graph, node, backward) -> None:
    inner, factor = _split(node, backward)
    if inner is None or inner.target is not _MULTIPLY or len(inner.users) != 1:
        return
    gradient, other = _split(inner, backward)
    values = [x.meta["val"] for x in (node, inner, factor, other) if x is not None]
    if gradient is None or any(
        x.shape != values[0].shape or x.dtype != values[0].dtype for x in values
    ):
        return
    with graph.inserting_before(node):
        mode = node.meta["val"].fake_mode
        product = insert(graph, mode, _MULTIPLY, (other, factor), like=node)
    node.args = gradient, product


def _split(node, backward):
    """Return (factor that depends on tangents, factor that does not); (None, None) if the product has not one of each."""
    for gradient, factor in (node.args, node.args[::-1]):
        if gradient in backward and _is_free(factor, backward):
            return gradient, factor
    return None, None
