"""The errors of quantizers by bits: the formulas against simulations, published figures and bounds."""

import csv
import io
import json
import math

import numpy as np
import pytest

from fewbit.catalog.quantizers import (
    GROUP,
    QuantizerComparison,
    compare_quantizers,
    restore_rotated,
    restore_uniform,
    rotated_error,
    rotated_limit,
    uniform_error,
    walsh_hadamard,
)
from fewbit.errors import FewbitError
from fewbit.render.terminal import plain


@pytest.fixture(scope="module")
def rows():
    """Return the rows of 1 and 4 bits, which every test shares."""
    return compare_quantizers((1, 4)).rows


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7, 8])
def test_measured_errors_of_other_bits_agree_with_computed_ones(bits):
    check_row(compare_quantizers(bits).rows[0], bits)


def test_measured_errors_agree_with_computed_ones(rows):
    for row, bits in zip(rows, (1, 4), strict=True):
        check_row(row, bits)


def check_row(row, bits):
    assert row.bits == bits
    assert row.uniform_measured == pytest.approx(row.uniform, rel=0.01)
    assert row.rotated_measured == pytest.approx(row.rotated, rel=0.01)
    assert row.unbiased_measured == pytest.approx(row.unbiased, rel=0.01)
    assert row.bound == 1 / (4**row.bits - 1)
    assert row.bound < row.unbiased
    assert row.bound < row.rotated < row.uniform


def test_published_errors():
    """The distortion of one bit is pi / 2 - 1 (DRIVE, Vargaftik et al., 2021)."""
    limits = [rotated_limit(bits) for bits in (1, 2, 3, 4)]
    assert limits[0] == pytest.approx(math.pi / 2 - 1, rel=1e-9)
    assert limits == pytest.approx([0.571, 0.133, 0.0358, 0.0096], rel=3e-3)


def test_columns_have_different_titles_and_a_legend_only_if_they_are_shown(rows):
    comparison = QuantizerComparison(tuple(rows))
    titles = [column.title for column in comparison.view().columns]
    assert len(set(titles)) == len(titles) == 9
    narrow, wide = plain(comparison, 80), plain(comparison, 120)
    assert "limit: rotated" not in narrow and "columns left out: limit" in narrow
    assert "limit: rotated" in wide and "left out" not in wide


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_long_groups_reach_the_limit(bits):
    assert rotated_error(bits, 2**20) == pytest.approx(rotated_limit(bits), rel=1e-4)


def test_uniform_error_of_two_numbers_is_zero():
    """Both numbers of a group of two are levels."""
    assert uniform_error(1, 2) == 0.0


def test_uniform_error_of_three_numbers():
    """The middle one of three numbers is rounded to the outer two, which makes an error of (m - l)(u - m)."""
    low, middle, high = np.sort(np.random.default_rng(1).standard_normal((400_000, 3)), axis=1).T
    # Three numbers may be close to 0 together, where the quadrature for 256 numbers has no points.
    is_wide = (low < -0.5) & (high > 0.5)
    measured = np.mean(np.where(is_wide, (middle - low) * (high - middle), 0.0)) / 3
    assert uniform_error(1, 3) == pytest.approx(measured, rel=0.01)


def test_walsh_hadamard_is_sylvesters_matrix():
    matrix = np.ones((1, 1))
    while len(matrix) < 16:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    assert walsh_hadamard(np.eye(16)) == pytest.approx(matrix / 4, abs=1e-15)


def test_restored_groups_are_levels_of_the_group():
    random = np.random.default_rng(2)
    x = random.standard_normal((7, GROUP))
    restored = restore_uniform(x, 2, random.random(x.shape))
    for group, got in zip(x, restored, strict=True):
        levels = np.linspace(group.min(), group.max(), 4)
        assert np.abs(got[:, None] - levels).min(axis=1).max() < 1e-12
        assert np.abs(got - group).max() < levels[1] - levels[0]


def test_rounding_is_unbiased():
    """The mean of many draws is the input, within 5 standard deviations."""
    random = np.random.default_rng(3)
    x = np.repeat(random.standard_normal((1, GROUP)), 2_000, axis=0)
    draws = restore_uniform(x, 1, random.random(x.shape))
    deviation = draws.std(axis=0) / math.sqrt(len(draws)) + 1e-12
    assert np.all(np.abs(draws.mean(axis=0) - x[0]) <= 5 * deviation)
    signs = random.choice([-1.0, 1.0], x.shape)
    draws = restore_rotated(x, 1, signs)
    deviation = draws.std(axis=0) / math.sqrt(len(draws))
    # The gain error of one Hadamard transform, k a**2 with a**2 the share of the energy, is below 1 % here.
    assert np.all(np.abs(draws.mean(axis=0) - x[0]) <= 5 * deviation + 0.02 * np.abs(x[0]))


def test_records_as_csv_and_json(rows):
    comparison = QuantizerComparison(rows)
    records = json.loads(comparison.to_json())
    assert records == comparison.records() and [record["bits"] for record in records] == [1, 4]
    lines = list(csv.DictReader(io.StringIO(comparison.to_csv())))
    assert [float(line["rotated"]) for line in lines] == [row.rotated for row in comparison.rows]


@pytest.mark.parametrize("bits", [0, 9, True, (2, 10)])
def test_other_bits(bits):
    with pytest.raises(FewbitError, match="bits: expected an integer from 1 to 8"):
        compare_quantizers(bits)
