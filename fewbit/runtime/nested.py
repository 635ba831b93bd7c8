"""Tensors in what models take and return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass

import torch
from torch.utils._pytree import tree_leaves


def tensors_in(structure) -> list[torch.Tensor]:
    """The tensors of nested containers, mappings and dataclasses."""
    found = []
    for leaf in tree_leaves(structure):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found += tensors_in(list(leaf.values()))
        elif isinstance(leaf, set):
            found += tensors_in(list(leaf))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in(list(vars(leaf).values()))
    return found
