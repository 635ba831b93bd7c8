"""The costs of segments, compared with exact arithmetic."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from naive import spread
from problems import PROBLEMS, tagged

from fewbit.solver.segments import Items

TOLERANCE = Fraction(1, 10**12)


def all_segments(n):
    return itertools.combinations_with_replacement(range(n + 1), 2)


def assert_cost(got, exact):
    assert abs(Fraction(float(got)) - exact) <= TOLERANCE * exact, (float(got), float(exact))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_segments_of_a_sequence(problem):
    items = Items(problem.weights, problem.values)
    segments = list(all_segments(len(items)))
    if "medium" in problem.tags:
        segments = np.random.default_rng(1).choice(segments, 60)
    for start, stop in segments:
        exact = spread(problem.values[start:stop], problem.weights[start:stop])
        assert_cost(items.cost(start, stop), exact)


@pytest.mark.parametrize("value", [0.1, 1e9 + 0.1, -1e-300])
@pytest.mark.parametrize("n", [2, 3, 16, 37])
def test_equal_values_cost_exactly_nothing(n, value):
    items = Items(np.random.default_rng(3).random(n), np.full(n, value))
    assert {items.cost(start, stop) for start, stop in all_segments(n)} == {0.0}


def test_spreads_and_offsets_of_items():
    """An item may have a spread of its own, and a value may be an anchor plus an offset."""
    items = Items([1.0, 2.0, 1.0], [0.0, 1.0, 2.0], spread=[0.5, 0.25, 0.0])
    assert (items.cost(0, 1), items.cost(1, 2)) == (0.5, 0.25)
    assert items.cost(0, 3) == pytest.approx(0.75 + 2.0, rel=1e-15)
    # These offsets would be lost if they were added to the anchor first.
    offset = 1e-9 * np.random.default_rng(4).standard_normal(20)
    items = Items(np.ones(20), np.full(20, 1e9), offset)
    assert_cost(items.cost(3, 17), spread(offset[3:17], np.ones(14)))


@pytest.mark.parametrize("problem", tagged("medium"), ids=str)
def test_compressed_runs_cost_what_their_items_cost(problem):
    rng = np.random.default_rng(5)
    n = len(problem.values)
    nodes = np.unique([0, n, *rng.integers(0, n + 1, 9)])
    runs = Items(problem.weights, problem.values).compress(nodes)
    assert len(runs) == len(nodes) - 1
    assert runs.mass.sum() == pytest.approx(problem.weights.sum(), rel=1e-12)
    for start, stop in all_segments(len(runs)):
        a, b = nodes[start], nodes[stop]
        assert_cost(runs.cost(start, stop), spread(problem.values[a:b], problem.weights[a:b]))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_means_of_segments(problem):
    n = len(problem.values)
    breaks = sorted({0, n // 3, n // 2, n})
    means = Items(problem.weights, problem.values).segment_means(breaks)
    edges = [0, *breaks, n]
    for mean, (a, b) in zip(means, itertools.pairwise(edges), strict=True):
        mass = sum(Fraction(w) for w in problem.weights[a:b].tolist())
        if mass == 0:
            assert np.isnan(mean)
            continue
        pairs = zip(problem.values[a:b].tolist(), problem.weights[a:b].tolist(), strict=True)
        exact = sum(Fraction(v) * Fraction(w) for v, w in pairs) / mass
        size = np.abs(problem.values[a:b][problem.weights[a:b] > 0]).max()
        assert abs(Fraction(float(mean)) - exact) <= Fraction(float(1e-15 * size))
