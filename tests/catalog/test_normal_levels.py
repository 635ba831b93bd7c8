"""The levels for normal numbers: symmetric, optimal by the conditions of Lloyd and Max, and as published."""

import math

import numpy as np
import pytest
from scipy.special import ndtr

from fewbit import functions
from fewbit.catalog.normal_levels import normal_levels, rotated_levels
from fewbit.catalog.store import shipped_tables
from fewbit.errors import TableError

BITS = range(1, 9)
# Max (1960), table I, errors of 2, 4, 8, 16, 32 levels. His last digits are not exact: the certified optimum of 32
# levels is 0.0025047, and his number is 0.002499.
PUBLISHED = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}


def shipped(bits):
    (table,) = (t for t in shipped_tables("value") if t.bits == bits)
    return table


def density(x):
    return np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def whole(bits):
    breaks, levels = map(np.array, normal_levels(bits))
    return np.concatenate([-breaks[::-1], [0.0], breaks]), np.concatenate([-levels[::-1], levels])


@pytest.mark.parametrize("bits", BITS)
def test_the_halves_are_the_shipped_tables(bits):
    table = shipped(bits)
    breaks, levels = whole(bits)
    assert np.array_equal(table.breaks, breaks) and np.array_equal(table.levels, levels)
    assert np.array_equal(table.codes, np.arange(2**bits))
    assert all(np.diff(breaks) > 0) and all(np.diff(levels) > 0)
    assert all(type(number) is float for half in normal_levels(bits) for number in half)


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_means_and_breaks_are_midpoints(bits):
    """On the whole line, so that the domain's ends are seen to change nothing."""
    breaks, levels = whole(bits)
    ends = np.concatenate([[-np.inf], breaks, [np.inf]])
    mass = np.diff(ndtr(ends))
    # ndtr is less precise near 1, so the upper half is taken from the lower half.
    half = len(levels) // 2
    mass[half:] = mass[:half][::-1]
    means = -np.diff(density(ends)) / mass
    assert levels == pytest.approx(means, abs=1e-9)
    assert breaks == pytest.approx(0.5 * (levels[1:] + levels[:-1]), abs=1e-9)
    error = 1.0 - np.sum(mass * levels**2)
    table = shipped(bits)
    assert table.error == pytest.approx(error, rel=1e-9)
    assert table.gap <= 1e-4
    if bits in PUBLISHED:
        assert table.error == pytest.approx(PUBLISHED[bits], rel=3e-3)


def variance(breaks, levels):
    """Return the squared error that EDEN's scale leaves for normal numbers and these positive breaks and levels."""
    ends = np.array([0.0, *breaks, np.inf])
    mass, first = np.diff(ndtr(ends)), -np.diff(density(ends))
    levels = np.array(levels, float)
    return 0.5 * (levels**2 * mass).sum() / (levels * first).sum() ** 2 - 1.0


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_rotated_levels_cost_little(bits):
    breaks, levels = normal_levels(bits)
    chosen = np.array(rotated_levels(bits))
    assert len(chosen) == len(levels) and all(np.diff([0, *chosen]) > 0)
    assert 0.8 < chosen[-1] / levels[-1] < 1.3
    units = next(2**k for k in range(14) if not (chosen * 2**k % 1).any())
    assert units <= 2 ** {8: 13, 7: 11, 6: 9}.get(bits, 7)
    # Sums of 256 levels are exact in float32, and fit into 16 bits up to 4 bits.
    assert 256 * chosen[-1] * units < (2**15 if bits <= 4 else 2**24)
    least = variance(breaks, levels)
    assert least - 1e-12 <= variance(breaks, chosen) <= 1.0011 * least
    # No other greatest level within the limit is better.
    limit = 127 if bits <= 4 else 2 ** (2 * bits - 1) - 1
    assert chosen[-1] * units <= limit
    scaled = [np.round(np.array(levels) / levels[-1] * most) for most in range(1, limit + 1)]
    others = [variance(breaks, other) for other in scaled if other[0] > 0]
    assert variance(breaks, chosen) == pytest.approx(min(others), rel=1e-9)


@pytest.mark.parametrize("bits", [0, 9, 2.5, None])
def test_other_bits(bits):
    for function in (normal_levels, rotated_levels):
        with pytest.raises(TableError, match="bits: expected 1 to 8"):
            function(bits)


def test_value_is_no_activation():
    assert functions.solver_names() == ("value",)
    assert "value" not in functions.names() and "value" not in functions.modules().values()
    value = functions.get("value")
    x = np.array([-np.inf, -3.5, 0.0, 2.0, np.inf])
    assert np.array_equal(value.derivative(x), x)
    assert np.array_equal(value.value(x), x * x / 2)
