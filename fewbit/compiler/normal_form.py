"""Changes of a joint graph that change its results by rounding only and let more tensors be quantized.

Backward passes divide by tensors of the forward pass, and a copy of a divisor would make the gradient wrong in
expectation. So t / d becomes t * (1 / d), if t depends on tangents and d does not. They also multiply the same gradient by
several tensors. Copies of two factors have twice the bytes of a copy of their product, and if one factor is large where the
other is small, as in the derivative of softplus, also a larger error. `multiples` replaces the factors by one. The gradient
of x ** 2 contains x ** 1, which is x.

The backward pass of batch norm uses x - mean, whose channels may have very different sizes. A group of elements contains
several channels, so x - mean is divided by the largest magnitude of each channel, which stays exact. The backward pass of a
root-mean-square norm uses its input x, whose rows may have very different sizes. The norm has computed x / s for the root mean
square s of each row, so the backward pass uses x / s and s in place of x.
"""

from __future__ import annotations

import torch
from torch import fx

from fewbit.compiler.graphs import backward_nodes, insert
from fewbit.compiler.multiples import merge
from fewbit.compiler.sizes import count, is_same

aten = torch.ops.aten
_DIVIDE, _MULTIPLY = aten.div.Tensor, aten.mul.Tensor
_CONVERT = torch.ops.prims.convert_element_type.default
STATISTIC = 16
"""A tensor is a statistic of another if it broadcasts to at least this many times its elements."""


def simplify(graph: fx.Graph) -> None:
    """Change a joint graph as the text above says."""
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
    for node in [node for node in graph.nodes if node.target is _MULTIPLY]:
        _use_product(graph, node, backward)
    for node in [node for node in graph.nodes if node.target is aten.sub.Tensor]:
        _normalize(graph, node, backward)
    graph.eliminate_dead_code()


def _is_free(x, backward) -> bool:
    return isinstance(x, fx.Node) and isinstance(x.meta["val"], torch.Tensor) and x not in backward


def _multiply(graph, node, backward) -> None:
    """Replace a quotient by a product with the reciprocal of the divisor."""
    gradient, divisor = node.args
    value = node.meta["val"]
    with graph.inserting_before(node):
        mode = value.fake_mode
        if divisor.meta["val"].dtype != value.dtype:
            # The reciprocal of an integer would be float32, and the product would have another dtype than the quotient.
            divisor = insert(graph, mode, _CONVERT, (divisor, value.dtype), like=node)
        reciprocal = insert(graph, mode, aten.reciprocal.default, (divisor,), like=node)
        product = insert(graph, mode, _MULTIPLY, (gradient, reciprocal), like=node)
    _replace(graph, node, product, backward)


def _replace(graph, node, other, backward) -> None:
    backward.add(other)
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def _normalize(graph, node, backward) -> None:
    """Replace t * (x - c) by (t * s) * ((x - c) / s), if c is a small statistic and s the largest |x - c| beside it."""
    users = [user for user in node.users if user in backward]
    center, value = node.args[1], node.meta["val"]
    if node in backward or not users or not _is_free(center, backward):
        return
    small = center.meta["val"]
    is_statistic = small.dim() == value.dim() and 1 < count(small) * STATISTIC <= count(value)
    if not is_statistic or any(user.target is not _MULTIPLY for user in users):
        return
    dims = [dim for dim in range(value.dim()) if is_same(small.shape[dim : dim + 1], (1,))]
    steps = [
        (aten.abs.default, ()),
        (aten.amax.default, (dims, True)),
        (aten.clamp_min.default, (torch.finfo(value.dtype).tiny,)),
    ]
    scale = node
    for target, rest in steps:
        with graph.inserting_before(scale.next):
            scale = insert(graph, value.fake_mode, target, (scale, *rest), like=node)
    with graph.inserting_before(scale.next):
        inverse = insert(graph, value.fake_mode, aten.reciprocal.default, (scale,), like=node)
    with graph.inserting_before(inverse.next):
        normalized = insert(graph, value.fake_mode, _MULTIPLY, (node, inverse), like=node)
    for user in users:
        gradient, _ = _split(user, backward)
        if gradient is not None:
            _multiply_by_both(graph, user, gradient, normalized, scale, backward)


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


def _use_product(graph, node, backward) -> None:
    """Replace t * x by (t * node) / r and t * (x * k) by ((t * k) * node) / r, if node is x * r and r is rsqrt(...).

    k is a number, and r has an element for many elements of x. Another factor than rsqrt may be 0.
    """
    x, small = node.args
    if getattr(x, "target", None) is aten.rsqrt.default:
        x, small = small, x
    if node in backward or not _is_free(x, backward) or not _is_free(small, backward):
        return
    value, other, divisor = (y.meta["val"] for y in (node, x, small))
    is_alike = value.dtype == other.dtype == divisor.dtype and is_same(value.shape, other.shape)
    is_statistic = divisor.dim() == value.dim() and count(divisor) * STATISTIC <= count(value)
    is_difference = x.target is aten.sub.Tensor  # `_normalize` serves it
    is_root = small.target is aten.rsqrt.default
    if not is_root or not is_alike or not is_statistic or is_difference:
        return
    factors = {x: None} | {
        y: y.args[1]
        for y in x.users
        if y.target in (_MULTIPLY, aten.mul.Scalar) and not isinstance(y.args[1], fx.Node)
    }
    users = [
        (user, factor)
        for factor in factors
        for user in factor.users
        if user in backward and user.target is _MULTIPLY and node < user
    ]
    if users:
        with graph.inserting_before(small.next):
            scale = insert(graph, value.fake_mode, aten.reciprocal.default, (small,), like=node)
    for user, factor in users:
        gradient, _ = _split(user, backward)
        number = factors[factor]
        if gradient is None or gradient.meta["val"].dtype != value.dtype:
            continue
        if number is not None:
            with graph.inserting_before(user):
                gradient = insert(graph, value.fake_mode, _MULTIPLY, (gradient, number), like=user)
            backward.add(gradient)
        _multiply_by_both(graph, user, gradient, node, scale, backward)


def _split(node, backward):
    """Return (factor that depends on tangents, factor that does not); (None, None) if the product has not one of each."""
    for gradient, factor in (node.args, node.args[::-1]):
        if gradient in backward and _is_free(factor, backward):
            return gradient, factor
    return None, None
