"""Changes of a joint graph that change its results by rounding only and let more tensors be quantized.

A copy of a divisor would make the gradient wrong in expectation, so t / d becomes t * (1 / d). The backward pass of a
norm that is written out as x / s or x * rsqrt(...) uses x, whose rows may have very different sizes, so it uses x / s
and s instead.
"""

from __future__ import annotations

import torch
from torch import fx

from fewbit.compiler.graphs import backward_nodes, insert
from fewbit.compiler.multiples import merge, wide
from fewbit.compiler.symbolic_sizes import count, is_same

aten = torch.ops.aten
_DIVIDE, _MULTIPLY = aten.div.Tensor, aten.mul.Tensor
_CONVERT = torch.ops.prims.convert_element_type.default
STATISTIC = 16
"""A tensor is a statistic of another if it broadcasts to at least this many times its elements."""


_RESHAPES = aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.view.default
"""Ops that change the shape, and not the order of elements."""


def undo_reshapes(graph: fx.Graph) -> None:
    """Replace nodes that restore the shape that a tensor had."""
    for node in graph.nodes:
        source = node
        while source.target in _RESHAPES:
            source = source.args[0]
            if is_same(source.meta["val"].shape, node.meta["val"].shape):
                node.replace_all_uses_with(source)
                break


def simplify(graph: fx.Graph) -> None:
    """Change a joint graph as the module's docstring says; x ** 1, as in the gradient of x ** 2, becomes x."""
    for node in graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar):
        x = node.args[0]
        is_alike = node.args[1] == 1 and node.meta["val"].dtype == x.meta["val"].dtype
        if is_alike and graph.output_node() not in node.users:
            node.replace_all_uses_with(x)
    backward = set(backward_nodes(graph))
    for node in [node for node in graph.nodes if node in backward]:
        if node.target is _DIVIDE and _is_free(node.args[1], backward):
            _multiply(graph, node, backward)
    merge(graph)
    backward = set(backward_nodes(graph))
    for node in [node for node in graph.nodes if node.target in (_MULTIPLY, _DIVIDE)]:
        _use_normalized(graph, node, backward)
    graph.eliminate_dead_code()


def _is_free(x, backward) -> bool:
    return isinstance(x, fx.Node) and isinstance(x.meta["val"], torch.Tensor) and x not in backward


def _multiply(graph, node, backward) -> None:
    value = node.meta["val"]
    # The reciprocal of a float16 number may be infinite. That of an integer would be float32.
    dtype = wide(value.dtype)
    with graph.inserting_before(node):
        mode = value.fake_mode
        gradient, divisor = (
            x
            if x.meta["val"].dtype == dtype
            else insert(graph, mode, _CONVERT, (x, dtype), like=node)
            for x in node.args
        )
        reciprocal = insert(graph, mode, aten.reciprocal.default, (divisor,), like=node)
        product = insert(graph, mode, _MULTIPLY, (gradient, reciprocal), like=node)
        if dtype != value.dtype:
            backward |= {gradient, product}
            product = insert(graph, mode, _CONVERT, (product, value.dtype), like=node)
    _replace(graph, node, product, backward)


def _replace(graph, node, other, backward) -> None:
    backward.add(other)
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def _multiply_by_both(graph, user, gradient, normalized, scale, backward) -> None:
    """Replace a node by the product of a gradient, a normalized tensor and its scale, which has fewer elements."""
    mode = normalized.meta["val"].fake_mode
    is_large = count(gradient.meta["val"]) == count(normalized.meta["val"])
    first, second = (normalized, scale) if is_large else (scale, normalized)
    with graph.inserting_before(user):
        product = insert(graph, mode, _MULTIPLY, (gradient, first), like=user)
        result = insert(graph, mode, _MULTIPLY, (product, second), like=user)
    backward.add(product)
    _replace(graph, user, result, backward)


def _use_normalized(graph, node, backward) -> None:
    """Let products with a gradient use node = x * r or node = x / s in place of x, if r or s is a statistic of rows.

    t * x becomes (t * node) / r, t * (x * k) becomes ((t * k) * node) / r, and t * (node / s) becomes (t * node) * (1 / s).
    """
    value = node.meta["val"]
    x, small = _factors(node)
    if small is None or node in backward or any(not _is_free(y, backward) for y in (x, small)):
        return
    other, divisor = x.meta["val"], small.meta["val"]
    is_alike = value.dtype == other.dtype == divisor.dtype and is_same(value.shape, other.shape)
    is_statistic = divisor.dim() == value.dim() and count(divisor) * STATISTIC <= count(value)
    if not is_alike or not is_statistic:
        return
    is_quotient = node.target is _DIVIDE
    if is_quotient and x.target is _DIVIDE and x.args[1] is node.args[1]:
        return  # node is a quotient (x / s) / s, and products use x / s in place of it
    factors = _multiples(x)
    quotients = [y for y in node.users if is_quotient and y.args == (node, node.args[1])]
    # If s is infinite or r is 0, the node is 0, and 0 * inf would be NaN.
    info, finite = torch.finfo(value.dtype), small
    least = -info.max if is_quotient else info.tiny
    for target, limit in (aten.clamp_min.default, least), (aten.clamp_max.default, info.max):
        with graph.inserting_before(finite.next):
            finite = insert(graph, value.fake_mode, target, (finite, limit), like=node)
    with graph.inserting_before(finite.next):
        inverse = insert(graph, value.fake_mode, aten.reciprocal.default, (finite,), like=node)
    scale = finite if is_quotient else inverse
    for factor, number, beside in [
        *((y, k, scale) for y, k in factors.items()),
        *((y, None, inverse) for y in quotients),
    ]:
        for user in [*factor.users]:
            gradient, _ = _split(user, backward) if user.target is _MULTIPLY else (None, None)
            if gradient is None or gradient.meta["val"].dtype != value.dtype or user < node:
                continue
            if number is not None:
                with graph.inserting_before(user):
                    gradient = insert(
                        graph, value.fake_mode, _MULTIPLY, (gradient, number), like=user
                    )
                backward.add(gradient)
            _multiply_by_both(graph, user, gradient, node, beside, backward)


def _factors(node) -> tuple[fx.Node | None, fx.Node | None]:
    """Return (x, r) of x * r, where r is rsqrt(...) because another factor may be 0, or (x, s) of x / s; or two Nones."""
    x, small = node.args
    if node.target is _MULTIPLY:
        if getattr(x, "target", None) is aten.rsqrt.default:
            x, small = small, x
        return (x, small) if getattr(small, "target", None) is aten.rsqrt.default else (None, None)
    if getattr(small, "target", None) is aten.expand.default:
        small = small.args[0]
    return (x, small) if isinstance(small, fx.Node) else (None, None)


def _multiples(x) -> dict[fx.Node, float | None]:
    return {x: None} | {
        y: y.args[1]
        for y in x.users
        if y.target in (_MULTIPLY, aten.mul.Scalar) and not isinstance(y.args[1], fx.Node)
    }


def _split(node, backward):
    """Return (factor that depends on tangents, factor that does not), or two Nones."""
    for gradient, factor in (node.args, node.args[::-1]):
        if gradient in backward and _is_free(factor, backward):
            return gradient, factor
    return None, None
