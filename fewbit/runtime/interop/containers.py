"""Tensors in what models take and return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import torch
from torch.utils._pytree import tree_leaves


def tensors_in(structure) -> list[torch.Tensor]:
    """The tensors of nested containers, mappings and dataclasses, which may refer to each other in circles."""
    found, waiting = [], [structure]
    entered = {}  # {id: container}, held so that no other has its id
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif id(each) not in entered:
            entered[id(each)] = each
            waiting += reversed(_parts(each))
    return found


def _parts(container) -> list:
    """What lies directly within; of anything else than a container nothing but itself."""
    if isinstance(container, Mapping):
        return list(container.values())
    if isinstance(container, set):
        return list(container)
    if is_dataclass(container) and not isinstance(container, type):
        return [getattr(container, each.name, None) for each in fields(container)]
    is_root = iter([True])
    return tree_leaves(container, is_leaf=lambda _: not next(is_root, False))
