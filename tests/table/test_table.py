"""Tables: copies and files, evaluation, draws, refusals and pictures."""

import copy
import json
import math
import pickle
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fewbit
from fewbit import schema
from fewbit.catalog.verification import recompute_error
from fewbit.errors import FewbitError, FunctionError, OutputExistsError, TableError, WeightError
from fewbit.table import (
    Knots,
    Table,
    dumps_tables,
    load_file,
    loads,
    locate,
    lower_pieces,
    philox,
    round_breaks,
    save_tables,
)
from fewbit.table.plot import _between, plot_grid, plot_table, steps, window
from fewbit.table.sketch import sketch

ROOT = Path(__file__).parents[2]

TANH = SimpleNamespace(
    derivative=lambda x: 1 - np.tanh(x) ** 2, kinks=(), slopes=(0.0, 0.0), domain=(-10.0, 10.0)
)


def make(**changes) -> Table:
    """Make a small valid table, with changes."""
    values = dict(
        function="a_function",
        parameters={},
        bits=2,
        form="levels",
        objective="mse",
        weight={"kind": "uniform"},
        domain=(-10.0, 10.0),
        tails="free",
        levels=[-0.1, 0.25, 0.5, 1.0],
        breaks=[-2.0, -1.0, 0.5, 3.0],
        codes=[1, 0, 2, 3, 2],
        closed=["right", "left", "right", "left"],
        error=0.1,
        lower_bound=0.09,
        relative_error=0.2,
        revision=1,
        solver={"version": "0.1.0", "grid": 1000, "seconds": 0.5},
    )
    return Table(**(values | changes))


def make_unbiased(**changes) -> Table:
    points = np.linspace(-4, 4, 33)
    knots = Knots(points, 1 - np.tanh(points) ** 2)
    levels = np.array([knots.values.min(), 0.2, 0.6, 1.0])
    breaks, codes, closed = lower_pieces(levels, knots)
    values = dict(objective="unbiased", levels=levels, breaks=breaks, codes=codes, closed=closed)
    return make(**(values | dict(knots=knots, knots_error=0.004, _function=TANH) | changes))


def make_jump(side: str, **changes) -> Table:
    """Make an unbiased table whose stand-in rises to .3, jumps to .9 at 0.1, which is no float32, and falls."""
    knots = Knots([-1.0, 0.1, 0.1, 2.0], [0.0, 0.3, 0.9, -0.2], [side] * 4)
    levels = [-0.2, 0.1, 0.4, 0.9]
    breaks, codes, closed = lower_pieces(levels, knots)
    return make_unbiased(
        levels=levels, knots=knots, breaks=breaks, codes=codes, closed=closed, **changes
    )


finite = st.floats(allow_nan=False, allow_infinity=False, width=64)
sides = st.sampled_from(["right", "left"])


def ascending(elements, minimum, maximum):
    return st.lists(elements, min_size=minimum, max_size=maximum, unique_by=float).map(sorted)


def bits_of(table: Table):
    """Return all numbers as bytes: unlike equality, this distinguishes -0.0 from 0.0."""
    knots = [table.knots.points, table.knots.values] if table.knots else []
    scalars = [table.error, table.lower_bound, table.relative_error, *table.domain]
    scalars.append(table.knots_error or 0.0)
    arrays = [table.levels, table.breaks, table.codes, *knots, np.array(scalars)]
    return [array.tobytes() for array in arrays], table.closed


NUMBERS = [-0.0, 5e-324, 0.1, 1e300]
"""Numbers that careless printing changes."""
STORED = {
    "levels": make(),
    "intervals": make(form="intervals", levels=[0.5, -0.0, 0.25], breaks=[-1, 1], codes=range(3), closed=None),
    "unbiased": make_unbiased(),
    "a jump": make_jump("left", knots_error=1 / 3),
    "small": make(levels=[-1e-45, 1e-45], breaks=[-0.0], codes=[0, 1], closed=None, error=5e-324, lower_bound=5e-324),
    "large": make(domain=(-3.4e38, 3.4e38), breaks=[-1e300, -1e-300, 0.1, 1e300], revision=10**6),
    "text": make(function='é"\\ \u2603', parameters={"é": -0.0, "b": 1 / 3}, solver={"version": '"', "grid": 0, "n": [1, None]}),
    "normal": make(weight={"kind": "normal", "mean": -0.0, "std": 5e-324}),
    "histogram": make(weight={"kind": "histogram", "edges": sorted(NUMBERS), "density": [0.0, 1e300, 0.1]}),
    "callable": make(weight={"kind": "callable", "name": "a:b"}, objective="minimax", tails="pinned", bits=8),
}  # fmt: skip


