"""The shipped tables: complete, reproduced by the solver, and correct by independent quadrature."""

from dataclasses import replace

import numpy as np
import pytest

from fewbit import functions
from fewbit.catalog.shipping import _with_revisions, make, requests
from fewbit.catalog.store import shipped_tables, tables_directory
from fewbit.catalog.verification import recompute_error

NAMES = (*functions.names(), *functions.solver_names())


def described(table):
    return table.form, table.objective, table.weight["kind"], table.bits


def test_one_file_for_every_function_and_no_other():
    assert {path.stem for path in tables_directory().glob("*.json")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_request_is_shipped(name):
    wanted = [(r["form"], r.get("objective", "mse"), r["weight"], r["bits"]) for r in requests(name)]  # fmt: skip
    tables = shipped_tables(name)
    assert sorted(map(described, tables)) == sorted(wanted)
    for table in tables:
        assert table.function == name
        assert table.parameters == functions.get(name).parameters
        assert "seconds" not in table.solver


@pytest.mark.fast(10)
@pytest.mark.parametrize("name", NAMES)
def test_claims_hold(name):
    best = {}
    for table in shipped_tables(name):
        recomputed = recompute_error(table)
        assert recomputed == pytest.approx(table.error, rel=1e-6, abs=1e-28)
        assert 0 <= table.lower_bound <= table.error
        assert table.gap <= (1e-3 if table.form == "levels" else 1e-2)
        assert table.solver["status"] in {"exact", "stationary"}
        key = described(table)[:3]
        assert table.error <= best.get(key, np.inf) * (1 + 1e-12), "error rises with bits"
        best[key] = table.error


def reflected(table):
    """Return the table of x -> q(-x), except for the sides of breaks."""
    if table.form == "intervals":  # the codes of which count the pieces
        return replace(table, breaks=-table.breaks[::-1], levels=table.levels[::-1])
    return replace(table, breaks=-table.breaks[::-1], codes=table.codes[::-1])


def same(mine, shipped):
    """Check that two tables are equal up to the last digits, which differ between processors.

    They also decide which of two mirror images the solver finds if both are optimal, as of hardsigmoid with one bit.
    """
    assert described(mine) == described(shipped)
    x = np.linspace(*shipped.domain, 4001)

    def distance(table):
        return np.abs(table(x) - shipped(x)).mean()

    if mine.knots is None and distance(reflected(mine)) < distance(mine) / 2:
        mine = reflected(mine)
    else:
        assert mine.closed == shipped.closed
    assert np.array_equal(mine.codes, shipped.codes)
    assert mine.levels == pytest.approx(shipped.levels, rel=1e-7, abs=1e-8)
    assert mine.error == pytest.approx(shipped.error, rel=1e-9, abs=1e-28)
    assert mine.lower_bound == pytest.approx(shipped.lower_bound, rel=1e-6, abs=1e-28)
    # Where f' is flat a break can move far at no cost, so breaks are compared by what they do.
    assert np.mean(np.abs(mine(x) - shipped(x)) > 1e-6) <= 1e-3


@pytest.mark.fast(5)
@pytest.mark.parametrize("name", NAMES)
def test_small_tables_are_what_the_solver_makes(name):
    shipped = {described(t): t for t in shipped_tables(name)}
    for request in requests(name):
        if request["bits"] <= 3:
            table = make(name, request)
            same(table, shipped[described(table)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gelu", "tanh", "relu6"])
def test_large_tables_are_what_the_solver_makes(name):
    shipped = {described(t): t for t in shipped_tables(name)}
    table = make(name, {"form": "levels", "weight": "normal", "bits": 8})
    same(table, shipped[described(table)])


def test_revision_rises_only_with_the_numbers():
    first, second = shipped_tables("gelu")[:2]
    moved = replace(first, levels=first.levels + 1e-9)
    newer = replace(second, solver={**second.solver, "version": "99"})
    kept, raised = _with_revisions([newer, moved], [first, second])
    assert kept.revision == second.revision
    assert raised.revision == first.revision + 1
