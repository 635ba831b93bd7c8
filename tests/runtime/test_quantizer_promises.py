"""The promises of docs/concepts/quantizer.md that hold for uniform copies or for both kinds; test_rotated.py has the others."""

import math

import numpy as np
import pytest
import torch
from quantized import dequantize, dtypes, inputs, kinds, limits_of, quantize, quantized_bytes

NAN16 = 0x7FC0  # NaN as a bfloat16


def bytes_of(shape, bits, group_size, kind):
    """Return the bytes of a copy by the formula of the page."""
    samples, features = (*shape, 1)[0], math.prod(shape[1:])
    whole = samples * features
    count = samples * math.ceil(features / group_size) if features >= 64 else None
    count = math.ceil(whole / group_size) if count is None else count
    seed = 0 if kind == "uniform" else 8
    return 4 * bits * math.ceil(whole / 32) + 4 * count + seed


@kinds
@pytest.mark.parametrize("bits", range(1, 9))
def test_bytes(backend, kind, bits):
    for shape in ((7, 100), (1, 1000), (50, 3), (4, 8, 9), (0, 5), ()):
        packed, ranges = quantize(backend, torch.zeros(shape), bits, 64, kind=kind)
        found = packed.nbytes + ranges.nbytes
        assert found == quantized_bytes(shape, bits, 64, kind)
        assert found == bytes_of(shape, bits, 64, kind)


@dtypes
def test_nothing_is_clipped(backend, dtype):
    """All elements are in [minimum, minimum + range], and are dequantized to within a step."""
    for bits in (1, 3, 8):
        for kind in ("normal", "offset", "scales"):
            limit = 3e4 if dtype == torch.float16 else 1e38
            x = inputs((12, 256), torch.float64, kind, seed=bits).clamp(-limit, limit).to(dtype)
            packed, ranges = quantize(backend, x, bits, 256)
            limits = limits_of(ranges)
            minimum, extent = limits[:, :1], limits[:, 1:]
            assert np.isfinite(limits).all()
            exact = x.to(torch.float32).double().numpy()
            assert (exact >= minimum).all()
            # The range is that of the difference rounded to float32.
            assert (exact - minimum <= extent * (1 + 2.0**-24)).all()
            out = torch.empty(x.shape)
            out = dequantize(backend, packed, ranges, out, bits).double()
            step = extent / (2**bits - 1)
            rounding = (np.abs(minimum) + extent) * 2.0**-22 + 1e-44
            assert (np.abs(out.numpy() - exact) <= step * (1 + 2.0**-16) + rounding).all()


@kinds
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e-39, -3e36])
def test_a_constant_group_is_exact(backend, value, kind):
    x = torch.full((3, 100), value).to(torch.bfloat16)
    for bits in (1, 8):
        packed, ranges = quantize(backend, x, bits, kind=kind)
        out = dequantize(backend, packed, ranges, x, bits, kind=kind)
        assert torch.equal(out, x) and not packed.any() and not ranges[:3, 1].any()


def test_the_sum_of_a_rotated_group_can_overflow(backend):
    """A uniform copy of this group is exact. The sum of its finite elements is beyond float32, so it has no mean."""
    x = torch.full((2, 100), -3e38).to(torch.bfloat16)
    out = {}
    for kind in ("uniform", "rotated"):
        packed, ranges = quantize(backend, x, kind=kind)
        out[kind] = dequantize(backend, packed, ranges, x, kind=kind)
    assert torch.equal(out["uniform"], x) and out["rotated"].isnan().all()


@kinds
def test_a_group_that_is_not_finite(backend, kind):
    """Only the group with the element is lost."""
    for value in (math.nan, math.inf, -math.inf):
        x = inputs((4, 256), torch.float32)
        whole = quantize(backend, x, kind=kind)
        x[2, 100] = value
        packed, ranges = quantize(backend, x, kind=kind)
        assert (ranges[2] == NAN16).all() and not packed[32:48].any()
        others = [0, 1, 3]
        assert np.array_equal(ranges[others], whole[1][others])
        assert np.array_equal(packed.reshape(4, -1)[others], whole[0].reshape(4, -1)[others])
        out = dequantize(backend, packed, ranges, x, kind=kind)
        assert out[2].isnan().all() and out[others].isfinite().all()


@kinds
def test_a_group_without_range_or_mean_in_float32(backend, kind):
    x = torch.tensor(
        [[-3e38, 3e38] * 32]
    )  # finite, but neither their differences nor their sums are
    _, ranges = quantize(backend, x, kind=kind)
    assert (ranges[:1] == NAN16).all()


@kinds
def test_the_seed_alone_decides(backend, kind):
    x = inputs((4, 512), torch.float32)
    kept = [quantize(backend, x, seed=s, kind=kind)[0] for s in (1, 1, 2, 1 << 32)]
    assert np.array_equal(kept[0], kept[1])
    assert (kept[0] != kept[2]).mean() > 0.9 and (kept[0] != kept[3]).mean() > 0.9


@pytest.mark.parametrize("offset", [0, 10, 1000])
def test_unbiased(backend, offset):
    """The mean error over seeds, divided by its standard deviation, is standard normal: pooled and for each element."""
    seeds, bits = 50, 2
    x = offset + inputs((4, 512), torch.float32, seed=offset)
    exact = x.double()
    total = torch.zeros_like(exact)
    for seed in range(seeds):
        packed, ranges = quantize(backend, x, bits, 256, seed=1000 * offset + seed)
        out = dequantize(backend, packed, ranges, x)
        total += out.double() - exact
    limits = torch.from_numpy(limits_of(ranges))
    limits = limits.repeat_interleave(256, 0).view(4, 512, 2)
    step = limits[..., 1] / (2**bits - 1)
    place = (exact - limits[..., 0]) / step % 1
    variance = seeds * step**2 * place * (1 - place)
    pooled = float(total.sum() / variance.sum().sqrt())
    assert abs(pooled) < 3.5, pooled
    certain = variance < 1e-3 * seeds * step**2
    mean_square = (total**2 / variance)[~certain].mean()
    assert abs(float(mean_square) - 1) < 5 * math.sqrt(2 / x.numel()), mean_square
