"""A model of a few modules whose forward is given as a function, ways to copy a model, and the graph of a result."""

import copy
import io
import pickle

import torch
from torch import nn


class Composed(nn.Module):
    """A module with submodules and parameters, and a forward that takes the module and its inputs."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.of = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.of(self, *inputs)


def saved_and_loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
}
"""{name: a function that returns an independent copy of a model}."""


def names_of_nodes(y) -> set[str]:
    """Return the names of the nodes of the autograd graph that made y."""
    found, left = set(), [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            found.add(node.name())
            left += [before for before, _ in node.next_functions]
    return found
