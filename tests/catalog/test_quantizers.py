"""The errors of quantizers by bits: the formulas against simulations, published figures and bounds."""

import csv
import functools
import io
import json
import math

import pytest

from fewbit.catalog.quantizers import (
    QuantizerComparison,
    compare_quantizers,
    rotated_error,
    rotated_limit,
)
from fewbit.errors import FewbitError
from fewbit.render.terminal import plain


@functools.cache
def row_of(bits):
    return compare_quantizers(bits).rows[0]


@pytest.fixture
def rows():
    return row_of(1), row_of(4)


OTHER_BITS = [pytest.param(bits, marks=pytest.mark.slow) for bits in (2, 3, 5, 6, 7, 8)]


@pytest.mark.parametrize("bits", [1, 4, *OTHER_BITS])
def test_measured_errors_agree_with_computed_ones(bits):
    row = row_of(bits)
    assert row.bits == bits
    for name in ("uniform", "rotated"):
        assert getattr(row, f"{name}_measured") == pytest.approx(getattr(row, name), rel=0.01)
    assert row.bound == 1 / (4**row.bits - 1)
    assert row.bound < row.rotated < row.uniform


def test_published_errors():
    """The distortion of one bit is pi / 2 - 1 (DRIVE, Vargaftik et al., 2021)."""
    limits = [rotated_limit(bits) for bits in (1, 2, 3, 4)]
    assert limits[0] == pytest.approx(math.pi / 2 - 1, rel=1e-9)
    assert limits == pytest.approx([0.571, 0.133, 0.0358, 0.0096], rel=3e-3)
    # Long groups reach the limit.
    for bits in (1, 4, 8):
        assert rotated_error(bits, 2**20) == pytest.approx(rotated_limit(bits), rel=1e-4)


def test_columns_have_different_titles_and_a_legend_only_if_they_are_shown(rows):
    comparison = QuantizerComparison(tuple(rows))
    titles = [column.title for column in comparison.view().columns]
    assert len(set(titles)) == len(titles) == 7
    narrow, wide = plain(comparison, 60), plain(comparison, 120)
    assert "limit: rotated" not in narrow and "columns left out: limit" in narrow
    assert "limit: rotated" in wide and "left out" not in wide


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
