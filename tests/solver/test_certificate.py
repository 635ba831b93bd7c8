"""Certificates: the claimed error is real, nothing beats the lower bound, and the two are close."""

import itertools

import numpy as np
import pytest
from naive import SampledError, normal_density, one
from problems import solved
from scipy.optimize import minimize

from fewbit import functions

FORMS = ["levels", "intervals"]
WEIGHTS = {"uniform": one, "normal": normal_density()}


COMPETED = [
    ("gelu", "uniform"),
    ("gelu", "normal"),
    ("selu", "uniform"),
    ("hardswish", "normal"),
    ("tanh", "uniform"),
]


@pytest.mark.parametrize("count", [2, 4])
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


@pytest.mark.fast(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "weight"), COMPETED)
def test_the_gap_falls_with_the_grid(name, weight, form):
    options = {"weight": weight, "form": form}
    gaps = [solved(name, 3, grid=grid, **options).gap for grid in (512, 1024, 2048, 4096)]
    assert all(finer < 0.6 * coarser for coarser, finer in itertools.pairwise(gaps))


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    "options", [{}, {"form": "intervals"}, {"objective": "unbiased"}], ids=repr
)
@pytest.mark.parametrize("name", ["gelu", "mish", "selu", "softsign", "relu_squared"])
def test_refinement_never_raises_the_error(name, options):
    for weight, grid in itertools.product(WEIGHTS, (64, 4096)):
        raw = solved(name, 3, weight=weight, grid=grid, refine=False, **options)
        refined = solved(name, 3, weight=weight, grid=grid, **options)
        assert raw.solver["status"] in ("unrefined", "exact")
        assert refined.error <= raw.error * (1 + 1e-15)
        assert refined.lower_bound == min(raw.lower_bound, refined.error)
        if grid == 64:
            assert refined.error < raw.error