@pytest.mark.parametrize("table", STORED.values(), ids=STORED)
def test_files_and_copies_are_equal_to_the_bit_and_read_only(table):
    (again,) = loads(table.dumps())
    assert again.dumps() == table.dumps()
    assert loads(dumps_tables(table.function, [table, table])) == [table, table]
    again_too = Table.from_document(table.document())
    pickled = pickle.loads(pickle.dumps(table))
    for other in (again, again_too, pickled, copy.copy(table), copy.deepcopy(table)):
        assert other == table and hash(other) == hash(table)
        assert bits_of(other) == bits_of(table)
        with pytest.raises(ValueError, match="read-only"):
            other.levels[0] = 1.0


def test_equality_ignores_only_the_time():
    table = make()
    assert table == make(solver=table.solver | {"seconds": 9.0})
    assert table == replace(table, _function=TANH)
    for changes in (
        {"revision": 2},
        {"error": 0.11},
        {"closed": None},
        {"solver": {"version": "2", "grid": 1000}},
    ):
        assert table != replace(table, **changes)
    assert table != "a_function"


def test_inputs_are_copied():
    levels, solver = np.array([0.0, 1.0, 2.0, 3.0]), {"version": "1", "grid": 0}
    table = make(levels=levels, solver=solver)
    levels[0], solver["version"] = 9.0, "2"
    table.document()["levels"][0] = 9.0
    table.document()["solver"]["version"] = "2"
    assert table.levels[0] == 0.0 and table.solver["version"] == "1"
    with pytest.raises(AttributeError):
        table.bits = 3


def test_document_layout():
    table = make()
    keys = list(table.document())
    expected = "schema function parameters bits form objective weight domain tails levels breaks codes closed error"
    assert keys == (expected + " lower_bound relative_error revision solver").split()
    assert "closed" not in make(closed=None).document()
    assert table.dumps().splitlines()[10] == '  "levels": [-0.1, 0.25, 0.5, 1.0],'
    assert list(make_unbiased().document()["knots"]) == ["points", "values", "error"]


def test_numpy_scalars_and_whole_floats_are_accepted():
    table = make(
        bits=np.int64(2),
        codes=np.array([1.0, 0.0, 2.0, 3.0, 2.0]),
        error=np.float64(0.1),
        revision=1.0,
    )
    assert table == make() and json.loads(table.dumps())["bits"] == 2


def is_behind(x, at, side):
    """Return whether x belongs to the piece behind a break."""
    return not (x <= at if side == "right" else x < at)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_locate_against_a_loop(data):
    breaks = data.draw(ascending(st.integers(-20, 20).map(lambda i: i / 4), 0, 8))
    breaks = [*breaks, np.finfo(np.float64).max]
    closed = data.draw(st.lists(sides, min_size=len(breaks), max_size=len(breaks)))
    near = [*breaks, *np.nextafter(breaks[:-1], np.inf), *np.nextafter(breaks, -np.inf)]
    x = [*near, 0.0, -0.0, 5e-324, -5e-324, np.inf, -np.inf, np.nan]
    for given_sides in (closed, None):
        told = given_sides or ["right"] * len(breaks)
        pairs = list(zip(breaks, told, strict=True))
        expected = [sum(is_behind(value, *pair) for pair in pairs) for value in x]
        assert locate(x, breaks, given_sides).tolist() == expected


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_rounded_breaks_decide_alike_for_float32(data):
    breaks = ascending(finite | st.floats(-1e-38, 1e-38) | st.floats(-8, 8), 1, 8)
    breaks = np.array(data.draw(breaks))
    closed = data.draw(st.lists(sides, min_size=len(breaks), max_size=len(breaks)))
    rounded = round_breaks(breaks, closed)
    assert rounded.dtype == np.float32
    with np.errstate(over="ignore"):
        near = breaks.astype(np.float32)
        x = np.concatenate([near, *(np.nextafter(near, F(end)) for end in (9e9, -9e9))])
    for value in x:
        for side, exact, fast in zip(closed, breaks, rounded, strict=True):
            assert is_behind(value, exact, side) == is_behind(value, fast, side)


