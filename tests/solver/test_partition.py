"""The discrete optimum, compared with exhaustive searches."""

from fractions import Fraction

import numpy as np
import pytest
from naive import (
    breaks_cost,
    choice_cost,
    every_choice,
    every_contiguous,
    every_grouping,
    plain_loop,
)
from problems import LONG, PROBLEMS, long_sequence, tagged

from fewbit.errors import SolveError
from fewbit.solver import dynamic_program as layers
from fewbit.solver import partition as module
from fewbit.solver.dynamic_program import RANDOM_CHOICE, PieceCosts, run_layer
from fewbit.solver.partition import Effort, LayeredSearch, partition
from fewbit.solver.segments import Items

FORMS = ["levels", "intervals"]


def assert_cost(got, exact):
    """Check that two costs agree to 1e-9, and that an exact 0 is 0."""
    assert abs(Fraction(float(got)) - exact) <= Fraction(1, 10**9) * exact, (got, float(exact))


def arranged(problem, form):
    """Return values and weights in the order of the form: sorted for levels."""
    order = np.argsort(problem.values, kind="stable") if form == "levels" else slice(None)
    return problem.values[order], problem.weights[order]


@pytest.fixture
def always_prune(monkeypatch):
    monkeypatch.setattr(module, "_WORTH_PRUNING", 0)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("problem", tagged("small"), ids=str)
def test_against_every_partition(problem, form, count):
    every = {"levels": every_grouping, "intervals": every_contiguous}[form]
    found = partition(problem.values, count, problem.weights, form=form)
    assert_cost(found.cost, every(problem.values, problem.weights, count))


@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("problem", tagged("medium"), ids=str)
def test_against_the_plain_loop(problem, form, prune, always_prune):
    values, weights = arranged(problem, form)
    for count in (2, 5):
        found = partition(problem.values, count, problem.weights, form=form, prune=prune)
        assert_cost(found.cost, plain_loop(values, weights, count))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_breaks_and_means_are_those_of_the_cost(problem, form):
    values, weights = arranged(problem, form)
    for count in (1, 3, len(values), len(values) + 2):
        found = partition(problem.values, count, problem.weights, form=form)
        assert found.breaks.shape == (count - 1,)
        assert (np.diff([0, *found.breaks, len(values)]) >= 0).all()
        assert_cost(found.cost, breaks_cost(values, weights, found.breaks.tolist()))
        means = Items(weights, values).segment_means(found.breaks)
        np.testing.assert_array_equal(found.means, means)
        if form == "levels":
            assert (problem.values[found.order] == values).all()
        bare = partition(problem.values, 3, form=form).cost
        assert bare == partition(problem.values, 3, np.ones(len(values)), form=form).cost


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", LONG)
def test_pruning_changes_nothing(kind, form, always_prune):
    values, weights = long_sequence(kind, 20_000 if form == "levels" else 1_200)
    for count in (2, 16):
        pruned = partition(values, count, weights, form=form, prune=True)
        plain = partition(values, count, weights, form=form, prune=False)
        assert pruned.cost == pytest.approx(plain.cost, rel=1e-11, abs=1e-300)
        assert pruned.candidates <= plain.candidates


def test_pruning_really_prunes():
    values, weights = long_sequence("noisy steps", 20_000)
    found = partition(values, 9, weights, form="intervals")
    assert found.candidates < 0.1 * 20_000 * 8


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["random", "ties", "walk"])
def test_threads_change_nothing(kind, form, monkeypatch):
    monkeypatch.setattr(layers, "_SERIAL_WORK", 0)  # start threads however little there is to do
    values, weights = long_sequence(kind, 20_000 if form == "levels" else 2_000)
    options = {"form": form, "prune": False}
    one, two = (partition(values, 6, weights, threads=threads, **options) for threads in (1, 2))
    assert one.cost == pytest.approx(two.cost, rel=1e-11, abs=1e-300)
    if kind == "random":
        assert one.breaks.tolist() == two.breaks.tolist()


