"""Find the tensors in a model's arguments and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import torch
from torch.utils._pytree import tree_leaves


def tensors_in(structure) -> list[torch.Tensor]:
    """Return the tensors in nested containers, mappings and dataclasses, which may refer to each other in circles."""
    found, waiting = [], [structure]
    entered = {}  # {id: container}; an object that is kept alive keeps its id
    while waiting:
        part = waiting.pop()
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif id(part) not in entered:
            entered[id(part)] = part
            waiting += reversed(_parts(part))
    return found


def _parts(container) -> list:
    """Return the direct members of a container, or [container] if the argument is no container."""
    if isinstance(container, Mapping):
        return list(container.values())
    if isinstance(container, set):
        return list(container)
    if is_dataclass(container) and not isinstance(container, type):
        return [getattr(container, member.name, None) for member in fields(container)]
    is_root = iter([True])
    return tree_leaves(container, is_leaf=lambda _: not next(is_root, False))