def test_call_takes_any_shape():
    table = make()
    x = np.array([[-3.0, -2.0, -1.5], [-1.0, 0.5, 3.0]], np.float32)
    assert table.code(x).tolist() == [[1, 1, 0], [2, 2, 2]]
    assert table(x).tolist() == [[0.25, 0.25, -0.1], [0.5, 0.5, 0.5]]
    assert table(x).dtype == np.float64 and table.code(x).dtype == np.int64
    assert table(2.999) == 1.0 and np.ndim(table(2.999)) == 0 and isinstance(table(2), float)
    assert table(np.zeros((0, 3))).shape == (0, 3)
    assert table([np.nan, np.inf, -np.inf]).tolist() == [0.5, 0.5, 0.25]


def test_interval_tables_keep_their_order():
    table = make(
        form="intervals", levels=[0.0, 1.0, -0.5, 1.0], breaks=[-1.0, 0.0, 1.0], codes=range(4), closed=None
    )  # fmt: skip
    assert table([-2.0, 0.0, 0.5, 5.0]).tolist() == [0.0, 1.0, -0.5, 1.0]


def test_one_level_without_breaks():
    table = make(levels=[1.0], breaks=[], codes=[0], closed=[], error=0.0, lower_bound=0.0)
    assert table([-1e9, 0.0, np.nan]).tolist() == [1.0, 1.0, 1.0]
    assert table.exact and table.gap == 0.0 and table.n_pieces == 1


@pytest.mark.parametrize("side", ["right", "left"])
def test_stand_in_jumps_on_the_right_side(side):
    table = make_jump(side)
    below, above = np.nextafter(0.1, [-1.0, 1.0])
    at = 0.3 if side == "right" else 0.9
    assert table([below, 0.1, above]) == pytest.approx([0.3, at, 0.9], abs=1e-12)
    assert table([-1e300, -np.inf, 2.5, np.inf, np.nan]).tolist() == [0.0, 0.0, -0.2, -0.2, -0.2]
    left, right = np.linspace(-1, 0.09, 99), np.linspace(0.11, 2, 99)
    assert table(left) == pytest.approx(np.interp(left, [-1, 0.1], [0, 0.3]), abs=1e-14)
    assert table(right) == pytest.approx(np.interp(right, [0.1, 2], [0.9, -0.2]), abs=1e-14)


def test_mean_is_clipped_to_the_levels():
    knots = Knots([-2.0, -1.0, -1.0, 1.0, 1.0, 2.0], [0.0, 0.0, 1.5, 1.5, 0.2, 0.2])
    levels = [0.1, 0.3, 0.6, 0.9]
    table = make_unbiased(levels=levels, breaks=[-1, 1], codes=[0, 2, 0], closed=None, knots=knots)
    assert table([-2.0, 0.0, 2.0]) == pytest.approx([0.1, 0.9, 0.2])
    assert set(table.sample(np.linspace(-4, 4, 33), 1)) <= set(table.levels)


@pytest.mark.parametrize(
    "make", [make_unbiased, partial(make_jump, "right"), partial(make_jump, "left")]
)
def test_lower_pieces_describe_the_lower_level(make):
    table = make()
    x = np.linspace(-9, 9, 2000)
    gap = np.abs(np.clip(table.knots(x), *table.levels[[0, -1]])[:, None] - table.levels).min(
        axis=1
    )
    x = x[gap > 1e-9]  # on a level itself rounding decides
    assert np.array_equal(table.codes[locate(x, table.breaks, table.closed)], table.code(x))


F = np.float32


def round_down(value):
    near = F(value)
    return near if float(near) <= value else np.nextafter(near, F(-np.inf))


