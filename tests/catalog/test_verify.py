"""The function verify confirms claims that hold, and finds claims that do not."""

from dataclasses import replace

import numpy as np
import pytest
from problems import solved
from scipy.integrate import quad

import fewbit
from fewbit import functions
from fewbit.catalog.verification import recompute_error, verify
from fewbit.errors import FunctionError, TableError
from fewbit.table import save_tables

SOLVED = [
    ("gelu", {"bits": 6}),
    ("silu", {"bits": 3, "form": "intervals"}),
    ("selu", {"bits": 2}),
    ("hardswish", {"bits": 2}),
    ("relu6", {"bits": 1}),
    ("gelu", {"bits": 2, "weight": "normal:1,0.3"}),
    ("silu", {"bits": 3, "weight": "normal:14,3"}),
    ("silu", {"bits": 3, "weight": "normal:1,40"}),
    ("tanh", {"bits": 1, "weight": "normal:2,0.001"}),
    ("silu", {"bits": 2, "weight": ([-1.0, 0.5, 2.0, 3.0], [1.0, 0.0, 2.0])}),
    ("softplus", {"bits": 2, "domain": (-3, 1)}),
    ("elu", {"bits": 2, "parameters": {"alpha": 2.0}}),
    ("mish", {"bits": 2, "tails": "pinned"}),
    ("sigmoid", {"bits": 2, "objective": "minimax"}),
    ("silu", {"bits": 2, "objective": "unbiased"}),
    ("numpy:arctan", {"bits": 2}),
    ("gelu", {"bits": 2, "weight": "normal:0,1e9", "objective": "minimax"}),
    ("silu", {"bits": 2, "weight": "normal:0,1e-10"}),
    ("tanh", {"bits": 2, "weight": "normal:0,1e-12", "objective": "unbiased"}),
]


def verified(folder, *tables, **options):
    """Return what the function verify finds of a file of tables."""
    save_tables(folder / "tables.json", tables[0].function, tables, force=True)
    return verify(folder / "tables.json", **options)


@pytest.mark.fast(5)
@pytest.mark.parametrize(("name", "request_"), SOLVED)
def test_a_solved_table_holds(name, request_, tmp_path):
    table = fewbit.solve(name, **request_)
    # A name in the file is never imported, so the user has to name the function again.
    (finding,) = verified(tmp_path, table, function=name if ":" in name else None)
    assert finding.problems == ()
    assert finding.recomputed == pytest.approx(table.error, rel=1e-6, abs=1e-28)
    assert finding.table == table


@pytest.mark.parametrize("power", [-1000, 1026])
@pytest.mark.parametrize("objective", ["mse", "minimax"])
def test_claims_about_weights_near_the_ends_of_float64(tmp_path, power, objective):
    def weight(x):
        return np.ldexp(0.03 + 0.01 * np.cos(x), power)

    table = fewbit.solve("gelu", 2, weight=weight, objective=objective)
    (finding,) = verified(tmp_path, table, weight=weight)
    assert finding.problems == () and finding.recomputed == pytest.approx(table.error, rel=1e-6)
    for name in ("error", "relative_error"):
        wrong = replace(table, **{name: 1.001 * getattr(table, name)})
        (finding,) = verified(tmp_path, wrong, weight=weight)
        assert [problem.partition(":")[0] for problem in finding.problems] == [name]


def test_a_wrong_error_of_a_tiny_derivative_is_found(tmp_path):
    """The error is about 1e-40, which rounding may cause for a derivative of ordinary size."""
    table = fewbit.solve("elu", 2, domain=(-60, -45))
    assert 0 < table.error < 1e-39
    for share, problems in ((1.0, 0), (1.001, 1)):
        (finding,) = verified(tmp_path, replace(table, error=share * table.error))
        assert len(finding.problems) == problems


def test_the_recomputation_agrees_with_scipys_quad():
    table = fewbit.solve("gelu", 2, weight="normal")
    slope = functions.get("gelu").derivative

    def loss(x):
        return (slope(x) - table(x)) ** 2 * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)

    ends = [-10.0, *table.breaks, 10.0]
    parts = [
        quad(loss, a, b, points=[p for p in (-4, 0, 4) if a < p < b], epsabs=1e-14, limit=200)[0]
        for a, b in zip(ends, ends[1:], strict=False)
    ]
    assert recompute_error(table) == pytest.approx(sum(parts), rel=1e-9)


