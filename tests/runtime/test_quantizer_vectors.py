"""Normalization before quantizing, affine maps after dequantizing, and the numbers by which bits are shared."""

import numpy as np
import pytest
import torch
from quantized import (
    SHAPES,
    check_saved,
    compiled,
    dequantize,
    dtypes,
    inputs,
    kinds,
    mixed,
    possible_sizes,
    quantize,
    same,
    vectors,
)
from samples import normal

from fewbit.runtime.backends import reference
from fewbit.runtime.format import groups
from fewbit.runtime.format.channels import Statistics
from fewbit.runtime.quantizers.quantizer import Quantizer


@kinds
@dtypes
@pytest.mark.parametrize("shapes", [SHAPES[i::4] for i in range(4)], ids=range(4))
def test_normalized_on_load(backends, dtype, kind, shapes):
    sizes = possible_sizes(kind, 32, 256, 320)
    for shape in shapes:
        x = inputs(shape, dtype, "specials" if shape[0] == 6 else "offset")
        for i, (mean, rstd, inner) in enumerate(vectors(x.numel(), 0)):
            widths = mixed(shape[0]) if i % 2 else None
            settings = 3, sizes[i % len(sizes)], widths
            normalize = None if i % 3 == 0 else mean, rstd, inner
            expected = quantize(reference, x, *settings, normalize=normalize, kind=kind)
            for backend in backends:
                made = quantize(backend, x, *settings, normalize=normalize, kind=kind)
                check_saved(made, expected, (backend, shape, inner, len(rstd)))


@kinds
@dtypes
def test_mapped_on_store(backends, dtype, kind):
    for shape in SHAPES:
        x = inputs(shape, torch.float32)
        packed, ranges = quantize(reference, x, 3, kind=kind)
        for i, (scale, shift, inner) in enumerate(vectors(x.numel(), 1)):
            scale, shift = ((scale, shift), (None, shift), (scale, None))[i % 3]
            place = packed, ranges, torch.empty(shape, dtype=dtype), 3, 256
            affine = {"affine": (scale, shift, inner), "kind": kind}
            expected = dequantize(reference, *place, **affine)
            for backend in backends:
                assert same(dequantize(backend, *place, **affine), expected), (
                    backend,
                    shape,
                    inner,
                )


@kinds
@pytest.mark.parametrize("inner", [1, 3, 24, 300])
def test_a_scale_without_a_shift_keeps_the_sign_of_zeros(backend, inner, kind):
    x = torch.zeros(2, 300)
    scale = torch.tensor([-1.0, 2.0]).repeat(600 // inner)[: 600 // inner]
    packed, ranges = quantize(backend, x, kind=kind)
    out = dequantize(backend, packed, ranges, x, affine=(scale, None, inner), kind=kind)
    assert same(out, (x.view(-1, inner) * scale[:, None]).view(x.shape))


@pytest.mark.slow
@compiled
@kinds
@pytest.mark.parametrize("inner", [1, 7, 49, 67 * 8])
def test_threads_that_share_vectors(backend, threads, inner, kind):
    x = inputs((5, 67 * 49 * 8), torch.bfloat16)
    count = x.shape[1] // inner * (len(x) if inner > 100 else 1)
    rng = np.random.default_rng(inner)
    mean, rstd = (torch.from_numpy(rng.normal(1, 1, count)).float() for _ in range(2))
    given = mean, rstd, inner
    packed, ranges = quantize(reference, x, normalize=given, kind=kind)
    made = quantize(backend, x, normalize=given, kind=kind)
    assert np.array_equal(made[0], packed) and np.array_equal(made[1], ranges)
    expected = dequantize(reference, packed, ranges, x, affine=given, kind=kind)
    made = dequantize(backend, packed, ranges, x, affine=given, kind=kind)
    assert same(made, expected)


@kinds
def test_vectors_that_do_not_fit(backend, kind):
    x, one = inputs((4, 6), torch.float32), torch.ones(1)
    packed, ranges = quantize(reference, x, kind=kind)
    for pair, inner, message in (
        ((one, one.double()), 1, "float32"),
        ((None, torch.ones(4, device=backend.device)[::2]), 1, "expected a dense|contiguous"),
        ((one, torch.ones(2)), 1, "one length|mean: expected 2|shift: expected 1"),
        ((None, torch.ones(5)), 1, r"divide the number of elements, 24, got 5 \* 1"),
        ((None, torch.ones(4)), 12, "divide"),
        ((None, one), 0, "divide"),
        ((None, torch.ones(0)), 1, "divide"),
    ):
        given = *pair, inner
        with pytest.raises(ValueError, match=message):
            quantize(backend, x, normalize=given, kind=kind)
        with pytest.raises(ValueError, match=message):
            dequantize(backend, packed, ranges, x, affine=given, kind=kind)
    with pytest.raises(ValueError, match="expected"):
        quantize(backend, x, normalize=(one, None, 1), kind=kind)
    widths = torch.full((4,), 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="short samples of several widths"):
        dequantize(backend, packed, ranges, x, 0, 256, widths, affine=(one, None, 1), kind=kind)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(5, 700), (3, 64), (4, 63), (2, 3, 1000), (1, 256), (9,), (0, 70), (3, 0)], ids=str
)
def test_squares(backend, shape, dtype, kind):
    x = (10.0 + normal(shape, dtype, scale=3.0)).clamp_(min=8.0).to(backend.device)
    x[x == 8.0] = 0.0  # a masked copy leaves these elements out
    for group_size in possible_sizes(kind, 32, 256, 512):
        found = backend.kernels.squares(x, group_size, None, kind).cpu()
        expected = reference.squares(x.cpu(), group_size, None, kind)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
        features = groups.samples_of(shape)[1]
        if (
            kind == "uniform" and groups.LEAST_FEATURES <= features <= group_size
        ):  # a sample is a group
            _, ranges = backend.kernels.quantize(x, torch.tensor([0]), 2, group_size)
            assert torch.equal(found, features * ranges[:, 1].cpu().float().square())


