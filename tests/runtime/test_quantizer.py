"""The group quantizer of every backend, bit for bit against NumPy, and the promises of docs/quantizer.md."""

import functools
import math
import mmap

import naive_quantizer as naive
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import normal
from torch.utils._python_dispatch import TorchDispatchMode

import fewbit
from fewbit.runtime.backends import reference
from fewbit.runtime.format import groups
from fewbit.runtime.format.encoding import Encoding
from fewbit.runtime.quantizers.quantizer import Quantizer

try:
    from fewbit import _kernels
    from fewbit.runtime.backends import native
except ImportError:
    _kernels = None

ISAS = _kernels.cpu_isas() if _kernels else ()
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
compiled = pytest.mark.skipif(_kernels is None, reason="fewbit was installed without kernels")
KINDS = ("normal", "offset", "scales", "specials", "zeros")
SEED = -(2**63) + 12345


# -- inputs and calls --------------------------------------------------------------------------------------


def inputs(shape, dtype, kind="normal", seed=0):
    """Return numbers of a kind, on the CPU."""
    rng = np.random.default_rng([seed, *shape])
    x = rng.normal(0, 1, shape)
    if kind == "offset":
        x = 10 + 1e-3 * x
    elif kind == "scales":  # from subnormal ones to those whose range overflows
        x = x * 10.0 ** rng.integers(-45, 39, shape)
    elif kind == "specials":
        special = rng.choice([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 65504.0, -0.0], shape)
        x = np.where(rng.random(shape) < 2 / (1 + shape[-1]), special, x)
    elif kind == "zeros":
        x = np.where(rng.random(shape) < 0.5, -0.0, 0.0)
    return torch.from_numpy(x).to(dtype)


def mixed(samples, seed=0):
    return torch.from_numpy(
        np.random.default_rng([seed, samples]).integers(1, 9, samples, np.uint8)
    )


def quantize(
    backend, x, bits=2, group_size=256, fp32_min=False, widths=None, seed=SEED, normalize=None
):
    """Return packed (uint32), ranges (uint16) and spread (floats) of a backend, or of bare kernels of the CPU."""
    words, device = None, getattr(backend, "device", "cpu")
    if widths is not None:
        words = groups.mixed_words(widths.tolist(), groups.samples_of(x.shape)[1])
        widths = widths.to(device)
    seed = torch.tensor([seed], device=device)
    packed, ranges, spread = getattr(backend, "kernels", backend).quantize(
        x.to(device), seed, bits, group_size, fp32_min, widths, words, to_device(normalize, device)
    )
    spread = None if spread is None else tuple(map(float, spread))
    ranges = ranges.cpu().view(torch.int16).numpy().view(np.uint16)
    return packed.cpu().numpy().view(np.uint32), ranges, spread


def dequantize(backend, packed, ranges, like, bits=2, group_size=256, widths=None, affine=None):
    """Return the values in the dtype and with the strides of `like`, on the CPU."""
    device = getattr(backend, "device", "cpu")
    result = torch.empty_like(like, device=device)
    getattr(backend, "kernels", backend).dequantize(
        torch.from_numpy(packed.view(np.int32)).to(device),
        torch.from_numpy(ranges.view(np.int16)).view(torch.bfloat16).to(device),
        bits,
        group_size,
        result,
        None if widths is None else widths.to(device),
        to_device(affine, device),
    )
    return result.cpu()


def to_device(given, device):
    """Return normalize or affine with its vectors on the device."""
    if given is None:
        return None
    *vectors, inner = given
    return *(None if vector is None else vector.to(device) for vector in vectors), inner


def same(a, b):
    """Return whether bits are equal; all NaNs are equal."""
    nan = a.isnan()
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a, b, other = a.view(integer), b.view(integer), b.isnan()
    return torch.equal(nan, other) and torch.equal(a[~nan], b[~nan])


def in_dtype(values, dtype):
    """Return values in a dtype. In float16 no dequantized value is infinite."""
    return (values.clamp(-65504.0, 65504.0) if dtype == torch.float16 else values).to(dtype)


