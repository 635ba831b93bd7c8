"""The errors of the best tables by function and bits, and beside the paper's."""

import json

import pytest
from problems import solved

import fewbit
from fewbit.catalog import paper
from fewbit.catalog.comparison import Comparison
from fewbit.errors import FewbitError
from fewbit.render.terminal import plain


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def few():
    """Compare one even derivative and two others."""
    one = fewbit.compare(["relu", "sigmoid"], bits=1)
    return Comparison((*one.rows, *fewbit.compare("gelu", bits=3).rows))


@pytest.mark.slow
def test_every_printed_digit_is_reproduced():
    comparison = fewbit.compare()
    printed = [row for row in comparison.rows if row.paper is not None]
    assert len(printed) == sum(map(len, paper.TABLE_3.values())) == 25
    for row in printed:
        assert f"{row.discrete:.4f}" == f"{row.paper:.4f}", row
        assert row.reproduced
    # Breaks anywhere are never worse than breaks on a grid.
    for row in comparison.rows:
        assert row.discrete is None or row.intervals <= row.discrete * (1 + 1e-12), row


def test_the_discrete_problem_converges_to_the_continuous_one():
    continuous = fewbit.solve("gelu", 3, form="intervals").error
    excess = [paper.discrete_optimum("gelu", 3, cells) - continuous for cells in (100, 1000, 10000)]
    assert excess[0] > excess[1] > excess[2] > 0
    assert excess[2] < 1e-3 * excess[0]


COUNTERPARTS = [
    ({"bits": 3}, 0.0121),
    ({"bits": 3, "form": "intervals"}, 0.0121),
    ({"bits": 3, "parameters": {"beta": 2.0}}, None),
    ({"bits": 5}, None),
    ({"bits": 3, "weight": "normal"}, None),
    ({"bits": 3, "domain": (-10, 9)}, None),
    ({"bits": 3, "tails": "pinned"}, None),
    ({"bits": 3, "levels": 7}, None),
    ({"bits": 3, "objective": "minimax"}, None),
]


@pytest.mark.parametrize(("request_", "expected"), COUNTERPARTS)
def test_the_counterpart_is_the_same_problem_only(request_, expected):
    assert paper.counterpart(fewbit.solve("softplus", **request_)) == expected


def test_an_exact_table_of_fewer_levels_has_a_counterpart():
    assert paper.counterpart(solved("relu", 1)) == 0.0
    assert paper.counterpart(solved("relu", 2)) is None


def test_compare_takes_names_and_aliases():
    rows = fewbit.compare(["swish", "softsign", "silu"], bits=2).rows
    found = [(row.function, row.bits, row.paper) for row in rows]
    assert found == [("silu", 2, 0.0479), ("softsign", 2, None)]
    assert rows[1].discrete is None and rows[1].reproduced is None
    assert fewbit.compare("gelu", bits=(1, 2)).rows[1].bits == 2


def test_compare_of_an_even_derivative_counts_both_halves():
    (row,) = fewbit.compare("tanh", bits=3).rows
    half = fewbit.solve("tanh", 3, form="intervals", domain=(0, 10))
    assert row.parity
    assert row.intervals == 2 * half.error
    assert row.levels == fewbit.solve("tanh", 3).error


def test_compare_reports_its_progress():
    calls = []
    fewbit.compare(["relu", "gelu"], bits=[1, 2], progress=lambda *call: calls.append(call))
    names = ["relu, 1 bit", "relu, 2 bits", "gelu, 1 bit", "gelu, 2 bits"]
    assert calls == [(name, done, 4) for done, name in enumerate(names)]


@pytest.mark.parametrize(
    ("functions", "bits", "expected"),
    [
        ("gelu", [1, 99], "bits: expected an integer from 1 to 8, got 99"),
        ("gelu", 2.5, "bits: expected one or several of type int, got 2.5"),
        ("gelo", 1, "did you mean gelu"),
        (["gelu", "no_module:f"], 1, "cannot import 'no_module'"),
        (3, 1, "functions: expected one or several of type str, got 3"),
        ([3], 1, "functions: expected values of type str, got 3"),
        ("gelu", [2.5], "bits: expected values of type int, got 2.5"),
    ],
)
def test_compare_refuses_before_it_solves_anything(functions, bits, expected):
    with pytest.raises(FewbitError, match=expected):
        fewbit.compare(functions, bits, progress=lambda *_: pytest.fail("a table is solved"))


def test_the_comparison_shows_itself(few):
    text = plain(few, 80)
    assert "gives 3 of 3 printed figures" in text
    assert "lower than printed in 0, higher in 0" in text
    assert "nowhere above intervals" in text
    assert "* f' is even" in text and "\nsigmoid* " in text
    row = next(line for line in text.splitlines() if "0.008094" in line)
    assert row.split() == "gelu 3 0.0119 0.0119 0.0119 0.008094 1.47x 0.008094".split()
    records = few.records()
    assert json.loads(json.dumps(records)) == records
    assert records[0]["function"] == "relu" and records[0]["ratio"] is None


def test_the_error_table_holds_the_errors_of_the_tables():
    table = fewbit.error_table(["gelu", "swish"], bits=(1, 2, 3))
    for name in ("gelu", "silu"):
        errors = {bits: fewbit.load_table(name, bits).error for bits in (1, 2, 3)}
        assert table.values()[name] == errors
    assert [row.function for row in table.rows] == ["gelu", "silu"]


def test_the_error_table_has_other_settings():
    options = {"weight": "normal", "form": "intervals"}
    table = fewbit.error_table("gelu", 2, metric="relative_error", **options)
    wanted = solved("gelu", 2, **options)
    assert table.values() == {"gelu": {2: pytest.approx(wanted.relative_error, rel=1e-9)}}
    (record,) = table.records()
    assert record["error"] == pytest.approx(wanted.error, rel=1e-9)
    assert (record["form"], record["levels"], record["pieces"]) == ("intervals", 4, 4)
    assert json.loads(json.dumps(record)) == record
    assert "normal weight" in str(table)
    with pytest.raises(FewbitError, match="metric: expected error or relative_error"):
        fewbit.error_table("gelu", metric="gap")


@pytest.mark.parametrize("width", [50, 80])
def test_a_narrow_terminal_goes_without_bounds_and_the_most_bits(few, width):
    errors = fewbit.error_table(["relu_squared", "gelu"])
    header = "function 1 bit 2 bits 3 bits 4 bits 5 bits 6 bits 7 bits 8 bits"
    full_of_few = "function bits paper eq. 9 intervals levels lower bound"
    for found, full, narrow in (
        (errors, header, header[: header.index(" 5")]),
        (few, full_of_few, "function bits paper intervals levels"),
    ):
        lines = plain(found, width).splitlines()
        (rule,) = [i for i, line in enumerate(lines) if line.startswith("──")]
        assert " ".join(lines[rule - 1].split()) == (full if width == 80 else narrow)
    assert "function" in str(fewbit.error_table([], bits=(1, 2)))
    assert "function" in str(Comparison(()))
