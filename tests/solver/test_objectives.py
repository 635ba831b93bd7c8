"""Objectives minimax and unbiased, against naive searches and quadrature."""

import itertools

import numpy as np
import pytest
from naive import fine_integral, minimax_contiguous, minimax_levels, normal_density, one, parts_of
from problems import solved

from fewbit import functions
from fewbit.catalog.verification import recompute_error
from fewbit.errors import SolveError, TableError
from fewbit.solver.solve import solve

FORMS = ["levels", "intervals"]
CONTINUOUS = [
    "gelu", "gelu_tanh", "quick_gelu", "silu", "mish", "sigmoid", "logsigmoid", "tanh", "tanhshrink",
    "softsign", "softplus", "laplace", "elu", "celu", "relu_squared",
]  # fmt: skip
VARYING = [name for name in functions.names() if name != "identity"]


def dense(table, n=40_001):
    """Return even points of the domain, and points on both sides of every kink and break."""
    f = functions.get(table.function, table.parameters)
    marks = np.unique([*f.kinks, *table.breaks])
    steps = np.array([1e-12, 1e-9, 1e-6, 1e-4]) * (1 + np.abs(marks[:, None]))
    beside = [(marks[:, None] + step).ravel() for step in (steps, -steps)]
    x = np.concatenate([np.linspace(*table.domain, n), *beside])
    x = x[(x > table.domain[0]) & (x < table.domain[1])]
    return np.setdiff1d(x, marks), f


@pytest.mark.parametrize("name", CONTINUOUS)
def test_a_continuous_derivative_is_cut_into_equal_ranges(name):
    f = functions.get(name)
    width = np.ptp(f.derivative(np.linspace(*f.domain, 400_001)))
    for count in (2, 3, 17):
        table = solved(name, levels=count, objective="minimax")
        assert table.error == pytest.approx(width / (2 * count), rel=1e-6)
        assert np.diff(table.levels) == pytest.approx(width / count, rel=1e-6)


@pytest.mark.fast(8)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", functions.names())
def test_the_largest_deviation_is_the_error_and_optimal(name, form):
    for count, tails in itertools.product((2, 3, 8), ("free", "pinned")):
        if tails == "pinned" and name == "relu_squared":
            continue  # its slopes have no limit
        table = solved(name, levels=count, form=form, objective="minimax", tails=tails)
        x, f = dense(table)
        largest = np.abs(f.derivative(x) - table(x)).max()
        assert largest <= table.error * (1 + 1e-9) + 1e-14
        assert largest >= table.error * (1 - 1e-3)
        assert table.solver["status"] == ("exact" if table.error == 0 else "optimal")
        assert table.error - table.lower_bound <= 1e-9 * table.error + 1e-15


TAILED = ["gelu", "tanh", "selu", "leaky_relu", "hardswish", "softplus", "logsigmoid", "gelu_10"]
DOMAINS = [None, (-0.5, 0.5), (0.2, 0.3), (-6.5, -5.5), (5.5, 6.5)]


