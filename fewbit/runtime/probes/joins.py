"""The forks and joins of an autograd graph, between which gradients separate and come together with correlated noise."""

from __future__ import annotations


def joins_of(below: list[list[int]]) -> list[frozenset[int] | None]:
    """Return, for each fork, the nodes where the gradient has come together again; None for other nodes.

    A fork is a node that every path to any node below it passes, and that has an edge to a node for which this is not
    so. Its joins are the nearest nodes below for which it is so again. `below` has the nodes, all later ones, below
    each.
    """
    is_passed = _passed_by_all(below)
    joins: list[frozenset[int]] = []
    for children in below:
        joins.append(frozenset().union(*({c} if is_passed[c] else joins[c] for c in children)))
    return [
        joins[number] if is_passed[number] and not all(is_passed[c] for c in children) else None
        for number, children in enumerate(below)
    ]


def _passed_by_all(below: list[list[int]]) -> list[bool]:
    """Return whether each node dominates all nodes below it.

    The algorithm is that of Cooper, Harvey and Kennedy, A Simple, Fast Dominance Algorithm (2001).
    """
    count = len(below)
    above: list[list[int]] = [[] for _ in range(count)]
    for number, children in enumerate(below):
        for child in set(children):
            above[child].append(number)
    dominator, depth = [count] * count, [0] * (count + 1)
    for number in reversed(range(count)):
        # `count` stands for what is above all nodes.
        found = above[number][0] if above[number] else count
        for other in above[number][1:]:
            while found != other:
                if depth[found] < depth[other]:
                    found, other = other, found
                found = dominator[found]
        dominator[number], depth[number] = found, depth[found] + 1
    descendants, dominated = [0] * count, [0] * (count + 1)  # sets of nodes, as bits
    for number, children in enumerate(below):
        for child in children:
            descendants[number] |= descendants[child] | 1 << child
        dominated[dominator[number]] |= dominated[number] | 1 << number
    return [a == b for a, b in zip(descendants, dominated, strict=False)]
