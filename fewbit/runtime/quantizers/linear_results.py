"""Tensors that are computed again from the inputs of linear layers, with the setting `recompute_linear`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fewbit.runtime.quantizers.copies import unquantized
from fewbit.runtime.quantizers.spec import SavedTensors, computed_from

MOST_LAYERS = 3
"""The largest number of linear layers that are computed again for one tensor."""
MOST_OPERATIONS = 32
"""The largest number of operations that are computed again for one tensor."""
_aten = torch.ops.aten


def traced(x: Tensor, find: Callable) -> SavedTensors | None:
    """Return what computes x again; None if an operation between x and the linear layers is not known.

    `find` returns SavedTensors of the result of a linear layer's node in autograd's graph, and None for other nodes.
    """
    walk = _Walk(find)
    value = None if x.grad_fn is None else walk.visit(x.grad_fn)
    if value is None or walk.layers > MOST_LAYERS:
        return None
    if not walk.steps:  # x itself is the result of a linear layer
        return walk.sources[value]
    # The graph does not know of changes in place without gradients. Views have the version of a linear layer's result.
    if x._version and not all(name in _VIEWS for name, *_ in walk.steps):
        return None
    return computed_from(partial(_run, walk.steps), walk.sources, x.dtype)


class _Walk:
    """A walk through autograd's graph. The number i stands for `sources[i]`, and ~i for the result of `steps[i]`.

    Attributes:
        sources: the results of linear layers and the constants, `SavedTensors`.
        layers: the number of linear layers.
        steps: tuples (name in `_OPERATIONS`, arguments, numbers of the operands).
    """

    def __init__(self, find):
        self._find = find
        self._numbers, self._visits = {}, 0
        self.sources, self.layers, self.steps = [], 0, []

    def visit(self, node) -> int | None:
        if node not in self._numbers:
            saved = self._find(node)
            self.layers += saved is not None
            self._numbers[node] = self._step(node) if saved is None else self._source(saved)
        return self._numbers[node]

    def _step(self, node) -> int | None:
        read = _READERS.get(type(node).__name__)
        self._visits += 1
        if read is None or self._visits > MOST_OPERATIONS:
            return None
        nodes = [before for before, _ in node.next_functions]
        operands = [self.visit(before) for before in nodes if before is not None]
        if not operands or None in operands:
            return None
        # Saved tensors are read last, because hooks may have to restore them.
        step = read(node)
        if step is None:
            return None
        name, arguments, constants = step
        if len(operands) + len(constants) != len(nodes):
            return None  # an operand that needs no gradient, which the node does not save
        operands += [self._source(unquantized(x)) for x in constants]
        self.steps.append((name, arguments, operands))
        return ~(len(self.steps) - 1)

    def _source(self, saved: SavedTensors) -> int:
        self.sources.append(saved)
        return len(self.sources) - 1


def _run(steps, *sources):
    results = []
    for name, arguments, operands in steps:
        values = (sources[i] if i >= 0 else results[~i] for i in operands)
        results.append(_OPERATIONS[name](*values, *arguments))
    return results[-1]


_VIEWS = "permute", "slice", "transpose", "view"
_OPERATIONS = {
    "add": torch.add,
    "clone": torch.Tensor.contiguous,
    "cat": lambda *tensors_and_dim: torch.cat(tensors_and_dim[:-1], tensors_and_dim[-1]),
    "mul": torch.mul,
    "neg": torch.neg,
    "permute": torch.permute,
    "slice": _aten.slice.Tensor,
    "to": torch.Tensor.to,
    "transpose": torch.transpose,
    "view": lambda x, *shape: x.reshape(shape),
}


def _signed(number: int) -> int:
    """Return an integer that autograd shows as unsigned, of 64 bits."""
    return number - 2**64 if number >= 2**63 else number


def _add(node):
    return ("add", (), ()) if node._saved_alpha == 1 else None


def _mul(node):
    """Read a product with a constant, the factor that the node saves."""
    first, second = (before for before, _ in node.next_functions)
    if (first is None) == (second is None):
        return None
    try:
        constant = node._saved_other if second is None else node._saved_self
    except RuntimeError:  # it has been changed in place
        return None
    return None if constant is None else ("mul", (), (constant,))


def _slice(node):
    numbers = node._saved_dim, node._saved_start, node._saved_end, node._saved_step
    return "slice", tuple(map(_signed, numbers)), ()


def _cat(node):
    return "cat", (_signed(node._saved_dim),), ()


def _shape(node):
    return "view", tuple(node._input_metadata[0].shape), ()


def _dtype(node):
    ((before, number),) = node.next_functions
    old, new = before._input_metadata[number], node._input_metadata[0]
    return ("to", (new.dtype,), ()) if old.device == new.device else None


_READERS = {
    "AddBackward0": _add,
    "CatBackward0": _cat,
    "CloneBackward0": lambda node: ("clone", (), ()),
    "MulBackward0": _mul,
    "NegBackward0": lambda node: ("neg", (), ()),
    "PermuteBackward0": lambda node: ("permute", (tuple(map(_signed, node._saved_dims)),), ()),
    "SliceBackward0": _slice,
    "ToCopyBackward0": _dtype,
    "TransposeBackward0": lambda node: (
        "transpose",
        (_signed(node._saved_dim0), _signed(node._saved_dim1)),
        (),
    ),
    "UnsafeViewBackward0": _shape,
    "ViewBackward0": _shape,
}
"""{class of a node: function of the node that returns (name in `_OPERATIONS`, arguments, constants), or None}."""
