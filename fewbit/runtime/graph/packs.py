"""Packs: small tensors that autograd nodes, as those of a recurrent layer's steps, have saved, and that are quantized together.

Single copies would cost a kernel call and one of the allocator's smallest blocks each. The tensors of a pack have the
same rule, dtype and shape except in dimension 0, along which they are concatenated. Tensors of fewer than
`LEAST_ELEMENTS` stay exact, those of more than `MOST_ELEMENTS` are quantized alone, and a pack is full with
`PACK_ELEMENTS`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fewbit.runtime.format import layout
from fewbit.runtime.graph.rules import Rule
from fewbit.runtime.interop.autograd_graph import SavedArgument, was_changed
from fewbit.runtime.interop.cuda_streams import hold_for_stream, stream_of
from fewbit.runtime.quantizers.spec import SavedTensors
from fewbit.runtime.saved.sharing import address_of

LEAST_ELEMENTS = 16
MOST_ELEMENTS = 1 << 13
PACK_ELEMENTS = 1 << 16


class Member(NamedTuple):
    """A tensor of a pack.

    Attributes:
        tensor: the saved tensor with its dimensions in storage order.
        order: the permutation that brings the dimensions back; None if they are in order.
    """

    argument: SavedArgument
    tensor: torch.Tensor
    order: tuple[int, ...] | None


class Pack:
    """Saved tensors that are to be quantized together, by one rule and one `GraphSettings`."""

    def __init__(self, rule: Rule, settings):
        self.rule, self.settings = rule, settings
        self.arguments: list[SavedArgument] = []
        self._size = 0

    def add(self, argument: SavedArgument) -> None:
        self.arguments.append(argument)
        self._size += argument.tensor.numel()

    @property
    def is_full(self) -> bool:
        return self._size >= PACK_ELEMENTS

    def count(self, exact: set[int]) -> int:
        return sum(x.tensor.numel() for x in self.arguments if address_of(x.tensor) not in exact)

    def members(self, exact: set[int]) -> list[Member]:
        """Return the tensors to quantize: without storages in `exact`, and without tensors changed in place or freed since."""
        members = []
        for argument in self.arguments:
            x = argument.tensor.detach()
            if address_of(x) in exact or was_changed(argument.node, argument.name, (argument.raw,)):
                continue
            order = layout.storage_permutation(x)
            if order is None:
                members.append(Member(argument, x, None))
            else:
                back = tuple(order.index(dim) for dim in range(x.dim()))
                members.append(Member(argument, x.permute(order), back))
        return members


class PackedCopy:
    """The copy of `count` concatenated members, from which they are restored in the backward pass.

    All members are restored when the first is needed, and are freed after each was needed once.
    """

    def __init__(self, copy: SavedTensors, count: int):
        self._copy, self._count = copy, count
        self._values, self._left = None, 0

    def member(self, start: int, end: int, order: tuple[int, ...] | None) -> torch.Tensor:
        values = self._values
        if values is None:
            values = self._values = dequantized(self._copy)
            self._left = self._count
        self._left -= 1
        if self._left <= 0:
            self._values = None
        hold_for_stream((values,))
        rows = values[start:end]
        return rows if order is None else rows.permute(order)


def dequantized(copy: SavedTensors) -> torch.Tensor:
    """Return the values of a copy in the stream of the backward pass."""
    hold_for_stream(copy.tensors)
    return copy.spec.dequantize(copy.tensors)


def key_of(x: torch.Tensor, rule: Rule, settings: int) -> tuple:
    """Return what the tensors of one pack have in common; `settings` is an id."""
    order = layout.storage_permutation(x)
    shape = x.shape if order is None else [x.shape[dim] for dim in order]
    return rule, settings, tuple(shape[1:]), order, x.dtype, x.device, stream_of(x)
