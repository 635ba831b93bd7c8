"""The nodes of the autograd graph that a backward pass may reach, in an order for a probe."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch

from fewbit.runtime.probes.variances import NOTHING, PARAMETER

MOST_EARLIER = 1024
"""The most nodes older than the forward pass that are followed."""


def bottom_up(roots: Iterable, start: int) -> Iterator:
    """Yield the nodes that can be reached from `roots`, without leaves, each after all nodes below it.

    Of nodes older than number `start`, only the nearest MOST_EARLIER are included.
    """
    roots = list(roots)
    reached, entered = _reached(roots, start), set()
    waiting = [(node, False) for node in roots if node in reached]
    while waiting:
        node, is_below_done = waiting.pop()
        if is_below_done:
            yield node
        elif node not in entered:
            entered.add(node)
            waiting.append((node, True))
            waiting += [(child, False) for child, _ in node.next_functions if child in reached]


def _reached(roots, start) -> set:
    reached, waiting, earlier = set(), deque(roots), 0
    while waiting:
        node = waiting.popleft()
        if node in reached:
            continue
        if node._sequence_nr() < start:
            earlier += 1
            if earlier > MOST_EARLIER:
                continue
        reached.add(node)
        below = (child for child, _ in node.next_functions if child is not None)
        waiting += [child for child in below if not _is_leaf(child)]
    return reached


def number_below(node, numbers: dict) -> int:
    """Return the number of a node below an edge, or PARAMETER or NOTHING."""
    if _is_leaf(node):
        return PARAMETER if isinstance(node.variable, torch.nn.Parameter) else NOTHING
    return numbers.get(node, NOTHING)


def is_function(node) -> bool:
    """Return whether a node is a torch.autograd.Function."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _is_leaf(node) -> bool:
    return not is_function(node) and hasattr(node, "variable")
