"""Read the autograd graph of a forward pass, and change how its nodes hold saved tensors, by their private attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

_PREFIX = "_raw_saved_"
COPIES = frozenset(
    f"{name}Backward0"
    for name in "ToCopy T Transpose View UnsafeView Permute Unsqueeze Squeeze Expand Slice Select Alias Clone".split()
)
"""Names of nodes that make a copy or view of a parameter, such as that in another dtype under autocast."""
_LEADS_TO_LEAF = "fewbit_leads_to_leaf"
_arguments = {}  # {type of a node: names of the arguments that the node saves}


class SavedArgument(NamedTuple):
    """A tensor that an autograd node of torch has saved.

    Attributes:
        name: the name of the argument, such as "other"; "tensors" for all tensors of an autograd Function.
        number: the position of the tensor among the tensors of this name.
        raw: torch's SavedTensor.
        tensor: the tensor, or None if other hooks hold it.
        needs_grad: whether the tensor is a result of the node, or needs a gradient.
        is_computed: whether the tensor is a result of the node, or `is_computed` is true for it.
        meter: the `Metered` object that holds the tensor, if any.
    """

    node: object
    name: str
    number: int
    raw: object
    tensor: torch.Tensor | None
    needs_grad: bool
    is_computed: bool
    meter: Metered | None


class Metered:
    """The base of objects that autograd holds in place of a saved tensor while a meter counts saved bytes.

    `tensor` is detached; `needs_grad` and `is_computed` are what was true for the saved one.
    """

    tensor: torch.Tensor
    needs_grad: bool
    is_computed: bool

    def replace(self, tensors: Iterable[torch.Tensor], restore: Callable) -> None:
        """Hold the tensors of a copy in place of the saved tensor, which `restore(_)` computes again."""
        raise NotImplementedError


def next_sequence_number() -> int:
    """Return the sequence number of the next autograd node of this thread."""
    return torch._C._autograd._get_sequence_nr()


def nodes_of(tensors: Iterable[torch.Tensor]) -> list:
    """Return the autograd nodes that made these tensors."""
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


def nodes_since(nodes: Iterable, start: int, seen: set) -> tuple[list, list]:
    """Return (nodes that this thread made since `start`, behind the given ones; earlier nodes to which these lead directly).

    Nodes in `seen`, to which those that are found are added, and nodes before them are left out.
    """
    found, earlier, waiting = [], [], [*nodes]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        if node._sequence_nr() < start:
            earlier.append(node)
            continue
        seen.add(node)
        found.append(node)
        waiting += [before for before, _ in node.next_functions if before is not None]
    return found, earlier


def function_of(node) -> type | None:
    """Return the autograd Function that has made a node; None for nodes of torch's operations."""
    return getattr(type(node), "_forward_cls", None)


def count_of_saved(node) -> int | None:
    """Return the number of tensors that an autograd Function has saved, with those that are None; None if they are freed."""
    try:
        return len(node._raw_saved_tensors)
    except RuntimeError:
        return None


def saved_by(node) -> Iterator[SavedArgument]:
    """Yield the tensors that an autograd node has saved, and each member of a list, except tensors changed in place since."""
    kind = type(node)
    if kind not in _arguments:
        names = [name for name in dir(kind) if name.startswith(_PREFIX)]
        _arguments[kind] = [name.removeprefix(_PREFIX) for name in names]
    for name in _arguments[kind]:
        try:
            saved = getattr(node, _PREFIX + name)
        except RuntimeError:  # a backward pass has freed the node's tensors
            return
        members = saved if isinstance(saved, tuple | list) else (saved,)
        if was_changed(node, name, members):
            continue
        for number, raw in enumerate(members):
            data = getattr(raw, "data", None)
            has_hooks = getattr(raw, "unpack_hook", None) is not None
            is_own = name.startswith("result")  # torch saves a node's own results detached
            if isinstance(data, torch.Tensor) and not has_hooks:
                facts = data, is_own or data.requires_grad, is_own or is_computed(data), None
            elif isinstance(data, Metered):
                facts = data.tensor, is_own or data.needs_grad, is_own or data.is_computed, data
            elif data is not None:
                facts = None, False, False, None
            else:
                continue
            yield SavedArgument(node, name, number, raw, *facts)


def was_changed(node, name: str, members) -> bool:
    """Return whether a saved tensor was changed in place or freed. `members` are torch's SavedTensors of the argument."""
    if any(getattr(raw, "unpack_hook", None) is not None for raw in members):
        return False  # to read it would call the hook
    try:
        # Nodes of autograd Functions have no "_saved_tensors".
        getattr(node, "saved_tensors" if name == "tensors" else f"_saved_{name}", None)
    except RuntimeError:
        return True
    return False


def is_computed(x: torch.Tensor) -> bool:
    """Return whether x needs a gradient, and is neither a leaf nor a copy or view of a leaf."""
    return not (x.grad_fn is None or _leads_to_leaf(x.grad_fn))


def ends_at_leaves(node) -> bool:
    """Return whether the gradients that a node computes are those of leaves, or of copies and views of leaves."""
    return all(before is None or _leads_to_leaf(before) for before, _ in node.next_functions)


def _leads_to_leaf(node) -> bool:
    passed = []
    while node.name() in COPIES and node.next_functions[0][0] is not None:
        if _LEADS_TO_LEAF in node.metadata:
            answer = node.metadata[_LEADS_TO_LEAF]
            break
        passed.append(node)
        node = node.next_functions[0][0]
    else:
        answer = hasattr(node, "variable")
    for each in passed:
        each.metadata[_LEADS_TO_LEAF] = answer
    return answer
