"""Objective shared: exactly unbiased codes, the best encoder, errors by quadrature, and the lower bound."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import solved
from scipy.optimize import linprog
from scipy.special import ndtr, ndtri

from fewbit.catalog.shipping import SHARED
from fewbit.catalog.store import load_table
from fewbit.catalog.verification import recompute_error
from fewbit.errors import SolveError, TableError
from fewbit.runtime.format.encoding import Encoding
from fewbit.solver.drawn import shared as drawn
from fewbit.solver.solve import solve
from fewbit.table import Table
from fewbit.table.staircase import build_staircase, draw_codes, draw_variance

LIMIT = 2.9
WIDE = 3.097
"""QUIC-FL sends one number in 512 exactly, so the others lie within 3.097 standard deviations."""


def code(bits, shared_bits, limit=LIMIT, **more):
    options = {"weight": "normal", "objective": "shared", "domain": (-limit, limit)}
    return solved("value", bits, shared_bits=shared_bits, **options, **more)


def shipped(bits):
    shared_bits, limit = SHARED[bits]
    options = {"weight": "normal", "objective": "shared", "domain": (-limit, limit)}
    return load_table("value", bits, shared_bits=shared_bits, **options)


def mass_of(limit):
    return float(ndtr(limit) - ndtr(-limit))


def random_levels(seed, rows, columns):
    """Return levels with ascending rows, (rows, columns)."""
    levels = np.random.default_rng(seed).standard_normal((rows, columns))
    return np.sort(levels, axis=1) + 0.01 * np.arange(columns)


def least_variance(levels, z):
    """Return the least variance of an unbiased encoder for z by a linear program over the probabilities of codes."""
    rows, columns = levels.shape
    sums = np.kron(np.eye(rows), np.ones(columns))
    constraints = np.vstack([sums, levels.ravel() / rows])
    found = linprog(levels.ravel() ** 2 / rows, A_eq=constraints, b_eq=np.append(np.ones(rows), z))
    assert found.status == 0
    return found.fun - z * z


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1), rows=st.sampled_from([1, 2, 4, 8]), columns=st.integers(2, 6)
)
def test_states_ascend_one_transition_at_a_time(seed, rows, columns):
    levels = random_levels(seed, rows, columns)
    means, codes, slopes = build_staircase(levels)
    assert codes.shape == (rows * (columns - 1) + 1, rows)
    assert not codes[0].any() and np.all(codes[-1] == columns - 1)
    assert np.all(np.diff(codes.sum(axis=1)) == 1) and np.all(np.diff(codes, axis=0) >= 0)
    assert np.all(np.diff(means) > 0) and np.all(np.diff(slopes) >= 0)
    for state in (0, len(means) // 2, -1):
        level = [levels[h, codes[state, h]] for h in range(rows)]
        assert means[state] == pytest.approx(np.mean(level), abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.sampled_from([1, 2, 4]),
    columns=st.integers(2, 5),
    share=st.floats(0.0, 1.0),
)
def test_no_unbiased_encoder_has_a_smaller_variance(seed, rows, columns, share):
    levels = random_levels(seed, rows, columns)
    means = build_staircase(levels).means
    z = means[0] + share * (means[-1] - means[0])
    assert draw_variance(levels, z) == pytest.approx(least_variance(levels, z), abs=1e-8)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), rows=st.sampled_from([1, 2, 8]), columns=st.integers(2, 6))
def test_draws_are_exactly_unbiased(seed, rows, columns):
    """All h, and evenly spaced noise instead of random noise, so that the mean deviates by at most one draw."""
    levels = random_levels(seed, rows, columns)
    means = build_staircase(levels).means
    z = np.random.default_rng(seed).uniform(means[0], means[-1], 20)
    count = 1000
    noise = (np.arange(count) + 0.5) / count
    shared, draws = np.arange(rows)[:, None, None], noise[:, None]
    shape = (rows, count, len(z))
    codes = draw_codes(levels, *(np.broadcast_to(part, shape) for part in (z, shared, draws)))
    restored = np.take_along_axis(levels, codes.reshape(rows, -1), axis=1).reshape(shape)
    widest = np.diff(means).max()
    assert np.abs(restored.mean(axis=(0, 1)) - z).max() <= widest / count + 1e-12
    measured = ((restored - z) ** 2).mean(axis=(0, 1))
    bound = 2 * np.abs(levels).max() * np.diff(levels, axis=1).max() / count
    assert np.abs(measured - draw_variance(levels, z)).max() <= bound + 1e-9


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_shipped_code_is_unbiased_with_the_claimed_error(bits):
    shared_bits, limit = SHARED[bits]
    check_code(shipped(bits), bits, shared_bits, limit)


def test_a_short_search_gives_a_valid_code(monkeypatch):
    """The search for the lower bound takes most of the time, so it is cut short."""
    monkeypatch.setattr(drawn, "_REFERENCE_ROWS", 2)
    monkeypatch.setattr(drawn, "_ASCENTS", {256: (2, 0.1)})
    options = {"weight": "normal", "objective": "shared", "domain": (-LIMIT, LIMIT)}
    table = solve("value", 1, shared_bits=1, **options)
    check_code(table, 1, 1, LIMIT)
    assert recompute_error(table) == pytest.approx(table.error, rel=1e-9)


def error_of(z, variance):
    """Return the error for a variance at every z, under the normal weight."""
    return np.trapezoid(variance * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi), z)


def check_code(table, bits, shared_bits, limit):
    """Check the shape, the mean and the error of a code for normal numbers from -limit to limit."""
    assert table.shared_levels.shape == (2**shared_bits, 2**bits)
    assert table.shared_bits == shared_bits and table.solver["status"] == "stationary"
    stairs = build_staircase(table.shared_levels)
    z = np.linspace(-limit, limit, 20_001)
    state = np.clip(np.searchsorted(stairs.means, z, side="right") - 1, 0, len(stairs.means) - 2)
    share = (z - stairs.means[state]) / (stairs.means[state + 1] - stairs.means[state])
    assert share.min() >= -1e-12 and share.max() <= 1 + 1e-12
    # (N, H), the levels of every state
    levels = np.take_along_axis(table.shared_levels.T, stairs.codes, axis=0)
    first, second = levels.mean(axis=1), (levels**2).mean(axis=1)
    mean = (1 - share) * first[state] + share * first[state + 1]
    assert np.abs(mean - z).max() < 1e-13
    square = (1 - share) * second[state] + share * second[state + 1]
    assert table.error == pytest.approx(error_of(z, square - z * z), rel=1e-4)
    assert 0 < table.lower_bound <= table.error


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_without_shared_bits_it_is_objective_unbiased(bits):
    table = code(bits, 0)
    plain = solved("value", bits, weight="normal", objective="unbiased", domain=(-LIMIT, LIMIT))
    assert np.array_equal(table.shared_levels, plain.levels[None])
    assert np.array_equal(table.levels, plain.levels)
    assert (table.error, table.lower_bound) == (plain.error, plain.lower_bound)


@pytest.mark.slow
def test_one_bit_reaches_the_limit_of_unlimited_shared_randomness():
    """With one bit the limit has a closed form: t has Student's distribution with 2 degrees of freedom."""
    u = (np.arange(2_000_000) + 0.5) / 2_000_000
    mass = mass_of(LIMIT)
    z = ndtri(ndtr(-LIMIT) + mass * u)
    student = (2 * u - 1) / (2 * np.sqrt(u * (1 - u)))
    limit = mass * (np.mean(z * student) ** 2 - np.mean(z * z))
    table = code(1, 6)
    assert 0.97 * limit <= table.lower_bound <= limit * (1 + 1e-3)
    assert limit < table.error < 1.02 * limit


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), size=st.floats(1e-6, 0.5))
def test_no_other_levels_are_better_than_the_bound_or_slightly_moved_ones_than_the_code(seed, size):
    table = shipped(2)
    assert table.domain == (-LIMIT, LIMIT)
    levels = np.array(table.shared_levels)
    moved = levels + size * np.random.default_rng(seed).standard_normal(levels.shape)
    moved.sort(axis=1)
    moved[:, 0] -= moved[:, 0].mean() + LIMIT
    moved[:, -1] -= moved[:, -1].mean() - LIMIT
    moved.sort(axis=1)
    if build_staircase(moved).means[0] <= -LIMIT + 1e-9:
        z = np.linspace(-LIMIT, LIMIT, 10_001)
        error = error_of(z, draw_variance(moved, z))
        assert error >= table.lower_bound
        assert error >= table.error * (1 - 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "shared_bits", "published"), [(1, 6, 1.47), (2, 5, 0.215), (4, 4, 0.0097)]
)
def test_the_errors_are_those_of_quic_fl(bits, shared_bits, published):
    table = code(bits, shared_bits, limit=WIDE)
    assert table.error / mass_of(WIDE) == pytest.approx(published, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "weight"), [("tanh", "uniform"), ("selu", "normal")])
