"""Find the tensors in a model's arguments and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import ModuleType

import torch
from torch.utils._pytree import tree_leaves


def tensors_in(structure, in_objects: bool = False) -> list[torch.Tensor]:
    """Return the tensors in nested containers, mappings and dataclasses, which may have cycles.

    With `in_objects`, attributes of other objects count too, except for modules of Python and torch.
    """
    found, waiting = [], [structure]
    entered = {}  # {id: container}; an object that is kept alive keeps its id
    while waiting:
        part = waiting.pop()
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif id(part) not in entered:
            entered[id(part)] = part
            waiting += reversed(_parts(part, in_objects))
    return found


def _parts(container, in_objects: bool) -> list:
    if type(container) in (tuple, list):
        return list(container)
    if isinstance(container, Mapping):
        return list(container.values())
    if isinstance(container, set):
        return list(container)
    if is_dataclass(container) and not isinstance(container, type):
        return [getattr(container, member.name, None) for member in fields(container)]
    is_root = iter([True])
    parts = tree_leaves(container, is_leaf=lambda _: not next(is_root, False))
    if len(parts) != 1 or parts[0] is not container:
        return parts
    return _attributes(container) if in_objects else []


def _attributes(thing) -> list:
    if isinstance(thing, (type, ModuleType, torch.nn.Module)):
        return []
    slots = [name for cls in type(thing).__mro__ for name in _slots(cls)]
    stored = [getattr(thing, name, None) for name in slots]
    return [*getattr(thing, "__dict__", {}).values(), *stored]


def _slots(cls) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
