"""Read the autograd graph of a forward pass, and change how its nodes hold the tensors that they saved.

torch documents the attributes `_saved_<argument>` of autograd nodes. The attributes `_raw_saved_<argument>`, whose values
accept saved-tensor hooks, and the nodes' sequence numbers are private.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

_PREFIX = "_raw_saved_"
_COPIES = frozenset(
    f"{name}Backward0"
    for name in "ToCopy T Transpose View UnsafeView Permute Unsqueeze Squeeze Expand Slice Select Alias Clone".split()
)
"""Names of the autograd nodes between a parameter and a copy or view of it: autocast copies it in another dtype."""
_arguments = {}  # {type of a node: names of the arguments that the node saves}


class SavedArgument(NamedTuple):
    """A tensor that an autograd node of torch has saved.

    Attributes:
        node: the node.
        name: the name of the argument, such as "other".
        raw: torch's SavedTensor.
        tensor: the tensor, or None if other hooks hold it.
        is_computed: whether the tensor is a result of the node, or `is_computed` is true for it.
        meter: the `Metered` object that holds the tensor while a meter counts saved bytes, else None.
    """

    node: object
    name: str
    raw: object
    tensor: torch.Tensor | None
    is_computed: bool
    meter: Metered | None


class Metered:
    """The base class of objects that autograd holds in place of a saved tensor while a meter counts saved bytes.

    Attributes:
        tensor: the saved tensor, detached.
        is_computed: whether `is_computed` was true for it before.
    """

    tensor: torch.Tensor
    is_computed: bool

    def replace(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors in place of the saved tensor. No backward pass follows, so nothing restores it."""
        raise NotImplementedError


def next_sequence_number() -> int:
    """Return the sequence number that this thread gives to the next autograd node that it makes."""
    return torch._C._autograd._get_sequence_nr()


def nodes_since(tensors: Iterable[torch.Tensor], start: int, seen: set) -> list:
    """Return the autograd nodes behind some tensors that this thread has made since `start`.

    Args:
        tensors: the results of a computation.
        start: a sequence number. Nodes with smaller numbers, and the nodes before them, are left out.
        seen: nodes to leave out, together with the nodes before them. The nodes of the result are added to this set.
    """
    found = []
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen or node._sequence_nr() < start:
            continue
        seen.add(node)
        found.append(node)
        waiting += [before for before, _ in node.next_functions if before is not None]
    return found


def saved_by(node) -> Iterator[SavedArgument]:
    """Yield the tensors that an autograd node has saved. A list of tensors yields each of its members."""
    kind = type(node)
    if kind not in _arguments:
        names = [name for name in dir(kind) if name.startswith(_PREFIX)]
        _arguments[kind] = [name.removeprefix(_PREFIX) for name in names]
    for name in _arguments[kind]:
        try:
            saved = getattr(node, _PREFIX + name)
        except RuntimeError:  # a backward pass has freed the node's tensors
            return
        for raw in saved if isinstance(saved, tuple | list) else (saved,):
            data = getattr(raw, "data", None)
            has_hooks = getattr(raw, "unpack_hook", None) is not None
            if isinstance(data, torch.Tensor) and not has_hooks:
                is_own = name.startswith("result")  # torch saves a node's own results detached
                yield SavedArgument(node, name, raw, data, is_own or is_computed(data), None)
            elif isinstance(data, Metered):
                is_own = name.startswith("result")
                yield SavedArgument(node, name, raw, data.tensor, is_own or data.is_computed, data)
            elif data is not None:
                yield SavedArgument(node, name, raw, None, False, None)


def is_computed(x: torch.Tensor) -> bool:
    """Return whether x needs a gradient, and is neither a leaf, such as a parameter, nor a copy or view of a leaf."""
    return not (x.grad_fn is None or _leads_to_leaf(x.grad_fn))


def ends_at_leaves(node) -> bool:
    """Return whether the gradients that a node computes are those of leaves, or of copies and views of leaves."""
    return all(before is None or _leads_to_leaf(before) for before, _ in node.next_functions)


def _leads_to_leaf(node) -> bool:
    while node.name() in _COPIES and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return hasattr(node, "variable")
