"""Certificates: the claimed error is real, nothing beats the lower bound, and the two are close."""

import itertools

import numpy as np
import pytest
from naive import (
    SampledError,
    extended_loop,
    fine_integral,
    normal_density,
    one,
    piece_moments,
)
from problems import solved
from scipy.optimize import minimize

from fewbit import functions

FORMS = ["levels", "intervals"]
WEIGHTS = {"uniform": one, "normal": normal_density()}
ALL = list(itertools.product(functions.names(), WEIGHTS, FORMS))


# --- every function -----------------------------------------------------------------------------


@pytest.mark.fast(20)
@pytest.mark.parametrize(("name", "weight", "form"), ALL)
def test_the_levels_are_a_step_function_on_the_domain(name, weight, form):
    table = solved(name, 3, weight=weight, form=form)
    low, high = table.domain
    assert all(low < b < high for b in table.breaks)
    assert set(table.codes) == set(range(len(table.levels)))
    assert len(table.levels) <= 8
    slopes = functions.get(name).derivative(np.linspace(low, high, 20_001))
    assert slopes.min() <= table.levels.min() and table.levels.max() <= slopes.max()


@pytest.mark.fast(8)
@pytest.mark.parametrize("name", functions.names())
def test_levels_are_never_worse_than_intervals(name):
    for bits, weight in itertools.product((1, 3), WEIGHTS):
        shared = solved(name, bits, weight=weight).error
        assert shared <= solved(name, bits, weight=weight, form="intervals").error * (1 + 1e-12)


# --- the bound is a bound -----------------------------------------------------------------------


COMPETED = [
    ("gelu", "uniform"),
    ("gelu", "normal"),
    ("selu", "uniform"),
    ("hardswish", "normal"),
    ("tanh", "uniform"),
]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(("name", "weight"), COMPETED)
@pytest.mark.parametrize(
    ("form", "close", "far"), [("levels", 1e-5, 1.05), ("intervals", 1e-4, 1.4)], ids=FORMS
)
def test_no_optimized_table_is_below_the_bound(form, close, far, name, weight, count):
    """The best of several searches is no better than the table, and near enough to be a test."""
    table = solved(name, levels=count, weight=weight, form=form)
    sample = SampledError(functions.get(name), table.domain, WEIGHTS[weight], 8_001)
    rng = np.random.default_rng(count)
    if form == "levels":
        error, evaluations = sample.of_levels, 400
        starts = rng.uniform(sample.value.min(), sample.value.max(), (6, count))
    else:
        error, evaluations = sample.of_breaks, 250
        starts = rng.uniform(-3, 3, (8, count - 1))
    options = {"method": "Nelder-Mead", "options": {"maxfev": evaluations}}
    found = min(minimize(error, start, **options).fun for start in starts)
    assert found >= table.lower_bound * (1 - close)
    assert table.error <= found * (1 + close)
    assert found <= table.error * far


@pytest.mark.fast(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "weight"), COMPETED)
def test_tables_of_other_grids_are_not_below_the_bound(name, weight, form):
    best = solved(name, 3, weight=weight, form=form)
    for grid, refine in itertools.product((16, 300), (True, False)):
        other = solved(name, 3, weight=weight, form=form, grid=grid, refine=refine)
        assert other.error >= best.lower_bound * (1 - 1e-12)
        assert other.lower_bound <= best.error * (1 + 1e-12)


@pytest.mark.fast(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "weight"), COMPETED)
def test_the_gap_falls_with_the_grid(name, weight, form):
    gaps = [
        solved(name, 3, weight=weight, form=form, grid=grid).gap for grid in (512, 1024, 2048, 4096)
    ]
    assert all(finer < 0.6 * coarser for coarser, finer in itertools.pairwise(gaps))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "extrema"),
    [("gelu", [-np.sqrt(2.0), np.sqrt(2.0)]), ("tanh", [0.0]), ("elu", [0.0]), ("softsign", [0.0])],
)
def test_the_bound_put_together_anew(name, extrema, form):
    """The bound of relaxation.py on other cells, by a plain loop, is below the error and near it."""
    f = functions.get(name)
    edges = np.union1d(10 * np.linspace(-1, 1, 241) ** 3, extrema)
    inner = np.where(np.isin(edges, f.kinks), np.nextafter(edges, np.inf), edges)
    values, masses, excess = [], [], 0.0
    for a, b, first, last in zip(
        edges[:-1], edges[1:], f.derivative(inner[:-1]), f.derivative(edges[1:]), strict=True
    ):
        part = np.array([[a, b]])
        width = b - a
        mean = fine_integral(f.derivative, part) / width
        spread = fine_integral(lambda x, m=mean: (f.derivative(x) - m) ** 2, part)
        share = (mean - first) / (last - first) if first != last else 0.5
        values += [first, last]
        masses += [width * (1 - share), width * share]
        excess += width * (mean - first) * (last - mean) - spread
    values, masses = np.array(values), np.maximum(masses, 0.0)
    order = np.argsort(values, kind="stable") if form == "levels" else slice(None)
    table = solved(name, 2, form=form)
    bound = float(extended_loop(values[order], masses[order], 4)) - excess
    assert 0.9 * table.error < bound <= table.error * (1 + 1e-9)


# --- stationarity -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize(
    "name", ["gelu", "silu", "selu", "tanh", "softplus", "hardswish", "gelu_10"]
)
def test_levels_are_means_and_breaks_are_equally_near_to_two_levels(name, weight, form):
    f = functions.get(name)
    table = solved(name, 3, weight=weight, form=form)
    mass, first = piece_moments(table, f, WEIGHTS[weight])
    assert table.levels * mass == pytest.approx(first, abs=1e-9)
    heavy = mass > 1e-2
    assert table.levels[heavy] == pytest.approx(first[heavy] / mass[heavy], abs=1e-8)
    middle = 0.5 * (table.levels[table.codes[1:]] + table.levels[table.codes[:-1]])
    smooth = [all(abs(b - kink) > 1e-6 for kink in f.kinks) for b in table.breaks]
    assert sum(smooth) >= 3
    assert f.derivative(table.breaks)[smooth] == pytest.approx(middle[smooth], abs=1e-8)


@pytest.mark.fast(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["gelu", "mish", "selu", "softsign", "relu_squared"])
def test_refinement_never_raises_the_error(name, form):
    for weight, grid in itertools.product(WEIGHTS, (64, 4096)):
        raw = solved(name, 3, form=form, weight=weight, grid=grid, refine=False)
        refined = solved(name, 3, form=form, weight=weight, grid=grid)
        assert raw.solver["status"] in ("unrefined", "exact")
        assert refined.error <= raw.error * (1 + 1e-15)
        assert refined.lower_bound == min(raw.lower_bound, refined.error)
        if grid == 64:
            assert refined.error < raw.error