def check(backend, x, bits, group_size, fp32_min, widths=None):
    """Compare codes, ranges, spread and dequantized values with the oracle, and return the saved tensors."""
    bits_of_samples = [bits] * len(x) if widths is None else widths.tolist()
    rows = x.to(torch.float32).numpy()
    expected = naive.quantize(rows, SEED, bits_of_samples, group_size, fp32_min)
    packed, ranges, spread = quantize(backend, x, bits, group_size, fp32_min, widths)
    what = (tuple(x.shape), x.dtype, bits, group_size, fp32_min)
    assert np.array_equal(packed, expected[0]), what
    kept = len(expected[1])  # with several widths there may be room for more
    assert np.array_equal(ranges[:kept], expected[1]) and not ranges[kept:].any(), what
    if spread is not None:
        least_greatest = (rows.min(), rows.max()) if rows.size else (0.0, 0.0)
        np.testing.assert_array_equal(spread, least_greatest)
    restored = naive.dequantize(packed, ranges, x.shape, bits_of_samples, group_size)
    out = dequantize(backend, packed, ranges, x, bits, group_size, widths)
    assert same(out, in_dtype(torch.from_numpy(restored), x.dtype)), what
    return packed, ranges


# -- bits for bits -----------------------------------------------------------------------------------------


@pytest.mark.fast(3)
@pytest.mark.parametrize("samples", [1, 3])
def test_every_small_size(backend, samples):
    for features in range(71):
        x = inputs((samples, features), DTYPES[features % 4], KINDS[features % 5])
        bits, group_size, fp32_min = (
            1 + features % 8,
            (32, 64, 256)[features % 3],
            features % 2 == 1,
        )
        check(backend, x, bits, group_size, fp32_min)
        check(backend, x, 0, group_size, fp32_min, mixed(samples))


@dtypes
@pytest.mark.parametrize("fp32_min", [False, True], ids=["bfloat16", "fp32_min"])
def test_every_width(backend, dtype, fp32_min):
    for bits in range(1, 9):
        for kind in KINDS:
            x = inputs((2, 321), dtype, kind, seed=bits)
            check(backend, x, bits, 256, fp32_min)


@pytest.mark.fast(4)
@pytest.mark.parametrize("group_size", [32, 64, 96, 256, 288, 1024])
def test_group_sizes(backend, group_size):
    for shape in ((2, 1321), (1, 2048), (40, 31), (0, 70), (5, 0), (3, group_size + 1)):
        for dtype in DTYPES:
            x = inputs(shape, dtype, seed=group_size)
            check(backend, x, 3, group_size, False)
            check(backend, x, 0, group_size, True, mixed(shape[0]))


def test_the_largest_group(backend):
    x = inputs((1, 65536 + 100), torch.float32)
    check(backend, x, 2, 65536, False)


def test_shapes(backend):
    """Samples are along dimension 0. A scalar is one sample of one feature."""
    for shape in ((), (5,), (3, 4, 5), (2, 3, 7, 11), (0, 3), (3, 0, 2)):
        x = inputs((math.prod(shape),), torch.float32).reshape(shape)
        packed, ranges, _ = quantize(backend, x)
        expected = quantize(reference, x)
        assert np.array_equal(packed, expected[0]) and np.array_equal(ranges, expected[1])
        out = dequantize(backend, packed, ranges, x)
        assert same(out, dequantize(reference, packed, ranges, x))


def test_channels_last(backend):
    """A dense tensor whose samples are outermost is quantized and dequantized in storage order."""
    x = inputs((2, 3, 8, 9), torch.float32).to(memory_format=torch.channels_last)
    flat = x.permute(0, 2, 3, 1).reshape(2, -1)
    kept = check(backend, flat, 2, 64, False)
    packed, ranges, _ = quantize(backend, x, 2, 64)
    assert np.array_equal(packed, kept[0]) and np.array_equal(ranges, kept[1])
    out = dequantize(backend, packed, ranges, x, 2, 64)
    assert out.stride() == x.stride()
    restored = naive.dequantize(packed, ranges, (2, 216), [2, 2], 64)
    assert torch.equal(out.permute(0, 2, 3, 1).reshape(2, -1), torch.from_numpy(restored))