@pytest.mark.fast(4)
@pytest.mark.parametrize("objective", ["mse", "minimax"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TAILED)
def test_pinned_tails_are_the_slopes(name, form, objective):
    slopes = functions.get(name).slopes
    for domain, count in itertools.product(DOMAINS, (2, 8)):
        options = {"levels": count, "form": form, "domain": domain, "objective": objective}
        table, free = solved(name, tails="pinned", **options), solved(name, **options)
        assert tuple(table(np.array([-1e9, 1e9]))) == slopes
        assert len(table.levels) <= count
        assert table.error >= free.error * (1 - 1e-9) - 1e-15
        assert table.lower_bound <= table.error
        assert table.error - table.lower_bound <= 1e-2 * table.error + 1e-14
        if objective == "minimax":
            x, f = dense(table)
            assert np.abs(f.derivative(x) - table(x)).max() <= table.error * (1 + 1e-9) + 1e-14


def sampled(name, domain, n=50):
    """Return values of f' in order, with both sides of every jump, and the largest other difference of neighbors."""
    f = functions.get(name)
    kinks = [k for k in f.kinks if domain[0] < k < domain[1]]
    x = np.unique([*np.linspace(*domain, n), *np.nextafter(kinks, -99), *np.nextafter(kinks, 99)])
    x = np.setdiff1d(x, kinks)
    value = f.derivative(x)
    inside = np.diff(x) > 1e-9  # not across a jump
    return value, np.abs(np.diff(value))[inside].max(initial=0.0)


@pytest.mark.fast(3)
@pytest.mark.parametrize("domain", [(-4.0, 4.0), (-0.4, 0.7)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["gelu", "tanh", "selu", "hardswish", "leaky_relu", "hardshrink"])
def test_minimax_against_every_cover_of_a_sample(name, form, domain):
    values, step = sampled(name, domain)
    slopes = functions.get(name).slopes
    options = {"form": form, "domain": domain, "objective": "minimax"}
    for count, tails in itertools.product((2, 4), ("free", "pinned")):
        if form == "levels":
            pinned = sorted(set(slopes)) if tails == "pinned" else ()
            least = minimax_levels(values, count, pinned)
        else:
            least = minimax_contiguous(values, count, slopes if tails == "pinned" else None)
        error = solved(name, levels=count, tails=tails, **options).error
        assert least * (1 - 1e-9) - 1e-12 <= error <= least + step + 1e-12, (count, tails)


@pytest.mark.fast(10)
@pytest.mark.parametrize("weight", ["uniform", "normal"])
@pytest.mark.parametrize("name", VARYING)
def test_the_expected_error_by_quadrature(name, weight):
    for bits in (1, 2, 3):
        table = solved(name, bits, weight=weight, objective="unbiased")
        assert table.error == pytest.approx(recompute_error(table), rel=1e-6, abs=1e-15)
        assert 0 <= table.lower_bound <= table.error
        assert table.gap <= 1e-3
        assert table.solver["status"] == ("exact" if table.error == 0 else "stationary")


@pytest.mark.fast(8)
@pytest.mark.parametrize("bits", [1, 3, 6])
@pytest.mark.parametrize("name", VARYING)
def test_the_error_of_the_stand_in_is_bounded(name, bits):
    table = solved(name, bits, objective="unbiased")
    x, f = dense(table)
    worst = np.abs(f.derivative(x) - table.knots(x)).max()
    assert worst <= table.knots_error * (1 + 1e-9) + 1e-15
    gap = np.diff(table.levels).mean()
    assert table.knots_error <= 0.01 * gap + 1e-15
    assert (table.knots.points[0], table.knots.points[-1]) == table.domain


@pytest.mark.fast(8)
@pytest.mark.parametrize("name", VARYING)
def test_the_levels_span_the_derivative(name):
    x, f = dense(solved(name, 3))
    values = f.derivative(np.concatenate([x, f.domain]))
    errors = []
    for bits in (1, 2, 3, 4):
        table = solved(name, bits, objective="unbiased")
        assert table.levels[0] <= values.min() + table.knots_error + 1e-12
        assert table.levels[-1] >= values.max() - table.knots_error - 1e-12
        assert table.levels[[0, -1]] == pytest.approx([values.min(), values.max()], abs=1e-6)
        assert len(table.levels) <= 2**bits
        errors.append(table.error)
    assert (np.diff(errors) <= 1e-6 * np.array(errors[:-1])).all()  # each has a stand-in of its own


def variance_of(table, levels, density):
    """Return the variance for other levels and the same knots."""

    def expected(x):
        v = np.clip(table.knots(x), levels[0], levels[-1])
        upper = np.clip(np.searchsorted(levels, v), 1, len(levels) - 1)
        return (v - levels[upper - 1]) * (levels[upper] - v) * density(x)

    return fine_integral(expected, parts_of(table, table.knots.points))


@pytest.mark.parametrize("weight", ["uniform", "normal"])
@pytest.mark.parametrize("name", ["gelu", "selu", "tanh", "softplus"])
def test_no_other_levels_have_less_variance(name, weight):
    density = one if weight == "uniform" else normal_density()
    table = solved(name, levels=6, weight=weight, objective="unbiased")
    least = variance_of(table, table.levels, density)
    assert least == pytest.approx(table.error, rel=1e-2)
    bias = table.error - least
    rng = np.random.default_rng(0)
    for k, step in itertools.product(range(1, 5), (-1e-3, 1e-3)):
        moved = table.levels.copy()
        moved[k] += step
        assert variance_of(table, moved, density) >= least * (1 - 1e-9)
    for _ in range(40):
        inner = np.sort(rng.uniform(*table.levels[[0, -1]], 4))
        other = np.array([table.levels[0], *inner, table.levels[-1]])
        assert variance_of(table, other, density) + bias >= table.lower_bound * (1 - 1e-6)


@pytest.mark.fast(4)
@pytest.mark.parametrize("name", ["gelu", "tanh", "softplus", "elu", "logsigmoid", "hardswish"])
@pytest.mark.parametrize(
    "options",
    [
        {"weight": "normal"},
        {"form": "intervals"},
        {"objective": "unbiased"},
        {"tails": "pinned"},
        {"tails": "pinned", "form": "intervals"},
    ],
    ids=repr,
)
def test_bounds_of_coarse_grids_hold(name, options):
    best = solved(name, levels=6, **options)
    gaps = []
    for grid in (16, 64, 1024):
        coarse = solved(name, levels=6, grid=grid, **options)
        assert coarse.lower_bound <= best.error * (1 + 1e-12)
        assert coarse.error >= best.lower_bound * (1 - 1e-12)
        gaps.append(coarse.gap)
    if name != "hardswish":  # whose derivative is straight between its jumps
        assert gaps[1] > 2 * gaps[2] > 0  # a bound that is too high is cut to a gap of 0


@pytest.mark.parametrize(
    "name", ["relu", "relu6", "hardtanh", "hardshrink", "leaky_relu", "hardsigmoid"]
)
def test_unbiased_tables_of_two_slopes_are_exact(name):
    table = solved(name, 2, objective="unbiased")
    f = functions.get(name)
    assert (table.error, table.knots_error) == (0.0, 0.0)
    kinks = np.array(f.kinks)
    around = [kinks, np.nextafter(kinks, -99), np.nextafter(kinks, 99)]
    x = np.concatenate([*around, np.linspace(-9, 9, 91)])
    assert (table(x) == f.derivative(x)).all()


@pytest.mark.parametrize(
    ("name", "domain"),
    [("relu", (0, 5)), ("hardtanh", (-1, 1)), ("relu6", (0, 6)), ("identity", None)],
)
def test_a_constant_derivative_is_refused(name, domain):
    with pytest.raises(SolveError, match="constant"):
        solve(name, 2, domain=domain, objective="unbiased")


def test_the_stand_in_does_not_see_a_jump_at_the_end_of_the_domain():
    table = solve("hardswish", 2, domain=(-3, 3), objective="unbiased")
    assert table.knots_error < 1e-9
    assert table.knots.points.tolist() == [-3.0, 3.0]
    assert table.levels == pytest.approx([-0.5, 1 / 6, 5 / 6, 1.5], abs=1e-7)


@pytest.mark.parametrize("name", ["gelu", "silu", "hardswish", "mish"])
@pytest.mark.parametrize("count", [2, 3])
def test_pinned_levels_that_do_not_fit_between_the_extremes_are_refused(name, count):
    """The smallest and the largest f' and the two slopes between them are four levels."""
    with pytest.raises((SolveError, TableError), match="at least 4"):
        solve(name, levels=count, tails="pinned", objective="unbiased")


@pytest.mark.parametrize("name", ["gelu", "silu", "hardswish", "tanh", "selu"])
def test_pinned_unbiased_tables_have_the_slopes_for_tails(name):
    slopes = functions.get(name).slopes
    for domain in (None, (-0.5, 0.5)):
        table = solve(name, 3, domain=domain, tails="pinned", objective="unbiased")
        assert set(slopes) <= set(table.levels)
        assert tuple(table(np.array([-1e9, 1e9]))) == slopes
        assert table.error >= solve(name, 3, domain=domain, objective="unbiased").error * (1 - 1e-9)