def naive_draw(table, x, element, seed):
    """Return one draw by the operations of docs/reference/table_schema.md, one float32 operation at a time."""
    document, x = table.document(), F(x)
    levels = document["levels"]
    points, values = document["knots"]["points"], document["knots"]["values"]
    closed = document["knots"].get("closed", ["right"] * len(points))
    s = sum(is_behind(float(x), *pair) for pair in zip(points, closed, strict=True))
    if 0 < s < len(points):
        p, width = points[s - 1], points[s] - points[s - 1]
        slope = F((values[s] - values[s - 1]) / width) if width > 0 else F(0)
        start = round_down(p) if closed[s - 1] == "right" else -round_down(-p)
        mean = F(values[s - 1]) + (x - start) * slope
    else:
        mean = F(values[0 if s == 0 else -1])
    mean = min(max(mean, F(levels[0])), F(levels[-1]))
    k = max([j for j in range(len(levels) - 1) if F(levels[j]) <= mean], default=0)
    probability = (mean - F(levels[k])) * F(1 / (levels[k + 1] - levels[k]))
    assert mean.dtype == probability.dtype == np.float32
    key = seed % 2**32, seed % 2**64 // 2**32
    word = philox.philox4x32((element % 2**32, element // 2**32, 0, 0), key)[0]
    return k + (F(int(word) >> 8) * F(2**-24) < probability)


@pytest.mark.parametrize("table", [make_unbiased(), make_jump("right"), make_jump("left")])
@pytest.mark.parametrize("seed", [-3, 2**63 + 12345])
def test_sample_against_a_loop(table, seed):
    odd = [0.1, F(0.1), np.nextafter(F(0.1), F(0)), -4, 4, 1e30, -1e30, 1e300]
    x = np.concatenate([np.random.default_rng(0).normal(0, 1.5, 200), odd])
    kept = np.clip(x, -3e38, 3e38)
    expected = [naive_draw(table, value, i, seed) for i, value in enumerate(kept)]
    assert table.sample_code(x, seed).tolist() == expected
    assert table.sample(x, seed).tolist() == table.levels[expected].tolist()
    beyond = table.sample_code([np.nan, np.inf], seed)
    assert beyond.tolist() == table.sample_code([1e30, 1e30], seed).tolist()


def test_sample_keeps_shape_and_counts_in_c_order():
    table, x = make_unbiased(), np.linspace(-3, 3, 24).reshape(4, 6)
    assert np.array_equal(table.sample(x, 3), table.sample(x.ravel(), 3).reshape(4, 6))
    assert np.array_equal(table.sample(np.asfortranarray(x), 3), table.sample(x, 3))
    assert not np.array_equal(table.sample(x, 3), table.sample(x, 4))
    assert np.ndim(table.sample(0.5, 1)) == 0 and table.sample(0.5, 1) in table.levels


def test_sample_needs_an_unbiased_table():
    expected = "objective: expected \"unbiased\" to draw from, got 'mse'"
    with pytest.raises(TableError, match=expected):
        make().sample(0.0, 1)


KNOTS = Knots([-1.0, 1.0], [0.0, 1.0])

SOLVER = {"version": "1", "grid": 1}
HISTOGRAM = {"kind": "histogram", "edges": [0, 1]}
REFUSED = [
    (dict(function=""), "function: expected at least 1 character, got ''"),
    (dict(parameters={"a": math.nan}), "parameters.a: expected a finite number, got nan"),
    (dict(parameters=[1]), "parameters: expected an object, got [1]"),
    (dict(bits=9), "bits: expected at most 8, got 9"),
    (dict(bits=True), "bits: expected an integer, got True"),
    (dict(bits=1), "levels: expected 1 to 2 numbers for 1 bit, got 4"),
    (dict(form="steps"), 'form: expected one of "levels", "intervals", got \'steps\''),
    (dict(objective="l2"), 'objective: expected one of "mse", "unbiased", "minimax", got \'l2\''),
    (dict(tails="cut"), 'tails: expected one of "free", "pinned", got \'cut\''),
    (dict(domain=(1, 1)), "domain: expected two numbers a < b, got (1, 1)"),
    (dict(domain=(0.0, 5e-324)), "domain: expected ends that differ by 1e-09 of the larger one at least"),
    (dict(domain=(-1e308, 1e308)), "domain[0]: expected a number that is finite in float32, got -1e+308"),
    (dict(domain=(0, math.inf)), "domain[1]: expected a number that is finite in float32, got inf"),
    (dict(weight={"kind": "scales", "low": 2.0, "high": 1.0}), "weight.high: expected a number above low, 2, got 1"),
    (dict(weight={"kind": "scales", "low": 0.0, "high": 1.0}), "weight.low"),
    (dict(weight={"kind": "flat"}), 'weight.kind: expected one of "uniform", "normal", "scales", "histogram", "callable", got'),
    (dict(weight={"kind": "normal", "mean": 0}), 'weight: expected the field "std", got none'),
    (dict(weight={"kind": "normal", "mean": 0, "std": 0}), "weight.std: expected more than 0, got 0"),
    (dict(weight=HISTOGRAM | {"edges": [0, 0], "density": [1]}), "weight.edges[1]: expected more than the"),
    (dict(weight=HISTOGRAM | {"density": [0]}), "weight.density: expected numbers that are not all 0"),
    (dict(weight=HISTOGRAM | {"density": [1, 1]}), "weight.density: expected 1 item to"),
    (dict(levels=[0, 1, 1, 2]), "levels[2]: expected more than the previous 1.0, got 1.0"),
    (dict(levels=[0, 1, 2, math.nan]), "levels[3]: expected a number that is finite in float32, got nan"),
    (dict(levels=[[0, 1]]), "levels: expected a list of numbers, got [[0, 1]]"),
    (dict(levels=[]), "codes[0]: expected an integer in [0, 0), got 1"),
    (dict(breaks=[-2, -1, -1, 3]), "breaks[2]: expected more than the previous -1.0, got -1.0"),
    (dict(breaks=[-2, -1, 0, math.inf]), "breaks[3]: expected a finite number, got inf"),
    (dict(breaks=[-2, -1], closed=None), "breaks: expected 4 items to match the pieces in codes, got 2"),
    (dict(codes=[1, 0, 2, 4, 2]), "codes[3]: expected an integer in [0, 4), got 4"),
    (dict(codes=[1, 0, -1, 3, 2]), "codes[2]: expected an integer in [0, 4), got -1"),
    (dict(codes=[1, 0, 2, 2, 1]), "codes[3]: expected another level than the previous piece's, got 2"),
    (dict(codes=[]), "codes: expected a list of integers, got []"),
    (dict(form="intervals"), "codes: expected 0 ... 3 in form intervals, got [1, 0, 2, 3, 2]"),
    (dict(closed=["right"]), "closed: expected 4 items to match breaks, got 1"),
    (dict(closed=["up"] * 4), 'closed[0]: expected one of "right", "left", got \'up\''),
    (dict(error=-1), "error: expected at least 0, got -1"),
    (dict(error="1"), "error: expected a number, got '1'"),
    (dict(lower_bound=0.11), "lower_bound: expected at most the error 0.1, got 0.11"),
    (dict(revision=0), "revision: expected at least 1, got 0"),
    (dict(solver={"version": "1"}), 'solver: expected the field "grid", got none'),
    (dict(solver=SOLVER | {"seconds": -1}), "solver.seconds: expected at least 0, got -1"),
    (dict(solver=SOLVER | {"f": len}), "solver.f: expected a value that JSON can hold, got"),
    (dict(objective="unbiased"), "knots: expected knots for objective unbiased, got None"),
    (dict(knots=Knots([-1.0, 1.0], [0.0, 1.0])), "knots: expected none for objective mse, got Knots("),
]  # fmt: skip

REFUSED_UNBIASED = [
    (dict(knots_error=None), "knots.error: expected a finite number of at least 0, got None"),
    (dict(form="intervals", breaks=[0, 1, 2], codes=range(4), closed=None), 'form: expected "levels" for objective'),
    (dict(levels=[1.0], breaks=[], codes=[0], closed=None), "levels: expected at least 2 numbers for objective unb"),
    (dict(levels=[0, 1e-40, 0.5, 1]), "levels[1]: expected a gap that float32 can divide by, got 1e-40"),
    (dict(breaks=[], codes=[3], closed=None), "codes[0]: expected a lower level, in [0, 3), got 3"),
    (dict(breaks=[-9.0], codes=[0, 2], closed=None), "codes[1]: expected the level below the stand-in, "),
]  # fmt: skip

SLOPE = "points[1]: expected a segment whose slope is finite in float32, got "
REFUSED_KNOTS = [
    (([0], [0]), "points: expected at least 2 numbers, got 1"),
    (([0, 1], [0, 1, 2]), "values: expected 2 items to match points, got 3"),
    (([1, 0], [0, 1]), "points[1]: expected at least the previous 1.0, got 0.0"),
    (([0, 0, 0], [0, 1, 2]), "points[2]: expected at most two equal points, got 0.0"),
    (([0, 0], [0, 1], ["right", "left"]), 'closed[1]: expected "right" as for the other knot of the jump, got '),
    (([0, 1e-300], [0, 1]), f"{SLOPE}1e-300"),
    (([0, 5e-324], [0, 1]), f"{SLOPE}5e-324"),
    (([0, 1e39], [0, 1]), "points[1]: expected a number that is finite in float32, got 1e+39"),
    (([0, 1], [0, math.inf]), "values[1]: expected a number that is finite in float32, got inf"),
]  # fmt: skip


def assert_refused(start, call, *arguments, **options):
    with pytest.raises(TableError) as caught:
        call(*arguments, **options)
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)


def message_of(value):
    return value if isinstance(value, str) else None


@pytest.mark.parametrize("changes, message", REFUSED, ids=message_of)
def test_refuses(changes, message):
    assert_refused(message, make, **changes)


@pytest.mark.parametrize("changes, message", REFUSED_UNBIASED, ids=message_of)
def test_refuses_unbiased(changes, message):
    assert_refused(message, make_unbiased, **changes)


@pytest.mark.parametrize("arguments, message", REFUSED_KNOTS, ids=message_of)
def test_refuses_knots(arguments, message):
    assert_refused(message, Knots, *arguments)


def without(document, field):
    return {key: value for key, value in document.items() if key != field}


REFUSED_DOCUMENTS = [
    (lambda d: without(d, "bits"), 'expected the field "bits", got none'),
    (lambda d: d | {"close": []}, "expected no other field than schema, function, parameters, "),
    (lambda d: d | {"schema": "fewbit.table/2"}, 'schema: expected "fewbit.table/1", got \'fewbit.table/2\''),
    (lambda d: without(d, "schema"), 'schema: expected "fewbit.table/1", got None'),
    (lambda d: [d], "expected an object with a table, got [{"),
    (lambda d: d | {"codes": [1, 0, 2, 999, 2]}, "codes[3]: expected at most 255, got 999"),
    (lambda d: d | {"weight": {"kind": "uniform", "x": 1}}, "weight: expected no other field than kind, got 'x'"),
    (lambda d: d | {"knots": {"points": [0, 0, 0], "values": [0, 0, 0], "error": 0}}, "knots.points[2]: expected at"),
]  # fmt: skip


@pytest.mark.parametrize("change, message", REFUSED_DOCUMENTS)
def test_refuses_documents(change, message):
    document = change(json.loads(make().dumps()))
    assert_refused(f"here: {message}", Table.from_document, document, where="here")


REFUSED_TEXTS = [
    ("{", "expected JSON, got other text: "),
    ("3", "expected an object with a table, got 3"),
    ('{"schema": "fewbit.table/2"}', 'schema: expected "fewbit.table/1"'),
]


@pytest.mark.parametrize("text, message", REFUSED_TEXTS, ids=range(len(REFUSED_TEXTS)))
@pytest.mark.parametrize("load", [Table.load, load_file])
def test_refuses_files(tmp_path, text, message, load):
    path = tmp_path / "gelu.json"
    path.write_text(text)
    assert_refused(f"{path}: {message}", load, path)


def test_save_and_load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = make()
    table.save("gelu.json")
    assert Table.load("gelu.json") == table and load_file("gelu.json") == [table]
    with pytest.raises(OutputExistsError, match=r"gelu\.json exists; pass force=True to overwrite"):
        table.save("gelu.json")
    replace(table, revision=2).save("gelu.json", force=True)
    assert Table.load("gelu.json").revision == 2


def test_save_and_load_several(tmp_path):
    path, listed = tmp_path / "a_function.json", [make(), make_unbiased(), make(revision=2)]
    save_tables(path, "a_function", listed)
    assert load_file(path) == listed
    documents = [table.document() for table in listed]
    several = {"schema": "fewbit.tables/1", "function": "a_function", "tables": documents}
    assert json.loads(path.read_text()) == several
    expected = "schema: expected \"fewbit.table/1\", got 'fewbit.tables/1'"
    assert_refused(f"{path}: {expected}", Table.load, path)
    save_tables(path, "a_function", [], force=True)
    assert load_file(path) == []
    other = tmp_path / "gelu.json"
    expected = "tables[0].function: expected \"gelu\", got 'a_function'"
    assert_refused(expected, save_tables, other, "gelu", [make()])
    assert not other.exists()


ERRORS_INSIDE = [
    (lambda d: d["tables"][1].update(codes=[1, 0, 2, 5, 2]), "tables[1].codes[3]: expected an integer in [0, 4), got 5"),
    (lambda d: d["tables"][1].update(bits=0), "tables[1].bits: expected at least 1, got 0"),
    (
        lambda d: d["tables"][1].update(schema="fewbit.table/2"),
        "tables[1].schema: expected \"fewbit.table/1\", got 'fewbit.table/2'",
    ),
    (lambda d: d.update(function="gelu"), "tables[0].function: expected \"gelu\", got 'a_function'"),
    (lambda d: d.pop("tables"), 'expected the field "tables", got none'),
]  # fmt: skip


@pytest.mark.parametrize("change, message", ERRORS_INSIDE)
def test_errors_inside_several_say_which(change, message, tmp_path):
    path = tmp_path / "gelu.json"
    document = json.loads(dumps_tables("a_function", [make(), make()]))
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(TableError) as caught:
        load_file(path)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize("name", schema.FILES)
def test_schemas_are_valid(name):
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(schema.load(name))
    assert schema.load(name)["title"] == name


def test_examples_in_the_documentation():
    text = (ROOT / "docs" / "reference" / "table_schema.md").read_text()
    relu6, ramp = (loads(block)[0] for block in re.findall(r"```json\n(.*?)```", text, re.S))
    assert relu6([-1.0, 0.0, 1e-300, 5.9, 6.0, 7.0]).tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    breaks, codes, closed = lower_pieces(ramp.levels, ramp.knots)
    assert np.array_equal(breaks, ramp.breaks) and np.array_equal(codes, ramp.codes)
    assert closed == ramp.closed
    # Its error: the variance of a draw under the normal weight, by the trapezoid rule.
    x = np.linspace(-4, 4, 80_001)
    mean, lower = ramp(x), ramp.code(x)
    weight = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    variance = (ramp.levels[lower + 1] - mean) * (mean - ramp.levels[lower])
    assert np.trapezoid(weight * variance, x) == pytest.approx(ramp.error, rel=1e-6)
    relative = np.sqrt(ramp.error / np.trapezoid(weight * mean**2, x))
    assert relative == pytest.approx(ramp.relative_error, rel=1e-6)


def test_documentation_names_every_field():
    text = (ROOT / "docs" / "reference" / "table_schema.md").read_text()
    document = schema.load(schema.TABLE)
    for field in [*document["properties"], *document["$defs"]["knots"]["properties"]]:
        assert f"| `{field}` |" in text


def test_repr():
    text = "Table(a_function, 2 bits, levels, mse, uniform on [-10, 10]: 4 levels, 5 pieces, error 0.1, gap 10 %)"
    assert repr(make()) == text
    exact = make(bits=1, levels=[0, 1], breaks=[0], codes=[0, 1], closed=None, error=0, lower_bound=0,
                 parameters={"slope": 0.01}, weight={"kind": "normal", "mean": 0, "std": 1})  # fmt: skip
    text = "Table(a_function(slope=0.01), 1 bit, levels, mse, normal(0, 1) on [-10, 10]: 2 levels, 2 pieces, exact)"
    assert repr(exact) == text


def relu6_table():
    function = SimpleNamespace(
        derivative=lambda x: ((x > 0) & (x < 6)) * 1.0,
        kinks=(0.0, 6.0),
        slopes=(0.0, 0.0),
        domain=(-10.0, 10.0),
    )
    return make(bits=1, levels=[0, 1], breaks=[0, 6], codes=[0, 1, 0], closed=None, error=0, lower_bound=0,
                _function=function)  # fmt: skip


def test_window_is_where_something_happens():
    low, high = window(relu6_table(), relu6_table()._function)
    assert -2 < low < 0 and 6 < high < 8
    low, high = window(make_unbiased(), TANH)
    assert low == pytest.approx(-high) and 2 < high < 5
    flat = make(levels=[1.0], breaks=[], codes=[0], closed=[])
    assert window(flat) == (-10.0, 10.0)


@pytest.mark.parametrize(
    ("weight", "bits", "reach"), [("normal", 2, 2.04), ("normal", 4, 3), ("uniform", 2, 10)]
)
def test_the_window_of_an_unbounded_derivative_ends_near_the_outermost_levels(weight, bits, reach):
    table = fewbit.solve("value", bits, weight=weight, domain=(-10, 10), grid=512)
    low, high = window(table, table.activation)
    assert low == pytest.approx(-reach, rel=0.2) and high == pytest.approx(reach, rel=0.2)
    assert low < table.levels.min() and table.levels.max() < high


def test_steps_are_cut_to_the_window():
    expected = [(-1.5, -1.0, -0.1, 0), (-1.0, 0.5, 0.5, 2), (0.5, 3.0, 1.0, 3), (3.0, 4.0, 0.5, 2)]
    assert steps(make(), -1.5, 4.0) == expected


@pytest.mark.parametrize(
    "name", ["this_module_does_not_exist:f", "antigravity:geohash", "sys:exit"]
)
def test_names_in_a_document_lead_to_no_import_and_no_call(name, monkeypatch):
    """Functions of imported modules are not called either: `builtins:input` would wait, `sys:exit` would end the process."""
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"imported {name}"))
    table = make(function=name)
    assert table.activation is None
    assert "f'" not in sketch(table)
    with pytest.raises(FunctionError, match="fewbit has no function"):
        recompute_error(table)
    weighted = make(function="tanh", weight={"kind": "callable", "name": name})
    with pytest.raises(WeightError, match=f"expected the callable {name} itself"):
        recompute_error(weighted)
    assert "antigravity" not in sys.modules