@functools.cache
def shared_words(shape, dtype, several):
    """Return groups that begin inside a word, enough for several threads, and the reference's result."""
    x, widths = inputs(shape, dtype, "specials"), mixed(shape[0]) if several else None
    kept = quantize(reference, x, 3, 256, False, widths)
    return x, widths, kept, dequantize(reference, *kept[:2], x, 3, 256, widths)


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@compiled
@pytest.mark.parametrize("shape", [(1201, 67), (1, 150_001), (2, 65_537), (7001, 11)], ids=str)
def test_threads_that_share_words(backend, shape, threads):
    for several in (False, True):
        x, widths, kept, restored = shared_words(shape, DTYPES[shape[1] % 4], several)
        made = quantize(backend, x, 3, 256, False, widths)
        assert np.array_equal(made[0], kept[0]) and np.array_equal(made[1], kept[1])
        if made[2] is not None:
            np.testing.assert_array_equal(made[2], kept[2])
        out = dequantize(backend, *kept[:2], x, 3, 256, widths)
        assert same(out, restored)


def cpu_backends():
    return [reference, *(native.cpu(isa) for isa in ISAS)]


@settings(max_examples=40)
@given(
    samples=st.integers(0, 9),
    features=st.integers(0, 330),
    group_size=st.sampled_from([32, 64, 96, 256, 320]),
    bits=st.integers(0, 8),
    fp32_min=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32),
)
def test_anything(samples, features, group_size, bits, fp32_min, dtype, kind, seed):
    x = inputs((samples, features), dtype, kind, seed)
    widths = None if bits else mixed(samples, seed)
    for kernels in cpu_backends():
        check(kernels, x, bits, group_size, fp32_min, widths)


def test_room_beyond_the_codes_is_zero(backend):
    x, widths = inputs((6, 70), torch.float32), mixed(6)
    exact, ranges, _ = quantize(backend, x, 0, widths=widths)
    seed = torch.tensor([SEED], device=backend.device)
    packed, again, _ = backend.kernels.quantize(
        x.to(backend.device), seed, 0, 256, False, widths.to(backend.device), len(exact) + 9
    )
    packed = packed.cpu().numpy().view(np.uint32)
    assert np.array_equal(packed[: len(exact)], exact) and not packed[len(exact) :].any()
    assert np.array_equal(again.cpu().view(torch.int16).numpy().view(np.uint16), ranges)