@kinds
def test_squares_of_what_is_normalized_or_not_finite(backend, kind):
    x = normal((3, 4, 64)).to(backend.device)
    mean, rstd = (
        normal((12,), seed=1).to(backend.device),
        2.0 + normal((12,), seed=2).to(backend.device),
    )
    normalized = (x - mean.view(3, 4, 1)) * rstd.view(3, 4, 1)
    found = backend.kernels.squares(x, 96, (mean, rstd, 64), kind)
    torch.testing.assert_close(found, backend.kernels.squares(normalized, 96, None, kind))
    for bad in (torch.nan, torch.inf):
        x[1, 2, 3] = bad
        found = backend.kernels.squares(x, 96, None, kind)
        assert found.isfinite().tolist() == [True, False, True]


@kinds
def test_squares_are_of_groups_in_storage_order(backend, kind):
    x = normal((3, 8, 4, 5)).to(backend.device, memory_format=torch.channels_last)
    found = backend.kernels.squares(x, 32, None, kind)
    rows = x.permute(0, 2, 3, 1).reshape(3, 160)
    torch.testing.assert_close(found, backend.kernels.squares(rows, 32, None, kind))


@kinds
@pytest.mark.parametrize("features", [64, 300])
def test_an_affine_map_of_samples_of_several_widths(backend, features, kind):
    x = normal((6, features))
    widths = torch.tensor([3, 1, 8, 3, 2, 1], dtype=torch.uint8)
    packed, ranges = quantize(backend, x, widths=widths, kind=kind)
    place = backend, packed, ranges, x, 0, 256, widths
    plain = dequantize(*place, kind=kind)
    scale, shift = normal((6,), seed=1), normal((6,), seed=2)
    mapped = dequantize(*place, affine=(scale, shift, features), kind=kind)
    assert torch.equal(mapped, plain * scale[:, None] + shift[:, None])


@pytest.mark.parametrize("kind", ["uniform", "rotated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("statistics", [(6, 1, 1, 1), (1, 70, 1, 1), (6, 70, 1, 1)], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_kept_and_restored_by_kernels(backend, dtype, statistics, last, kind):
    """Quantizer and QuantizedTensorSpec compute the same by a kernel, if there is an index, as by torch's operations."""
    format = torch.channels_last if last else torch.contiguous_format
    x = inputs((6, 70, 3, 3), dtype).to(backend.device, memory_format=format)
    of_sample, of_channel = statistics[0] > 1, statistics[1] > 1
    inner = 9 if of_channel else 630
    if last:
        inner = None if of_sample and of_channel else 1 if of_channel else 630
    wide = torch.promote_types(dtype, torch.float32)
    mean, rstd = (inputs(statistics, wide, seed=i).to(backend.device) for i in (1, 2))
    quantizer = Quantizer(3, kind=kind)
    made = []
    for index in (inner, None):
        torch.manual_seed(5)
        kept = quantizer.quantize_normalized(x, Statistics(mean, rstd, index))
        restored = [
            kept.spec.dequantize(kept.tensors, torch.bfloat16, (scale, shift, index))
            for scale, shift in ((rstd, mean), (None, mean), (rstd, None), (None, None))
        ]
        made.append((kept, restored))
    (fused, values), (plain, expected) = made
    assert fused.spec == plain.spec and fused.spec.stride == x.stride()
    for a, b in zip(fused.tensors, plain.tensors, strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))
    for a, b in zip(values, expected, strict=True):
        assert a.stride() == x.stride() and same(a.cpu(), b.cpu())
