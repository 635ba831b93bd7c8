"""Forks and joins of graphs, against a search of all paths."""

import random

import pytest

from fewbit.runtime.probes.joins import joins_of

GRAPHS = [  # the nodes below each node; the joins of each
    ([[]], [None]),
    ([[], [0], [1]], [None] * 3),
    ([[], [0], [0, 1]], [None, None, frozenset({0})]),  # a residual block
    ([[], [0], [0, 1], [2], [2, 3]], [None, None, frozenset({0}), None, frozenset({2})]),
    # An edge past two blocks: no node between its ends is passed by all paths.
    ([[], [0], [0, 1], [2, 0]], [None, None, None, frozenset({0})]),
    ([[], [], [0, 1]], [None] * 3),  # two ends
    ([[], [0], [0], [1, 2], [1, 3]], [None, None, None, None, frozenset({0})]),
]


@pytest.mark.parametrize("below, expected", GRAPHS, ids=range(len(GRAPHS)))
def test_graphs(below, expected):
    found = joins_of(below)
    assert [None if each is None else frozenset(each) for each in found] == expected


def reached(below, roots, without=None) -> set:
    """Return the nodes that paths from the roots reach without passing one node."""
    seen, waiting = set(), [root for root in roots if root != without]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [child for child in below[node] if child != without]
    return seen


def naive(below):
    """Remove each node in turn: all below it must be out of reach. The joins are the next such nodes on each path."""
    count = len(below)
    roots = [n for n in range(count) if not any(n in children for children in below)]
    is_passed = []
    for node in range(count):
        descendants = reached(below, below[node])
        is_passed.append(not descendants & reached(below, roots, without=node))

    def nearest(node):
        found = set()
        for child in below[node]:
            found |= {child} if is_passed[child] else nearest(child)
        return found

    return [
        nearest(n) if is_passed[n] and not all(is_passed[c] for c in below[n]) else None
        for n in range(count)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs(seed):
    rng = random.Random(seed)
    size = rng.randint(2, 12)
    below = [
        sorted(rng.sample(range(node), min(node, rng.choice([1, 1, 1, 2, 2, 3]))))
        for node in range(size)
    ]
    found = [None if each is None else set(each) for each in joins_of(below)]
    assert found == naive(below)