@pytest.mark.slow
@compiled
def test_more_elements_than_an_int_counts():
    """The last groups of more than 2**31 elements, in memory that exists only where it is touched."""
    features, samples = 256, (1 << 23) + 5
    n = samples * features
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        space = mmap.mmap(-1, 2 * n, flags=flags)
    except OSError:
        pytest.skip("no address space for 4 GB")
    x = torch.frombuffer(space, dtype=torch.bfloat16).view(samples, features)
    x[-9:] = inputs((9, features), torch.bfloat16)
    kernels = native.cpu()
    packed, ranges, _ = quantize(kernels, x, 1)
    words = packed[-9 * features // 32 :]
    for i in range(9):
        codes, row = naive._group(
            x[i - 9].to(torch.float32).numpy(), SEED, samples - 9 + i, 1, 256, False
        )
        assert np.array_equal(naive._planes(codes, 1), words[8 * i : 8 * i + 8])
        assert ranges[i - 9].tolist() == row
    assert not packed[: -9 * features // 32].any() and not ranges[:-9].any()


# -- normalization and affine maps -------------------------------------------------------------------------


SHAPES = [
    (3, 70),
    (2, 3, 49),
    (4, 5, 4),
    (2, 300),
    (1, 513),
    (6, 256),
    (9, 31),
    (40, 7),
    (0, 5),
    (4, 0),
    (2, 96),
]


def vectors(n, seed):
    """Return pairs of vectors that n elements can share, and inner: 1, n and numbers between."""
    rng = np.random.default_rng([n, seed])
    divisors = [number for number in range(1, n + 1) if n % number == 0] or [1]
    pairs = [
        (inner, divisor) for inner in divisors for divisor in divisors if n // inner % divisor == 0
    ]
    for inner, count in (pairs[i] for i in {0, len(pairs) - 1, *rng.integers(0, len(pairs), 5)}):
        yield *(torch.from_numpy(rng.normal(1, 1, count)).float() for _ in range(2)), inner


def or_none(vector):
    return None if vector is None else vector.numpy()


@pytest.mark.fast(3)
@dtypes
def test_normalized_on_load(backend, dtype):
    for shape in SHAPES:
        x = inputs(shape, dtype, "specials" if shape[0] == 6 else "offset")
        rows = x.to(torch.float32).numpy().reshape(groups.samples_of(shape))
        for i, (mean, rstd, inner) in enumerate(vectors(x.numel(), 0)):
            mean = None if i % 3 == 0 else mean
            widths = mixed(shape[0]) if i % 2 else None
            bits_of_samples = [3] * shape[0] if widths is None else widths.tolist()
            group_size, fp32_min = (32, 256, 320)[i % 3], i % 4 == 0
            expected = naive.normalized(rows, or_none(mean), rstd.numpy(), inner)
            packed, ranges = naive.quantize(expected, SEED, bits_of_samples, group_size, fp32_min)
            made = quantize(
                backend, x, 3, group_size, fp32_min, widths, normalize=(mean, rstd, inner)
            )
            what = shape, inner, len(rstd)
            assert np.array_equal(made[0], packed), what
            kept = len(ranges)
            assert np.array_equal(made[1][:kept], ranges) and not made[1][kept:].any(), what
            if made[2] is not None and x.numel():
                np.testing.assert_array_equal(made[2], (expected.min(), expected.max()))


@dtypes
def test_mapped_on_store(backend, dtype):
    for shape in SHAPES:
        x = inputs(shape, torch.float32)
        packed, ranges, _ = quantize(reference, x, 3)
        values = naive.dequantize(packed, ranges, groups.samples_of(shape), [3] * shape[0], 256)
        for i, (scale, shift, inner) in enumerate(vectors(x.numel(), 1)):
            scale, shift = ((scale, shift), (None, shift), (scale, None))[i % 3]
            expected = naive.mapped(values, or_none(scale), or_none(shift), inner).reshape(shape)
            out = torch.empty(shape, dtype=dtype)
            affine = scale, shift, inner
            made = dequantize(backend, packed, ranges, out, 3, affine=affine)
            assert same(made, torch.from_numpy(expected).to(dtype)), (shape, inner)


@compiled
@pytest.mark.parametrize("inner", [1, 7, 49, 67 * 8])
def test_threads_that_share_vectors(backend, threads, inner):
    x = inputs((20, 67 * 49 * 8), torch.bfloat16)
    count = x.shape[1] // inner * (20 if inner > 100 else 1)
    rng = np.random.default_rng(inner)
    mean, rstd = (torch.from_numpy(rng.normal(1, 1, count)).float() for _ in range(2))
    given = mean, rstd, inner
    packed, ranges, _ = quantize(reference, x, normalize=given)
    made = quantize(backend, x, normalize=given)
    assert np.array_equal(made[0], packed) and np.array_equal(made[1], ranges)
    expected = dequantize(reference, packed, ranges, x, affine=given)
    made = dequantize(backend, packed, ranges, x, affine=given)
    assert same(made, expected)


def test_channels_last_normalized(backend):
    """The index is that of storage order: with channels last, neighbors have neighboring entries."""
    x = inputs((2, 3, 8, 9), torch.float32).to(memory_format=torch.channels_last)
    mean, rstd = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 2.0, 3.0])
    expected = quantize(reference, (x - mean.view(1, 3, 1, 1)) * rstd.view(1, 3, 1, 1))
    made = quantize(backend, x, normalize=(mean, rstd, 1))
    assert np.array_equal(made[0], expected[0]) and np.array_equal(made[1], expected[1])


