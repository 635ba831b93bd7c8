"""Tensors that get no copy: the backward pass computes them from copies of others (docs/decisions/0021 and 0022)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fewbit.compiler import uses
from fewbit.compiler.graphs import is_floating, is_recomputed
from fewbit.compiler.joint_graph import JointGraph, Root, is_probability
from fewbit.compiler.normal_form import STATISTIC
from fewbit.compiler.symbolic_sizes import count
from fewbit.convert.module_settings import ResolvedSettings

aten = torch.ops.aten
STEEPEST = 1.25
"""Steeper functions are not computed again: they would amplify the errors of a copy."""
LEAST_GROWTH = 5.0
"""Functions that grow by less over the points, such as tanh, would have large errors at large inputs."""
_POINTS = torch.linspace(-12, 12, 4801, dtype=torch.float64)
"""Slopes are measured here. Activations are linear or constant beyond."""
_CONSTANTS = {aten.full.default: 1, aten.scalar_tensor.default: 0}
"""{op that makes a constant: the position of its value among the arguments}."""
_PRODUCTS = {aten.mm.default, aten.addmm.default}
_LINEAR = uses.AFFINE | _PRODUCTS | {aten.cat.default}
MOST_LAYERS, MOST_OPERATIONS = 3, 32
"""The numbers of linear layers and of operations by which a tensor may follow from copies."""

Settings = Callable[[Root], ResolvedSettings | None]


def compute_again(joint: JointGraph, settings_of: Settings) -> None:
    """Replace roots by tensors from which they are computed, if these have fewer elements together."""
    for group in _groups(joint, settings_of):
        _replace(joint, group)
    place = {node: number for number, node in enumerate(joint.graph.nodes)}
    for node, root in sorted(joint.roots.items(), key=lambda item: place[item[0]]):
        settings = settings_of(root)
        is_norm = any(role == "norms" for role, _ in root.roles)
        if settings is not None and settings.recompute_linear and not (root.codes or is_norm):
            between = _between_copies(joint, node)
            if between:
                joint.again |= between
                del joint.roots[node]


# -- Functions of one tensor, and products of two of them ------------------------------------------------------


def _groups(
    joint: JointGraph, settings_of: Settings
) -> Iterable[dict[fx.Node, dict[fx.Node, float]]]:
    """Return {root: {tensor of which it is a function: growth}}, in groups without common tensors."""
    groups: list[dict[fx.Node, dict[fx.Node, float]]] = []
    for node, root in joint.roots.items():
        settings = settings_of(root)
        if root.codes or root.is_attention or root.is_probability or settings is None:
            continue
        leaves = _arguments_of(joint, node) if settings.recomputes else None
        if not leaves:
            continue
        group = {node: leaves}
        for other in [*groups]:
            if any(leaf in leaves for found in other.values() for leaf in found):
                groups.remove(other)
                group |= other
        groups.append(group)
    return groups


def _arguments_of(joint: JointGraph, node: fx.Node) -> dict[fx.Node, float] | None:
    """Return {tensor: growth} of one or two tensors whose functions have the product `node`, up to constants and masks; or None."""
    factors: dict[fx.Node, list[fx.Node]] = {}
    todo = [node]
    while todo:
        x = _without_constants(joint, todo.pop(), node)
        leaf = None if x is None else _leaf(joint, x)
        if leaf is not None:
            factors.setdefault(leaf, []).append(x)
        elif x is not None and x.target is aten.mul.Tensor:
            todo += x.args
        else:
            return None
    is_own = len(factors) == 1 and all(own == [leaf] for leaf, own in factors.items())
    if len(factors) > 2 or is_own:
        return None
    growths = {leaf: _growth(own, leaf) for leaf, own in factors.items()}
    return None if None in growths.values() else growths


def _without_constants(joint: JointGraph, node, start: fx.Node) -> fx.Node | None:
    """Return the first root, or other tensor, of which a node is an affine function, perhaps with saved masks; or None."""
    if not isinstance(node, fx.Node) or not joint.varies(node):
        return None
    while node is start or node not in joint.roots:
        if joint.source_of(node) is None:
            break
        node = joint.source_beside_roots(node)
        if node is None:
            return None
    return node


def _leaf(joint: JointGraph, node: fx.Node) -> fx.Node | None:
    """Return the forward tensor of which a node is an elementwise function."""
    _, leaves = joint.part([node], lambda x: _is_elementwise(joint, x))
    if len(leaves) != 1:
        return None
    (leaf,) = leaves
    return leaf if leaf in joint.forward and leaf.meta["val"].is_floating_point() else None


def _is_elementwise(joint: JointGraph, node: fx.Node) -> bool:
    """Return whether each element of a node is a function of one element of each input that is no number."""
    if node.op != "call_function" or node in joint.changed:
        return False
    inputs = node.all_input_nodes
    if node.target in uses.CASTS and (not is_floating(node) or node.meta["val"].itemsize == 1):
        return False  # rounding to integers or to 8 bits is steep
    if node.target in uses.VIEWS | uses.CASTS:
        return _elements(inputs[0]) == _elements(node)
    is_elementwise = node.target in uses.ELEMENTWISE
    return is_elementwise and all(joint.varies(x) or _is_number(x) for x in inputs)


def _is_number(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _CONSTANTS


def _growth(factors: list[fx.Node], leaf: fx.Node) -> float | None:
    """Return by how much a product of elementwise functions grows over the points; None if it is steep somewhere."""
    with unset_fake_temporarily():
        known = {leaf: _POINTS}
        values = math.prod(_value(x, known) for x in factors)
        slopes = (values.diff() / _POINTS.diff()).abs().nan_to_num(math.inf)
        is_moderate = slopes.max().item() <= STEEPEST
        return abs((values[-1] - values[0]).item()) if is_moderate else None


def _value(node, known: dict[fx.Node, torch.Tensor]):
    if not isinstance(node, fx.Node):
        return node
    if node not in known:
        if node.target in _CONSTANTS:
            value = torch.tensor(float(node.args[_CONSTANTS[node.target]]), dtype=torch.float64)
        elif node.target in uses.VIEWS | uses.CASTS:
            value = _value(node.args[0], known)
        else:
            value = node.target(*(_value(x, known) for x in node.args), **node.kwargs)
        known[node] = value
    return known[node]


def _replace(joint: JointGraph, group) -> None:
    role = "activations" if all(len(found) == 1 for found in group.values()) else "gates"
    modules = set().union(*(joint.roots[node].modules for node in group))
    new: dict[fx.Node, Root] = {}
    leaves = dict.fromkeys(leaf for found in group.values() for leaf in found)
    if any(max(found.get(leaf, 0) for found in group.values()) < LEAST_GROWTH for leaf in leaves):
        return
    for leaf in leaves:
        node, known = joint.viewed(leaf), joint.root_of(leaf)
        if known is not None and known.node in group:
            return
        if known is None:
            new[node] = Root(node, is_probability=is_probability(node))
        elif known.node is node:
            new[node] = known
    added = [node for node in new if node not in joint.roots]
    has_fewer = sum(map(_elements, added)) < sum(map(_elements, group))
    if has_fewer and all(_may_have_copy(joint, node, group) for node in new):
        joint.again |= _between(joint, group)
        for node in group:
            del joint.roots[node]
        for node, root in new.items():
            root.roles.add((role, 0))
            root.modules |= modules
            joint.roots[node] = root


def _elements(node: fx.Node) -> int:
    return count(node.meta["val"])


def _may_have_copy(joint: JointGraph, node: fx.Node, group) -> bool:
    is_factor = _elements(node) * STATISTIC <= min(map(_elements, group))
    return joint.sizes.knows(node.meta["val"]) and not (is_recomputed(node) or is_factor)


def _between(joint: JointGraph, group) -> set[fx.Node]:
    ends = {leaf for leaves in group.values() for leaf in leaves}
    ends |= joint.roots.keys() - group.keys()  # masks
    between, _ = joint.part(group, lambda x: x not in ends)
    return between


# -- Results of linear layers ------------------------------------------------------------------------------------


def _between_copies(joint: JointGraph, node: fx.Node) -> set[fx.Node]:
    """Return the nodes by which a root follows from copies of inputs of linear layers, none behind another."""
    found, layers, todo = set(), 0, [(node, False)]
    while todo:
        x, is_input = todo.pop()
        if x in found or not joint.varies(x) or (x in joint.roots and x is not node):
            continue
        is_layer = x.target in _PRODUCTS
        is_usable = x.target in _LINEAR or x in joint.again
        if not is_usable or x in joint.changed or is_recomputed(x) or (is_layer and is_input):
            return set()
        found.add(x)
        layers += is_layer
        inputs = [y for y in x.all_input_nodes if joint.varies(y)]
        if is_layer and len(inputs) != 1:
            return set()
        todo += [(y, is_input or is_layer) for y in inputs]
    is_bounded = layers <= MOST_LAYERS and len(found) <= MOST_OPERATIONS
    return found if layers and is_bounded else set()
