"""Helpers for the graphs that torch.compile traces."""

from __future__ import annotations

import re

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fewbit.compiler.symbolic_sizes import count

_STACKS = "nn_module_stack", "fwd_nn_module_stack"
_ORIGIN = *_STACKS, "stack_trace", "seq_nr", "original_aten"
MODULES = "fewbit_modules"
"""The entry of a node's meta that has the paths of the modules whose nodes it replaces."""
_RECOMPUTED = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE


def backward_nodes(graph: fx.Graph) -> dict[fx.Node, None]:
    """Return the nodes that depend on tangents, the gradients of results, in order."""
    found = {}
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in node.target
        depends = is_tangent or any(x in found for x in node.all_input_nodes)
        if depends and node.op != "output":
            found[node] = None
    return found


def insert(
    graph: fx.Graph, mode, target, args, kwargs=None, like: fx.Node | None = None
) -> fx.Node:
    """Insert a call at the graph's insertion point, as work for the node `like`, and compute its fake result."""
    node = graph.call_function(target, tuple(args), kwargs or {})
    values = fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    with mode:
        node.meta["val"] = target(*values[0], **values[1])
    if like is not None:
        node.meta |= origin(like)
    return node


def is_floating(node: fx.Node) -> bool:
    """Return whether a node is a tensor of real floating-point numbers."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def is_recomputed(node: fx.Node) -> bool:
    """Return whether a region of torch.utils.checkpoint computes a node again."""
    return node.meta.get("recompute") in _RECOMPUTED


def is_from_fewbit(node: fx.Node) -> bool:
    """Return whether a node calls an op of fewbit."""
    return getattr(node.target, "namespace", "") == "fewbit"


def size_in_bytes(node: fx.Node) -> int:
    """Return the bytes of a tensor, by hints."""
    return count(node.meta["val"]) * node.meta["val"].element_size()


def origin(node: fx.Node) -> dict:
    """Return what a node's meta says of the code from which it was traced."""
    return {name: node.meta[name] for name in _ORIGIN if name in node.meta}


def modules_of(node: fx.Node) -> set[str]:
    """Return the paths of the modules to which a node of the backward pass belongs."""
    return node.meta.get(MODULES) or {module_of(node)}


def module_of(node: fx.Node) -> str:
    """Return the dotted path of the module in whose code a node was traced, or ""."""
    stack = _stack_of(node)
    return _plain([*stack.values()][-1][0]) if stack else ""


def has_module(node: fx.Node) -> bool:
    """Return whether the module in whose code a node was traced is known, unlike those of sums of gradients."""
    return bool(_stack_of(node))


def _stack_of(node: fx.Node) -> dict | None:
    return node.meta.get(_STACKS[0]) or node.meta.get(_STACKS[1])


def _plain(path: str) -> str:
    """Return a module's dotted path for Dynamo's expression, such as L['self'].blocks[0].fc."""
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    path = re.sub(r"\._modules\['(\w+)'\]", r".\1", path)
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    return path.strip(".")