def test_vectors_that_do_not_fit(backend):
    x, one = inputs((4, 6), torch.float32), torch.ones(1)
    packed, ranges, _ = quantize(reference, x)
    for vectors, inner, message in (
        ((one, one.double()), 1, "1-D contiguous float32"),
        ((None, torch.ones(2, 2)), 1, "1-D contiguous float32"),
        ((None, torch.ones(4)[::2]), 1, "1-D contiguous float32"),
        ((one, torch.ones(2)), 1, "one length"),
        ((None, None), 1, "expected"),
        ((None, torch.ones(5)), 1, r"divide the number of elements, 24, got 5 \* 1"),
        ((None, torch.ones(4)), 12, "divide"),
        ((None, one), 0, "divide"),
        ((None, torch.ones(0)), 1, "divide"),
    ):
        given = *vectors, inner
        with pytest.raises(ValueError, match=message):
            quantize(backend, x, normalize=given)
        with pytest.raises(ValueError, match=message):
            dequantize(backend, packed, ranges, x, affine=given)
    with pytest.raises(ValueError, match="expected"):
        quantize(backend, x, normalize=(one, None, 1))
    widths = torch.full((4,), 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="short samples of several widths"):
        dequantize(backend, packed, ranges, x, 0, 256, widths, affine=(one, None, 1))


def squares(rows, group_size):
    """Return the sum of length * range^2 over the groups of each row, in float64."""
    result = []
    for row in rows.astype(np.float64):
        cuts = [row[at : at + group_size] for at in range(0, len(row), group_size)]
        result.append(sum(len(cut) * (cut.max() - cut.min()) ** 2 for cut in cuts))
    return np.array(result)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize(
    "shape", [(5, 700), (3, 64), (4, 63), (2, 3, 1000), (1, 256), (9,), (0, 70), (3, 0)], ids=str
)
def test_squares_of_ranges(backend, shape, dtype):
    x = (10.0 + normal(shape, dtype, scale=3.0)).to(backend.device)
    for group_size in (32, 256, 512):
        found = backend.kernels.squares(x, group_size)
        rows = x.reshape(groups.samples_of(shape)).float().cpu().numpy()
        expected = squares(rows, group_size)
        assert found.dtype == torch.float32 and found.shape == (len(rows),)
        np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=1e-5)
        if 0 < rows.shape[1] <= group_size:  # nothing is summed up
            extent = rows.max(1) - rows.min(1)
            assert np.array_equal(found.cpu().numpy(), rows.shape[1] * (extent * extent))


def test_squares_of_what_is_normalized_or_not_finite(backend):
    x = normal((3, 4, 64)).to(backend.device)
    mean, rstd = (
        normal((12,), seed=1).to(backend.device),
        2.0 + normal((12,), seed=2).to(backend.device),
    )
    normalized = (x - mean.view(3, 4, 1)) * rstd.view(3, 4, 1)
    found = backend.kernels.squares(x, 96, (mean, rstd, 64))
    torch.testing.assert_close(found, backend.kernels.squares(normalized, 96))
    for bad in (torch.nan, torch.inf):
        x[1, 2, 3] = bad
        assert backend.kernels.squares(x, 96).isfinite().tolist() == [True, False, True]


def test_squares_are_of_groups_in_storage_order(backend):
    x = normal((3, 8, 4, 5)).to(backend.device, memory_format=torch.channels_last)
    found = backend.kernels.squares(x, 32)
    expected = squares(x.permute(0, 2, 3, 1).reshape(3, 160).cpu().numpy(), 32)
    np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=1e-5)