def test_shared_randomness_helps_derivatives_too(name, weight):
    plain = solved(name, 2, weight=weight, objective="unbiased")
    table = solved(name, 2, weight=weight, objective="shared", shared_bits=3)
    assert table.lower_bound <= table.error < 0.9 * plain.error
    assert recompute_error(table) == pytest.approx(table.error, rel=1e-6)


@pytest.mark.slow
def test_without_refinement():
    raw = code(2, 2, refine=False)
    assert raw.solver["status"] == "unrefined"
    assert code(2, 2).error < raw.error
    assert recompute_error(raw) == pytest.approx(raw.error, rel=1e-9)


REFUSED = [
    ({"shared_bits": 9}, "shared_bits: expected an integer from 0 to 8, got 9"),
    ({"shared_bits": True}, "shared_bits: expected an integer from 0 to 8, got True"),
    ({"bits": 8, "shared_bits": 5}, "expected at most 4096 levels in all, got 256 times 32"),
    ({"tails": "pinned"}, "objective shared: expected tails free"),
    ({"form": "intervals"}, "objective shared: expected form levels"),
    ({"objective": "mse", "shared_bits": 2}, "shared_bits: expected none for objective mse"),
]


@pytest.mark.parametrize(("request_", "message"), REFUSED)
def test_wrong_requests(request_, message):
    with pytest.raises(SolveError, match=message):
        solve("gelu", **({"bits": 2, "objective": "shared"} | request_))


