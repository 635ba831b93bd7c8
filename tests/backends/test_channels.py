"""The means and scales of channels (docs/concepts/quantizer.md, "Channels"): their values, and copies that have them."""

import numpy as np
import pytest
import torch
from quantized import dtypes, same

from fewbit.runtime.backends import reference
from fewbit.runtime.format.channels import Normalization, channels_of, estimated_rows
from fewbit.runtime.format.distortion import distortion
from fewbit.runtime.format.layout import storage_order

SHAPES = [  # shape, channels
    ((3, 100, 70), 70),
    ((300, 8), 8),
    ((5, 300), 300),
    ((1, 40, 3, 170), 510),
    ((2, 2), 2),
    ((1, 1), 1),
    ((16, 2100), 2100),
]
shapes = pytest.mark.parametrize("shape, count", SHAPES, ids=str)


def skewed(shape, count, dtype=torch.float32, seed=0):
    """Return numbers whose channels have very different means and deviations; in the first channel all are equal."""
    rng = np.random.default_rng([seed, *shape])
    x = rng.normal(0, 1, (int(np.prod(shape)) // count, count))
    x = x * np.exp(rng.normal(0, 2, count)) + rng.normal(0, 3, count)
    x[:, 0] = 0.3
    return torch.from_numpy(x.reshape(shape)).to(dtype)


def by_rows(x, count):
    """Return a Normalization of the rows of x."""
    rng = np.random.default_rng(count)
    rows = x.numel() // count
    mean, rstd = rng.normal(0, 1, rows), rng.uniform(0.5, 2, rows)
    mean, rstd = (torch.from_numpy(v).float().to(x.device) for v in (mean, rstd))
    return Normalization(mean, rstd, count)


def changed(x, count, normalize):
    """Return the rows of x after `normalize`, and the channels' means and scales in float32."""
    rows = storage_order(x).view(-1, count).float()
    if normalize.rstd is not None:
        rows = (rows - normalize.mean[:, None]) * normalize.rstd[:, None]
    return rows, *normalize.channels.float().unbind(1)


normalizations = pytest.mark.parametrize("is_normalized", [False, True], ids=["", "normalized"])


def numbers_of(backend, x, count, is_normalized):
    """Return a Normalization with the channels of x."""
    normalize = by_rows(x, count) if is_normalized else Normalization()
    before = normalize if is_normalized else None
    return normalize._replace(channels=backend.kernels.channel_statistics(x, count, before))


@normalizations
@shapes
def test_means_and_scales(backend, shape, count, is_normalized):
    """An oracle in float64: the mean, and the fourth root of the smoothed variance, of the chosen rows."""
    x = skewed(shape, count).to(backend.device)
    normalize = numbers_of(backend, x, count, is_normalized)
    rows, means, scales = (v.double().cpu().numpy() for v in changed(x, count, normalize))
    rows = rows[estimated_rows(len(rows))]
    variances = rows.var(0) + (rows.mean(0) / 256) ** 2
    blocks = [variances[i : i + 256].mean() for i in range(0, count, 256)]
    smooth = variances + np.repeat(blocks, 256)[:count] / len(rows)
    has_scale = smooth >= 1e-30
    np.testing.assert_allclose(means, rows.mean(0), rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(scales[has_scale], smooth[has_scale] ** 0.25, rtol=2**-8 + 1e-3)


@dtypes
@normalizations
@shapes
def test_backends_agree_to_the_last_bit(backends, shape, count, is_normalized, dtype):
    x = skewed(shape, count, dtype).to(backends[0].device)
    expected = numbers_of(backends[-1], x, count, is_normalized)
    seed = torch.tensor([7], device=x.device)
    for backend in backends:
        found = numbers_of(backend, x, count, is_normalized)
        assert same(found.channels, expected.channels)
        for bits in (1, 2, 4, 8):
            copies = [
                by.quantize(x, seed, bits, 256, normalize=expected, kind="rotated")
                for by in (backend.kernels, reference)
            ]
            assert same(copies[0][0], copies[1][0])
            assert same(copies[0][1], copies[1][1])
            values = []
            for by in (backend.kernels, reference):
                out = torch.empty_like(x)
                affine = None
                if bits == 2:
                    affine = expected.channels[:, 0].float(), expected.channels[:, 1].float(), 1
                by.dequantize(
                    *copies[0], bits, 256, out, None, affine, "rotated", None, expected.channels
                )
                values.append(out)
            assert same(*values)


@normalizations
@shapes
def test_a_copy_is_that_of_the_changed_elements(backend, shape, count, is_normalized):
    """It has the codes of (v - mean) / scale, and is restored as value * scale + mean."""
    x = skewed(shape, count).to(backend.device)
    normalize = numbers_of(backend, x, count, is_normalized)
    rows, means, scales = changed(x, count, normalize)
    inner = ((rows - means) * (1 / scales)).view(shape)
    seed, channels = torch.tensor([7], device=x.device), normalize.channels
    with_channels = backend.kernels.quantize(x, seed, 3, 256, normalize=normalize, kind="rotated")
    without = backend.kernels.quantize(inner, seed, 3, 256, kind="rotated")
    assert all(map(same, with_channels, without))
    out, plain = torch.empty_like(x), torch.empty_like(x)
    backend.kernels.dequantize(*without, 3, 256, plain, kind="rotated")
    backend.kernels.dequantize(*without, 3, 256, out, kind="rotated", channels=channels)
    assert same(out, (plain.view(-1, count) * scales + means).view(shape))


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_variance_is_the_predicted_one_and_lower(usual_backend, bits):
    x, count = skewed((600, 384), 384).to(usual_backend.device), 384
    normalize = numbers_of(usual_backend, x, count, False)
    errors = {}
    for channels in (None, normalize.channels):
        by = Normalization(channels=channels) if channels is not None else None
        squares = 0.0
        for seed in range(4):
            seed = torch.tensor([seed], device=x.device)
            copy = usual_backend.kernels.quantize(x, seed, bits, 256, normalize=by, kind="rotated")
            out = torch.empty_like(x)
            usual_backend.kernels.dequantize(
                *copy, bits, 256, out, kind="rotated", channels=channels
            )
            squares += (out - x).double().square().sum().item() / 4
        errors[channels is not None] = squares
    predicted = usual_backend.kernels.squares(x, 256, normalize, "rotated").sum().item()
    assert errors[True] == pytest.approx(predicted * distortion("rotated", bits), rel=0.1)
    assert errors[True] < errors[False] / 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_value_that_is_not_finite_spoils_only_its_group(backend, value):
    """The 256 channels of its block then have the mean 0 and the scale 1."""
    x = skewed((300, 600), 600).to(backend.device)
    x[0, 100] = value  # the first row is among those that are chosen
    channels = backend.kernels.channel_statistics(x, 600, None)
    assert same(channels[:256], torch.tensor([0.0, 1.0], device=x.device).bfloat16().expand(256, 2))
    assert channels.isfinite().all() and (channels[256:, 0] != 0).any()
    seed, normalize = torch.tensor([7], device=x.device), Normalization(channels=channels)
    copy = backend.kernels.quantize(x, seed, 2, 256, normalize=normalize, kind="rotated")
    out = torch.empty_like(x)
    backend.kernels.dequantize(*copy, 2, 256, out, kind="rotated", channels=channels)
    assert out[1:].isfinite().all() and out[0, 256:].isfinite().all()


@pytest.mark.parametrize("rows", [1, 255, 257, 300, 5000, 10**6])
def test_chosen_rows(rows):
    chosen = estimated_rows(rows)
    assert len(chosen) == min(rows, 256)
    assert chosen[0] == 0 and chosen[-1] < rows and len(set(chosen)) == len(chosen)


CHANNELS = [  # a tensor, its feature dimensions, its channels
    (torch.empty(300, 5), (1,), 5),
    (torch.empty(2, 150, 5), (2,), 5),
    (torch.empty(2, 150, 5), (1, 2), 0),  # too few rows
    (torch.empty(2, 150, 1), (2,), 0),
    (torch.empty(255, 5), (1,), 0),
    (torch.empty(2, 5, 150), (1,), 0),  # not the innermost dimension
    (torch.empty(2, 150, 5).transpose(1, 2), (1,), 5),
    (torch.empty(2, 5, 12, 13).contiguous(memory_format=torch.channels_last), (1,), 5),
    (torch.empty(1, 300, 3, 4).transpose(1, 2), (1, 3), 12),  # heads in the order of a projection
    (torch.empty(1, 3, 300, 4), (1, 3), 0),
    (torch.empty(300, 10)[:, ::2], (1,), 5),  # not dense, so it is copied first
    (torch.empty(0, 5), (1,), 0),
]


@pytest.mark.parametrize("x, features, expected", CHANNELS)
def test_channels_of(x, features, expected):
    assert channels_of(x, features) == expected


REFUSALS = [  # what is wrong, channels of a tensor of (4, 90) elements, kind
    (
        "expected entries \\* inner to divide the number of elements, 360, got 7 \\* 1",
        torch.ones(7, 2),
        "rotated",
    ),
    ("expected 18 bfloat16.*, got 18 float32", torch.ones(9, 2, dtype=torch.float32), "rotated"),
    ("expected None unless the copy is rotated, got 18 bfloat16", torch.ones(9, 2), "masked"),
    ("expected None unless the copy is rotated, got 18 bfloat16", torch.ones(9, 2), "uniform"),
]


@pytest.mark.parametrize("message, channels, kind", REFUSALS)
def test_refusals(backend, message, channels, kind):
    x = torch.ones(4, 90, device=backend.device)
    number = 0 if "float32" in message else 1
    channels = channels.to(x.device, torch.bfloat16 if number else torch.float32)
    seed, normalize = torch.tensor([7], device=x.device), Normalization(channels=channels)
    with pytest.raises(ValueError, match=message):
        backend.kernels.quantize(x, seed, 2, 64, normalize=normalize, kind=kind)
    copy = backend.kernels.quantize(x, seed, 2, 64, kind=kind)
    with pytest.raises(ValueError, match=message):
        backend.kernels.dequantize(*copy, 2, 64, x, kind=kind, channels=channels)