class LargestTensor(TorchDispatchMode):
    """A mode that records the number of elements of the largest tensor that torch's operations make."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.elements = max(self.elements, result.numel())
        return result


def test_squares_of_kernels_copy_nothing(backend):
    if "reference" in backend.name:
        pytest.skip("makes float32 copies")
    x = normal((3, 640), torch.bfloat16).to(backend.device)
    mean, rstd = torch.ones(2, 3, device=backend.device)
    for normalize in (None, (mean, rstd, 640)):
        with LargestTensor() as largest:
            backend.kernels.squares(x, 256, normalize)
        assert largest.elements == 9  # a number a group


@pytest.mark.parametrize("features", [64, 300])
def test_an_affine_map_of_samples_of_several_widths(backend, features):
    x = normal((6, features))
    widths = torch.tensor([3, 1, 8, 3, 2, 1], dtype=torch.uint8)
    packed, ranges, _ = quantize(backend, x, widths=widths)
    place = backend, packed, ranges, x, 0, 256, widths
    plain = dequantize(*place)
    scale, shift = normal((6,), seed=1), normal((6,), seed=2)
    mapped = dequantize(*place, affine=(scale, shift, features))
    assert torch.equal(mapped, plain * scale[:, None] + shift[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("statistics", [(6, 1, 1, 1), (1, 70, 1, 1), (6, 70, 1, 1)], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_kept_and_restored_by_kernels(backend, dtype, statistics, last):
    """Quantizer and QuantizedTensorSpec compute the same by a kernel, if there is an index, as by torch's operations."""
    format = torch.channels_last if last else torch.contiguous_format
    x = inputs((6, 70, 3, 3), dtype).to(backend.device, memory_format=format)
    of_sample, of_channel = statistics[0] > 1, statistics[1] > 1
    inner = 9 if of_channel else 630
    if last:
        inner = None if of_sample and of_channel else 1 if of_channel else 630
    wide = torch.promote_types(dtype, torch.float32)
    mean, rstd = (inputs(statistics, wide, seed=i).to(backend.device) for i in (1, 2))
    quantizer = Quantizer(3)
    made = []
    for index in (inner, None):
        torch.manual_seed(5)
        kept = quantizer.quantize_normalized(x, mean, rstd, index)
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


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_a_norm_needs_no_other_pass(backend, last, monkeypatch):
    """The kernels get the norm's statistics, weight and bias."""
    indices = []

    def spy(name, place):
        real = getattr(backend.kernels, name)

        def call(*arguments):
            indices.append(arguments[place] and arguments[place][2])
            return real(*arguments)

        monkeypatch.setattr(backend.kernels, name, call)

    spy("quantize", 7)
    spy("dequantize", 6)
    format = torch.channels_last if last else torch.contiguous_format
    x = inputs((4, 8, 5, 5), torch.float32).to(backend.device, memory_format=format)
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 2, 1))
    fewbit.compress_(model.to(backend.device), verbose=False)
    model(x.requires_grad_()).sum().backward()
    assert indices == [1 if last else 25] * 3  # the norm's input; the convolution's, the norm's
    if not last:
        del indices[:]
        model = torch.nn.Sequential(torch.nn.LayerNorm(70), torch.nn.Linear(70, 3))
        fewbit.compress_(model.to(backend.device), verbose=False)
        model(inputs((9, 70), torch.float32).to(backend.device)).sum().backward()
        assert indices == [70, 1, 70]


# -- an activation and the layer after it, in one pass -------------------------------------------------------


ENCODING = Encoding(2, np.arange(4.0), np.array([-1.0, 0.0, 1.0]), np.arange(4), ("right",) * 3)


