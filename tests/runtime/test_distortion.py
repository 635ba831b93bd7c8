"""The variance of rounding by the number of bits: predicted from sums of squares, and measured on random roundings."""

import itertools

import pytest
import torch
from samples import normal

from fewbit.catalog.normal_levels import normal_error
from fewbit.config import MASKED, ROTATED, UNIFORM
from fewbit.runtime.backends.reference_quantizer import dequantize, quantize, squares
from fewbit.runtime.format.distortion import (
    BITS,
    distortion,
    largest_distortion,
    relative_distortion,
)
from fewbit.runtime.quantizers.spec import QuantizationRecord, QuantizedTensorSpec


def errors2(x, bits, group_size, kind, draws=1, normalize=None):
    """Return the squared errors of the elements of x, averaged over roundings: float64 in the shape of x."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    exact = x if normalize is None else (x - normalize[0]) * normalize[1]
    for seed in range(draws):
        found = restored(x, bits, group_size, kind, seed, normalize)
        if kind == MASKED:
            found *= x != 0  # the mask, which a layer has anyway
        total += (found - exact).double().square()
    return total / draws


def restored(x, bits, group_size, kind, seed, normalize=None):
    """Return the values of a copy of x."""
    settings = group_size, None, None, normalize, kind
    packed, ranges = quantize(x, torch.tensor([seed]), bits, *settings)
    out = torch.empty_like(x)
    dequantize(packed, ranges, bits, group_size, out, kind=kind)
    return out


def ratio(x, bits, group_size, kind, draws=1):
    """Return the measured variance of rounding, divided by the predicted one."""
    predicted = distortion(kind, bits) * squares(x, group_size, kind=kind).double().sum()
    return float(errors2(x, bits, group_size, kind, draws).sum() / predicted)


def evenly(rows, columns, seed=0):
    """Return random numbers that are spread evenly from 0 to 1."""
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed))


# -- against measurements ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [32, 64, 256, 65, 100, 300])
@pytest.mark.parametrize("bits", BITS)
def test_rotated_copies_of_normal_numbers(bits, length):
    """Short groups have shorter tails. With many bits few numbers make most of the error."""
    x = normal((2**15 // length, length), scale=1.0, seed=bits)
    found = ratio(x, bits, length if length in (32, 64) else 256, ROTATED)
    scatter = 0.04 if bits < 6 else 0.11
    assert 1 - 4.5 / min(length, 256) - scatter < found < 1 + scatter


def _one_hot(rows):
    x = torch.zeros(rows, 256)
    x[torch.arange(rows), torch.arange(rows) % 256] = 5.0
    return x


DATA = {
    "even": lambda: evenly(128, 256),
    "relu": lambda: normal((128, 256), scale=1.0).relu(),
    "products": lambda: normal((128, 256), scale=1.0) * normal((128, 256), scale=1.0, seed=1) ** 3,
    "far from 0": lambda: 4 + normal((128, 256), scale=1.0),
    "very far from 0": lambda: (
        1000 + normal((128, 256), scale=1.0)
    ),  # most of the error is that of the bfloat16 mean
    "one hot": lambda: _one_hot(128),
    "one channel": lambda: normal((128, 256), scale=1.0) + 16 * torch.eye(256)[7],
}


OF_DATA = [  # (kind, data, numbers of bits, bounds of the ratio)
    *((ROTATED, name, (1, 2, 4, 6), 0.93, 1.05) for name in DATA),
    (MASKED, "relu", (1, 2, 4), 0.95, 1.05),
    # A range of 15 instead of 6: all numbers lie in a part of few steps.
    (UNIFORM, "very far from 0", (4, 6), 0.9, 1.1),
]


@pytest.mark.parametrize(
    "kind, name, bits, least, most",
    [(kind, name, bits, *limits) for kind, name, several, *limits in OF_DATA for bits in several],
)
def test_copies_of_other_data(kind, name, bits, least, most):
    """The prediction does not depend on the distribution. Elements of few values differ from it by a few percent."""
    assert least < ratio(DATA[name](), bits, 256, kind, 2) < most


def test_masks_make_energies_smaller():
    x = DATA["relu"]()
    assert squares(x, 256, kind=MASKED).sum() < 0.3 * squares(x, 256, kind=ROTATED).sum()


@pytest.mark.parametrize("group_size", [32, 256, 1024])
@pytest.mark.parametrize("bits", BITS)
def test_uniform_copies_of_evenly_spread_numbers(bits, group_size):
    x = evenly(2**15 // group_size, group_size, bits)
    # The least and the greatest number of a group have no error.
    assert 1 - 2 / group_size - 0.03 < ratio(x, bits, group_size, UNIFORM) < 1.03


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_distortion_of_uniform_copies(bits):
    """It is reached midway between two codes, and no data is above it."""
    top = 2**bits - 1
    middle = (torch.arange(256.0) % top + 0.5) / top
    middle[0], middle[1] = 0.0, 1.0
    limit = largest_distortion(UNIFORM, bits)
    x = middle.expand(64, 256).contiguous()
    for data, least in ((x, 0.97), (evenly(64, 256), 0.0), (normal((64, 256), scale=1.0), 0.0)):
        found = errors2(data, bits, 256, UNIFORM, 2).sum() / squares(data, 256).double().sum()
        assert least < float(found) / limit < 1.03
    assert largest_distortion(UNIFORM, bits) == pytest.approx(1.5 * distortion(UNIFORM, bits))
    assert largest_distortion(ROTATED, bits) == distortion(ROTATED, bits)


# -- the numbers -------------------------------------------------------------------------------------------


def test_rotated_distortions():
    """D / (1 - D) with D of the normal table. At 1 bit D = 1 - 2 / pi. The rounding of scales counts from 7 bits on."""
    found = [distortion(ROTATED, bits) for bits in BITS]
    assert found[0] == pytest.approx(torch.pi / 2 - 1, rel=1e-4)
    assert found[:4] == pytest.approx([0.5708, 0.1331, 0.0358, 0.0096], abs=5e-5)
    limits = [normal_error(bits) / (1 - normal_error(bits)) for bits in BITS]
    excess = [value - limit for value, limit in zip(found, limits, strict=True)]
    assert excess == pytest.approx([5.5e-6] * 8, rel=0.01)
    assert excess[6] > 0.03 * limits[6]


@pytest.mark.parametrize("kind", [UNIFORM, ROTATED, MASKED])
def test_each_bit_gains_less_than_the_bit_before(kind):
    """The division of bits needs this."""
    values = [distortion(kind, bits) for bits in BITS]
    gains = [a - b for a, b in itertools.pairwise(values)]
    assert all(a > b > 0 for a, b in itertools.pairwise(gains))
    assert (
        relative_distortion(kind, 1) == 1 and relative_distortion(kind, 8) == values[7] / values[0]
    )


@pytest.mark.parametrize("offset, distance", [(1000.0, 0.0), (1001.0, 1.0), (1002.0, 2.0)])
def test_the_rounding_of_means_adds_to_the_variance(offset, distance):
    """Elements are coded relative to a bfloat16 number. At 1000, these numbers are 4 apart."""
    x = normal((64, 256), scale=1.0)
    x = x - x.mean(1, keepdim=True) + offset
    expected = distortion(ROTATED, 2) * float(x.var(1).mean() + distance**2)
    assert float(errors2(x, 2, 256, ROTATED, 4).mean()) == pytest.approx(expected, rel=0.04)


def test_averages_that_are_not_whole():
    """Half of the samples have one bit more."""
    for kind in (UNIFORM, ROTATED):
        assert distortion(kind, 2.5) == pytest.approx(
            (distortion(kind, 2) + distortion(kind, 3)) / 2
        )
        assert distortion(kind, 8.0) == distortion(kind, 8)


# -- the record of a copy ----------------------------------------------------------------------------------


def record_of(x, kind, group_size=256, samples=None, normalize=None):
    spec = QuantizedTensorSpec(
        2, group_size, tuple(x.shape), x.stride(), x.dtype, samples, kind=kind
    )
    return QuantizationRecord(x, (), spec, group_size, normalize)


def variance_of(record, bits):
    generator = torch.Generator().manual_seed(0)
    return record.variance(bits, lambda device: generator).double()


@pytest.mark.parametrize("bits", [1, 2, 5])
@pytest.mark.parametrize("kind", [UNIFORM, ROTATED])
@pytest.mark.parametrize("shape, samples", [((8, 2048), None), ((8, 2048), 4), ((1024, 10), None)])
def test_the_variance_of_a_record(shape, samples, kind, bits):
    """The mean variance of an element of each sample; groups run across samples of 10 elements."""
    x = normal(shape, scale=1.0) * torch.arange(1, shape[0] + 1)[:, None].sqrt()
    found = variance_of(record_of(x, kind, samples=samples), bits)
    rows = x.view(samples or len(x), -1)
    expected = errors2(x, bits, 256, kind, 4).view(rows.shape).mean(1)
    assert found.shape == expected.shape
    if shape[1] == 10:
        assert float(found.mean() / expected.mean()) == pytest.approx(1, abs=0.15)
    else:
        assert (found / expected).tolist() == pytest.approx([1.0] * len(rows), abs=0.25)


@pytest.mark.parametrize("kind", [UNIFORM, ROTATED])
def test_the_variance_of_a_normalized_tensor(kind):
    x = 3 + normal((64, 256), scale=1.0) * 7
    normalize = x.mean().view(1), 1 / x.std().view(1), x.numel()
    found = variance_of(record_of(x, kind, normalize=normalize), 2).mean()
    expected = errors2(x, 2, 256, kind, 2, normalize).mean()
    assert float(found / expected) == pytest.approx(1, abs=0.06)