def test_a_constant_derivative_and_layers_are_refused():
    with pytest.raises(SolveError, match="expected a derivative that varies"):
        solve("identity", 2, objective="shared")
    expected = "objective: expected mse, unbiased or minimax for a layer"
    with pytest.raises(TableError, match=expected):
        Encoding.of(shipped(1))


def test_the_document_round_trips():
    table = shipped(2)
    assert Table.from_document(json.loads(table.dumps())) == table
    assert table.document()["shared_levels"] == table.shared_levels.tolist()
    assert "shared_levels" not in solved("gelu", 2).document()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("shared_levels"), "shared_levels: expected a list of rows"),
        (lambda d: d["shared_levels"].pop(), "shared_levels: expected a power of two of rows"),
        (lambda d: d["shared_levels"][1].pop(), r"shared_levels\[1\]: expected 4 items"),
        (lambda d: d["shared_levels"][1].reverse(), r"shared_levels\[1\]\[1\]: expected more than"),
        (lambda d: d["shared_levels"][0].__setitem__(0, -9.0), r"levels\[0\]: expected the mean"),
        (lambda d: d["shared_levels"].__setitem__(0, "a"), r"shared_levels\[0\]"),
        (lambda d: d.pop("knots"), "knots: expected knots for objective shared"),
        (lambda d: d.__setitem__("objective", "unbiased"), "shared_levels: expected none"),
    ],
)
def test_damaged_documents(change, message):
    document = shipped(2).document()
    change(document)
    with pytest.raises(TableError, match=message):
        Table.from_document(document)