def compare_forward_quantized(kernels, x, bits, group_size, fp32_min=False, in_place=False):
    """Check bit-equality with forward and then quantize. Return False if the kernels decline."""
    seed, y = torch.tensor([SEED]), torch.empty_like(x)
    codes = kernels.forward(x, "silu", (), ENCODING, None, y)
    expected = kernels.quantize(y, seed, bits, group_size, fp32_min)
    before = x.clone()
    out = before if in_place else torch.empty_like(x)
    made = kernels.forward_quantized(
        before, "silu", (), ENCODING, None, out, seed, bits, group_size, fp32_min
    )
    if made is None:
        assert in_place or same(before, x)
        return False
    assert same(out, y) and torch.equal(made.codes, codes)
    packed, ranges, spread = made.result
    assert torch.equal(packed, expected[0])
    assert torch.equal(ranges.view(torch.int16), expected[1].view(torch.int16))
    np.testing.assert_array_equal(spread, expected[2])
    return True


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_forward_quantized(dtype):
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for isa in ISAS:
            kernels = native.cpu(isa)
            for i, shape in enumerate([*SHAPES, (), (3, 40_001), (900, 257), (70, 1024)]):
                x = inputs(shape, dtype, "specials" if i % 3 == 0 and shape else "normal")
                for group_size in (32, 96, 512, 65536):
                    bits, fp32_min, in_place = 1 + i % 8, i % 2 == 0, i % 3 == 1
                    assert compare_forward_quantized(
                        kernels, x, bits, group_size, fp32_min, in_place
                    )
    finally:
        torch.set_num_threads(torch_threads)


@compiled
@pytest.mark.parametrize(
    ("shape", "group_size", "taken"),
    [
        ((300, 1024), 256, True),
        ((9000, 33), 96, True),
        ((1, 1 << 17), 256, True),
        ((2048, 65), 256, True),  # 512 samples are whole chunks
        ((600, 257), 256, False),
        ((1, 100_003), 256, False),
    ],
    ids=str,
)
def test_forward_quantized_on_threads(shape, group_size, taken):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        x = inputs(shape, torch.float32, "specials")
        assert compare_forward_quantized(native.cpu(), x, 3, group_size) == taken
    finally:
        torch.set_num_threads(before)


def test_forward_quantized_where_nothing_is_fused(backend):
    x, seed = torch.ones(3, 100, device=backend.device), torch.tensor([1], device=backend.device)
    rest = seed, 2, 256
    assert backend.kernels.forward_quantized(x, "strange", (), ENCODING, None, x, *rest) is None
    wide = x.double()
    assert backend.kernels.forward_quantized(wide, "silu", (), ENCODING, None, wide, *rest) is None
    if backend.name not in ISAS:
        assert backend.kernels.forward_quantized(x, "silu", (), ENCODING, None, x, *rest) is None


# -- promises of docs/quantizer.md -------------------------------------------------------------------------


def test_bytes(backend):
    for shape in ((7, 100), (1, 1000), (50, 3), (4, 8, 9), (0, 5), ()):
        for bits in range(1, 9):
            for fp32_min in (False, True):
                x = torch.zeros(shape)
                packed, ranges, _ = quantize(backend, x, bits, 64, fp32_min)
                assert packed.nbytes + ranges.nbytes == groups.quantized_bytes(
                    shape, bits, 64, fp32_min
                )


def test_top_is_restored_exactly():
    for bits in range(1, 9):
        top = np.float32(2**bits - 1)
        assert top * (np.float32(1) / top) == 1


@dtypes
@pytest.mark.parametrize("fp32_min", [False, True], ids=["bfloat16", "fp32_min"])
def test_nothing_is_clipped(backend, dtype, fp32_min):
    """All elements are in [minimum, minimum + range], and are dequantized to within a step."""
    for bits in (1, 3, 8):
        for kind in ("normal", "offset", "scales"):
            limit = 3e4 if dtype == torch.float16 else 1e38
            x = inputs((12, 256), torch.float64, kind, seed=bits).clamp(-limit, limit).to(dtype)
            packed, ranges, _ = quantize(backend, x, bits, 256, fp32_min)
            limits = np.array([naive._limits(row) for row in ranges], np.float64)
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


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e-39, -3e38])
def test_a_range_of_zero_is_exact(backend, value):
    x = torch.full((3, 100), value).to(torch.bfloat16)
    for bits in (1, 8):
        packed, ranges, _ = quantize(backend, x, bits)
        out = dequantize(backend, packed, ranges, x, bits)
        assert torch.equal(out, x) and not packed.any() and not ranges[:, 1].any()