@pytest.mark.parametrize("objective", ["mse", "minimax", "unbiased"])
@pytest.mark.parametrize("field", ["error", "relative_error"])
def test_an_error_that_is_wrong_by_one_part_in_100_000_is_found(tmp_path, field, objective):
    table = solved("silu", 2, objective=objective)
    claimed = getattr(table, field)
    for factor in (0.99999, 1.00001):
        (finding,) = verified(
            tmp_path, replace(table, **{field: claimed * factor}, lower_bound=0.0)
        )
        (problem,) = finding.problems
        assert problem.startswith(f"{field}: claimed ")
        assert f"recomputed {claimed:.8g}"[:16] in problem
        assert finding.recomputed == pytest.approx(table.error, rel=1e-6)


@pytest.mark.parametrize("field", ["levels", "breaks", "parameters"])
def test_values_that_were_changed_are_found(tmp_path, field):
    table = fewbit.solve("elu", 2, parameters={"alpha": 2.0})
    changed = {"alpha": 1.0}
    if field != "parameters":
        changed = getattr(table, field).copy()
        changed[1] += 0.01
    (finding,) = verified(tmp_path, replace(table, **{field: changed}))
    assert len(finding.problems) == 1


def test_an_error_that_rises_with_bits_is_found(tmp_path):
    # Two bits hold at most four levels, so the better table of three bits passes for one of four.
    first, second = verified(tmp_path, solved("gelu", 3), replace(solved("gelu", 2), bits=4))
    assert [(f.index, f.table.bits) for f in (first, second)] == [(0, 3), (1, 4)]
    assert first.path == second.path == str(tmp_path / "tables.json")
    assert first.problems == ()
    assert second.problems == ("error rises with bits: 0.0405625 at 4, 0.00809365 at 3",)


@pytest.mark.parametrize(
    "other", [{"weight": "normal"}, {"form": "intervals"}, {"domain": (-5, 5)}, {"tails": "pinned"}]
)
def test_tables_of_other_problems_are_not_set_against_each_other(tmp_path, other):
    table = fewbit.solve("silu", 2, **other)
    found = verified(tmp_path, solved("silu", 3), replace(table, bits=4))
    assert [finding.problems for finding in found] == [(), ()]


def test_a_function_that_cannot_be_found_is_a_problem_of_its_table(tmp_path):
    table = replace(solved("gelu", 2), function="no_such_module:f", _function=None)
    with pytest.raises(FunctionError):
        recompute_error(table)
    (finding,) = verified(tmp_path, table)
    assert finding.recomputed is None
    assert finding.problems == ()
    assert finding.unchecked.startswith("the error cannot be recomputed: fewbit has no function")


def test_a_file_without_tables_does_not_hold(tmp_path):
    save_tables(tmp_path / "none.json", "gelu", [])
    with pytest.raises(TableError, match="expected at least one table to verify, got none"):
        verify(tmp_path / "none.json")


def test_a_weight_that_the_user_gives_again(tmp_path):
    """A file contains only the name of a callable weight, and such a name is never imported."""

    def weight(x):
        return np.exp(-np.abs(x))

    table = fewbit.solve("tanh", 2, weight=weight)
    (finding,) = verified(tmp_path, table)
    assert "expected the callable" in finding.unchecked and finding.recomputed is None
    (finding,) = verified(tmp_path, table, weight=weight)
    assert finding.problems == () and finding.recomputed == pytest.approx(table.error, rel=1e-6)


STEEP = """
import numpy as np
def arctan(x): return np.arctan(50 * (x - 0.3)) / 50
def bump(x): return x / 1000 + 1e-4 * np.exp(-((x - 0.4487989505128276) / 1e-4) ** 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["mse", "minimax", "unbiased"])
@pytest.mark.parametrize("name", ["arctan", "bump"])
def test_tables_of_numerical_derivatives_hold(name, objective, tmp_path, monkeypatch):
    """The accuracy of a steep function's derivative is a part of the error if the table has many levels."""
    (tmp_path / "steep_functions.py").write_text(STEEP)
    monkeypatch.syspath_prepend(tmp_path)
    function = f"steep_functions:{name}"
    table = fewbit.solve(function, 6, objective=objective)
    (finding,) = verified(tmp_path, table, function=function)
    assert finding.problems == () and finding.unchecked is None
    assert finding.recomputed <= table.error * (1 + 1e-6)
    (finding,) = verified(tmp_path, replace(table, error=table.error * 1.001), function=function)
    assert finding.problems