def test_the_function_of_a_table():
    """It is the one that the user names or has given, or else the one that fewbit knows by its name."""
    x = np.linspace(-3, 3, 7)
    named = make(function="my:tanh").with_activation("numpy:tanh")
    assert named.activation.derivative(x) == pytest.approx(TANH.derivative(x), abs=1e-10)
    assert named == make(function="my:tanh")
    known = make(function="tanh").activation.derivative(x)
    assert known == pytest.approx(TANH.derivative(x), abs=1e-14)
    assert make(function="gelu", _function=TANH).activation is TANH


EVERY_KIND = [make(), make(_function=TANH), make_unbiased(), make_unbiased(_function=None), relu6_table()]  # fmt: skip


@pytest.mark.parametrize("table", EVERY_KIND)
@pytest.mark.parametrize("width, height", [(72, 16), (30, 6)])
def test_sketch(table, width, height):
    lines = sketch(table, width, height).splitlines()
    assert len(lines) == height
    assert all(len(line) <= width for line in lines[:-1])
    drawn = set("".join(lines[:-3]))
    assert drawn & set("▔─▁") or table.exact
    braille = any(0x2800 < ord(character) < 0x2900 for character in drawn)
    assert braille == (table._function is not None or table.objective == "unbiased")


@pytest.mark.fast(2)
@pytest.mark.parametrize("table", EVERY_KIND)
def test_plot(table, tmp_path):
    table.plot(tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_plot_files(tmp_path):
    table = relu6_table()
    figure = plot_table(table, tmp_path / "table.svg")
    assert len(figure.axes) == 2 and "<svg" in (tmp_path / "table.svg").read_text()
    with pytest.raises(OutputExistsError):
        plot_table(table, tmp_path / "table.svg")
    expected = r"table\.pdf: expected a file name that ends in \.png or \.svg"
    with pytest.raises(FewbitError, match=expected):
        plot_table(table, "table.pdf")
    with pytest.raises(FewbitError, match="expected at least one table"):
        plot_grid([])
    figure = plot_grid([table, make_unbiased(), make(function="b")], tmp_path / "grid.png")
    assert len(figure.axes) == 4
    # Names in a file are no formulas.
    name = r"$\nonsense{$"
    table = make(function=name, weight={"kind": "callable", "name": name}, parameters={name: 1.0})
    table.plot(tmp_path / "a.svg")
    plot_grid([table], tmp_path / "b.svg")


def test_plot_into_given_axes():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    assert plot_table(relu6_table(), ax=axes) is axes.figure
    x, y = axes.lines[-1].get_data()
    assert np.isnan(y).sum() == 2  # f' is not joined across its two jumps
    assert set(y[~np.isnan(y)]) == {0.0, 1.0}


def test_the_error_is_drawn_between_the_breaks_and_kinks():
    """No point lies at an edge or beyond, where f' and the table have other values."""
    table = relu6_table()
    edges = [-1.0, 0.0, 6.0, 7.0]
    parts = np.split(_between(edges), np.flatnonzero(np.isnan(_between(edges))))
    assert len(parts) == 3
    for part, low, high in zip(parts, edges, edges[1:], strict=False):
        points = part[~np.isnan(part)]
        assert low < points[0] < low + 1e-4 and high - 1e-4 < points[-1] < high
    figure = plot_table(table)
    assert (
        abs(np.nan_to_num(figure.axes[-1].lines[-1].get_ydata())).max() == 0
    )  # the table of ReLU6 is exact


@pytest.mark.slow
def test_html():
    text = relu6_table()._repr_html_()
    assert "data:image/png;base64," in text and "(-∞, 0]" in text and "(6, ∞)" in text
    text = make(function="<b>")._repr_html_()
    assert "&lt;b&gt;" in text and "<b>," not in text


def test_html_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "<img" not in make()._repr_html_()
    with pytest.raises(FewbitError, match="plotting needs matplotlib"):
        make().plot()