def test_wide_minimums_are_exact(backend):
    x = torch.full((3, 100), 1.0 + 2.0**-20)
    packed, ranges, _ = quantize(backend, x, 2, 256, True)
    out = dequantize(backend, packed, ranges, x)
    assert torch.equal(out, x)


def test_a_group_that_is_not_finite(backend):
    """Only the group with the element is lost."""
    for value in (math.nan, math.inf, -math.inf):
        x = inputs((4, 256), torch.float32)
        whole = quantize(backend, x)
        x[2, 100] = value
        packed, ranges, spread = quantize(backend, x)
        assert (ranges[2] == naive.NAN16).all() and not packed[32:48].any()
        others = [0, 1, 3]
        assert np.array_equal(ranges[others], whole[1][others])
        assert np.array_equal(packed.reshape(4, -1)[others], whole[0].reshape(4, -1)[others])
        out = dequantize(backend, packed, ranges, x)
        assert out[2].isnan().all() and out[others].isfinite().all()
        if spread is not None:
            np.testing.assert_array_equal(spread, (x.amin(), x.amax()))


def test_a_range_beyond_bfloat16(backend):
    x = torch.tensor([[-3e38, 3e38] * 32])  # finite, but their difference is not
    _, ranges, spread = quantize(backend, x)
    assert (ranges == naive.NAN16).all()
    if spread is not None:
        assert spread == (float(x.min()), float(x.max()))


def test_the_seed_alone_decides(backend):
    x = inputs((4, 512), torch.float32)
    kept = [quantize(backend, x, seed=s)[0] for s in (1, 1, 2, 1 << 32)]
    assert np.array_equal(kept[0], kept[1])
    assert (kept[0] != kept[2]).mean() > 0.9 and (kept[0] != kept[3]).mean() > 0.9


@pytest.mark.parametrize("fp32_min", [False, True], ids=["bfloat16", "fp32_min"])
@pytest.mark.parametrize("offset", [0, 10, 1000])
def test_unbiased(backend, offset, fp32_min):
    """The mean error over seeds, divided by its standard deviation, is standard normal: pooled and for each element."""
    seeds, bits = 50, 2
    x = offset + inputs((4, 512), torch.float32, seed=offset)
    exact = x.double()
    total = torch.zeros_like(exact)
    for seed in range(seeds):
        packed, ranges, _ = quantize(backend, x, bits, 256, fp32_min, seed=1000 * offset + seed)
        out = dequantize(backend, packed, ranges, x)
        total += out.double() - exact
    limits = torch.tensor(np.array([naive._limits(row) for row in ranges]), dtype=torch.float64)
    limits = limits.repeat_interleave(256, 0).view(4, 512, 2)
    step = limits[..., 1] / (2**bits - 1)
    place = (exact - limits[..., 0]) / step % 1
    variance = seeds * step**2 * place * (1 - place)
    pooled = float(total.sum() / variance.sum().sqrt())
    assert abs(pooled) < 3.5, pooled
    certain = variance < 1e-3 * seeds * step**2
    mean_square = (total**2 / variance)[~certain].mean()
    assert abs(float(mean_square) - 1) < 5 * math.sqrt(2 / x.numel()), mean_square


# -- arguments for CUDA ------------------------------------------------------------------------------------


@compiled
def test_widths_for_cuda():
    """The arguments that replace widths for the CUDA kernels are computed without reading the widths on the host."""
    widths = mixed(50)
    (order, counts), buffers = native._order(widths)
    assert order.tolist() == sorted(range(50), key=lambda i: widths[i])  # stable
    assert counts.tolist() == [int((widths == bits).sum()) for bits in range(9)]
    assert order.dtype == counts.dtype == torch.int64
    assert buffers == (native._buffer(order), native._buffer(counts))
