"""Marks in a training step, where the forward and the backward passes of blocks begin and end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fewbit.planning.timeline import BEGIN, END, ENTER, LEAVE


@contextmanager
def watched(blocks: Iterable[nn.Module], mark: Callable[[str, int, list], None]):
    """Call mark(kind, number of the block, input tensors) in the passes of blocks within the context, with inputs for ENTER only."""
    handles = []
    try:
        for number, block in enumerate(blocks):
            handles += _hooks(block, number, mark)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hooks(block: nn.Module, number: int, mark) -> list:
    def enter(module, args, kwargs):
        if torch._C._current_graph_task_id() != -1:
            return  # a region that is computed again
        inputs = _tensors((args, kwargs))
        mark(ENTER, number, inputs)
        for x in inputs:
            if x.requires_grad and not x.is_leaf:
                x.register_hook(lambda _: mark(END, number, []))

    def leave(module, args, output):
        if torch._C._current_graph_task_id() != -1:
            return
        mark(LEAVE, number, [])
        for y in _tensors(output):
            if y.requires_grad:
                y.register_hook(lambda _: mark(BEGIN, number, []))

    # Some layers bypass a submodule's call if the submodule has hooks that do more than watch.
    enter.only_watches = leave.only_watches = mark
    return [
        block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
        block.register_forward_hook(leave),
    ]


def _tensors(values) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.is_floating_point()]