@pytest.mark.parametrize("slack", [0, 1])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("problem", tagged("medium"), ids=str)
def test_the_two_searches_agree_on_sorted_values(problem, flip, slack):
    values, weights = arranged(problem, "levels")
    n = len(values)
    costs = PieceCosts(Items(weights, values))
    rng = np.random.default_rng(3)
    columns, rows = (np.flatnonzero(rng.random(n + 1) < 0.7) for _ in range(2))
    totals = rng.random(len(columns)) * costs.items.cost(0, n)
    previous = np.sort(np.where(rng.random(len(columns)) < 0.9, totals, np.inf))[::-1]
    options = {"slack": slack, "flip": n if flip else -1}
    divided, _ = run_layer(costs, columns, previous, rows, monge=True, **options)
    scanned, best = run_layer(costs, columns, previous, rows, monge=False, **options)
    for i, row in enumerate(rows):
        candidates = []
        for column, before in zip(columns, previous, strict=True):
            segment = (n - row, n - column) if flip else (column, row)
            if column <= row + slack:
                candidates.append(before + (costs.items.cost(*segment) if column < row else 0.0))
        least = min(candidates, default=np.inf)
        assert divided[i] == pytest.approx(least, rel=1e-12)
        assert scanned[i] == pytest.approx(least, rel=1e-12)
        if np.isfinite(least):
            assert candidates[best[i]] == pytest.approx(least, rel=1e-12)


def best_choice(values, weights, count, forced=(), *, monge=True):
    """Return the best levels of unbiased draws among ascending values, and their cost, by the solver's search."""
    n = len(values)
    search = LayeredSearch(
        PieceCosts(Items(weights, values), RANDOM_CHOICE, forced), monge, Effort(1)
    )
    for _ in range(count - 2):
        search.step(np.arange(n))
    search.step(np.array([n - 1]))
    chosen = sorted({0, n - 1, *search.trace(0)})
    return float(search.values[0]), values[chosen]


@pytest.mark.parametrize("monge", [True, False])
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_choice_against_every_set_of_levels(seed, count, monge):
    rng = np.random.default_rng(seed)
    values = np.unique(np.round(rng.standard_normal(11), 1))
    weights = rng.random(len(values)) * (rng.random(len(values)) < 0.8)
    cost, levels = best_choice(values, weights, count, monge=monge)
    assert_cost(cost, every_choice(values, weights, count))
    assert_cost(cost, choice_cost(values, weights, levels))


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("seed", range(4))
def test_choice_with_levels_that_must_be_there(seed, offset):
    rng = np.random.default_rng(seed)
    values = np.unique(offset + np.round(rng.standard_normal(12), 2))
    weights = rng.random(len(values))
    forced = tuple(values[[3, 7]])
    cost, levels = best_choice(values, weights, 5, forced)
    assert set(forced) <= set(levels)
    exact = every_choice(values, weights, 5, forced)
    assert cost == pytest.approx(float(exact), rel=1e-6 if offset else 1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 2), "non-empty"),
        (([[1.0, 2.0]], 2), "1-D"),
        (([1.0, np.nan], 2), "finite"),
        (([1.0, np.inf], 2), "finite"),
        (([1.0, 2.0], 0), "at least 1"),
        (([1.0, 2.0], 2, [1.0]), "shape"),
        (([1.0, 2.0], 2, [1.0, -1.0]), "not negative"),
        (([1.0, 2.0], 2, [1.0, np.nan]), "finite"),
    ],
)
def test_refusals_are_one_line(arguments, message):
    with pytest.raises(SolveError, match=message) as refusal:
        partition(*arguments)
    assert "\n" not in str(refusal.value)
    with pytest.raises(SolveError, match="form"):
        partition([1.0, 2.0], 2, form="trees")


def test_weights_of_very_different_size():
    """Columns whose totals differ by rounding only must not narrow the search for rows with smaller costs."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        n, count = int(rng.integers(3, 14)), int(rng.integers(2, 7))
        values = np.sort(rng.standard_normal(n))
        weights = 10.0 ** rng.uniform(-25, 25, n)
        exact = float(plain_loop(values, weights, count))
        assert partition(values, count, weights).cost == pytest.approx(exact, rel=1e-9), seed
