"""The CUDA kernels without a GPU: csrc/tests/cuda_emulation runs their source on the CPU, warp by warp."""

import ctypes

import numpy as np
import pytest
import torch
from cuda_emulation import (
    DTYPES,
    KINDS,
    codes_of,
    device_of,
    in_order,
    int64,
    needs_compiler,
    or_null,
    seed_of,
    sparse,
    streams_of,
    vectors_of,
)
from quantized import possible_sizes, random_mask

from fewbit import functions
from fewbit.catalog import store
from fewbit.config import MASKED, MASKED_UNBIASED, ROTATED, UNIFORM
from fewbit.runtime.backends import reference, reference_quantizer
from fewbit.runtime.backends.reference_bits import philox_words
from fewbit.runtime.format import groups
from fewbit.runtime.format.encoding import Encoding, packed_words
from fewbit.runtime.ops import fixed_point
from fewbit.table import Knots

try:
    from fewbit import _kernels
    from fewbit.runtime.backends import native
except ImportError:
    _kernels = None

FUSED = QUANTIZED = DTYPES[0], DTYPES[2], DTYPES[3]
pytestmark = needs_compiler


# -- tables and inputs -----------------------------------------------------------------------------------


def random_encoding(bits, pieces, seed=0, scale=3.0):
    """Many-plane flips, both kinds of closed, breaks at zeros and subnormals."""
    rng = np.random.default_rng(seed)
    breaks = np.unique(np.concatenate([rng.normal(0, scale, pieces), [0.0, 1e-45, -1e-40, 6e-8]]))
    breaks = np.sort(rng.choice(breaks, pieces - 1, replace=False))
    codes = rng.integers(0, 1 << bits, pieces)
    codes[1:][codes[1:] == codes[:-1]] ^= 1
    if pieces == 1:
        codes = codes[:1]
    codes = np.array(_without_repeats(codes, 1 << bits))
    closed = tuple(rng.choice(["left", "right"], pieces - 1))
    return Encoding(bits, np.sort(rng.normal(0, 1, 1 << bits)), breaks, codes, closed)


def _without_repeats(codes, size):
    result = [int(codes[0])]
    for code in codes[1:]:
        result.append(int(code) if code != result[-1] else (int(code) + 1) % size)
    return result


def unbiased_encoding(bits, knots, seed=0):
    rng = np.random.default_rng(seed)
    points = np.sort(rng.normal(0, 2, knots))
    points[knots // 2] = points[knots // 2 - 1]  # a jump
    closed = ["left" if i in (knots // 2 - 1, knots // 2) else "right" for i in range(knots)]
    if knots == 2:
        points = np.array([-1.0, 1.0])
    values = rng.uniform(-0.2, 1.2, knots)
    levels = np.linspace(values.min(), values.max(), 1 << bits)
    stand_in = Knots(points, values, tuple(closed))
    return Encoding(bits, levels, np.array([]), np.array([0]), (), stand_in)


def inputs(n, dtype, encoding, seed=0, offset=0):
    """n values, `offset` elements off alignment: random, breaks, their neighbors, and specials."""
    rng = np.random.default_rng(seed)
    near = encoding.draw.points if encoding.unbiased else encoding.breaks32
    special = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, -1e-45, 1e-39, 6e-8, -6e-8]
    special += [3.4e38, -3.4e38, 65504.0, -65504.0]
    pool = torch.tensor(
        np.concatenate([rng.normal(0, 3, max(n, 1)), near, special]), dtype=torch.float64
    )
    pool = pool.to(dtype)
    up, down = (torch.full_like(pool, end) for end in (np.inf, -np.inf))
    pool = torch.cat([pool, torch.nextafter(pool, up), torch.nextafter(pool, down)])
    chosen = pool[torch.from_numpy(rng.integers(0, len(pool), n))]
    memory = torch.zeros(n + offset, dtype=dtype)
    memory[offset:] = chosen
    return memory[offset:]


def product(grad, packed, encoding):
    """Return the result of decode_mul, computed from the reference's codes."""
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    lut = torch.from_numpy(encoding.lut64 if wide == torch.float64 else encoding.lut32)
    codes = reference.unpack(packed, encoding.bits, grad.numel()).long()
    return (lut[codes] * grad.to(wide)).to(grad.dtype)


def same(actual, expected):
    """Equal bits, any NaN for any NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    numbers = ~expected.isnan()
    assert torch.equal(actual.signbit()[numbers], expected.signbit()[numbers])


SIZES = [1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1023, 1025, 4097]


# -- tests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 9))
def test_pack_and_unpack(cuda, bits):
    rng = np.random.default_rng(bits)
    for n in [*range(66), 1023, 1024, 1025, 4097]:
        for offset in (0, 3):
            codes = torch.from_numpy(rng.integers(0, 1 << bits, n + offset).astype(np.uint8))
            codes = codes[offset:]
            packed = cuda.pack(codes, bits)
            assert torch.equal(packed, reference.pack(codes, bits))
            assert torch.equal(cuda.unpack(packed, bits, n, offset), codes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_encode_with_few_breaks(cuda, bits, dtype):
    encoding = random_encoding(bits, 2 + 3 * bits, seed=bits)
    for n in (*range(0, 66, 1 if bits == 3 else 13), *SIZES):
        x = inputs(n, dtype, encoding, seed=n, offset=n % 3)
        assert torch.equal(cuda.encode(x, encoding), reference.encode(x, encoding, None)), n


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pieces", [1, 2, 3, 24, 25, 30, 97, 100, 401, 402, 3601])
def test_encode_with_any_number_of_breaks(cuda, pieces, dtype):
    encoding = random_encoding(4 if pieces < 1000 else 8, pieces, seed=pieces)
    x = inputs(2500, dtype, encoding)
    assert torch.equal(cuda.encode(x, encoding), reference.encode(x, encoding, None))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_encode_every_16_bit_input(cuda, dtype):
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    for encoding in (
        random_encoding(3, 9, seed=5, scale=0.5),
        *(
            Encoding.of(store.load_table(name, bits=bits))
            for name in ("gelu", "relu6")
            for bits in (1, 3)
        ),
    ):
        expected = reference.encode(x, encoding, None)
        assert torch.equal(cuda.encode(x, encoding), expected)
        y, packed = cuda.forward(12, (), x, encoding)
        same(y, torch.relu(x))
        assert torch.equal(packed, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_breaks_beyond_the_range_of_a_type(cuda, dtype):
    breaks = np.array([-3.4e38, -1e5, -65504.0, -1.0, 65504.0, 65519.0, 1e5, 3.39e38])
    codes = np.arange(9) % 8
    for sides in ("left", "right"):
        encoding = Encoding(3, np.arange(8.0), breaks, codes, (sides,) * 8)
        x = inputs(1500, dtype, encoding)
        assert torch.equal(cuda.encode(x, encoding), reference.encode(x, encoding, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_break_at_minus_zero(cuda, dtype):
    encoding = Encoding(1, np.arange(2.0), np.array([-0.0]), np.array([0, 1]), ("right",))
    x = torch.tensor([-1.0, -0.0, 0.0, 1.0], dtype=dtype)
    assert cuda.unpack(cuda.encode(x, encoding), 1, 4).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("knots", [2, 5, 255, 256, 1800])
def test_draws(cuda, knots, dtype):
    bits = 8 if knots == 5 else 3
    encoding = unbiased_encoding(bits, knots, seed=knots)
    for n, seed in ((1, 0), (33, -1), (2600, 1234567890123)):
        x = inputs(n, dtype, encoding, seed=n, offset=n % 2)
        seed = torch.tensor([seed])
        expected = reference.encode(x, encoding, seed)
        assert torch.equal(cuda.encode(x, encoding, seed), expected)


def test_draws_from_a_stand_in_that_overflows(cuda):
    """The difference of two x is infinite, and infinity times a slope of 0 is NaN, for which the last level but one is drawn."""
    stand_in = Knots(np.array([-3e38, 3e38]), np.array([0.3, 0.3]), ("right", "right"))
    encoding = Encoding(3, np.linspace(0, 1, 8), np.array([]), np.array([0]), (), stand_in)
    x = torch.tensor([-3.4e38, -3e38, -1.0, 0.0, 1e38, 2.9e38, 3e38, 3.4e38, torch.inf, torch.nan])
    for seed in map(torch.tensor, range(20)):
        assert torch.equal(cuda.encode(x, encoding, seed), reference.encode(x, encoding, seed))
    assert cuda.unpack(cuda.encode(x, encoding, seed), 3, len(x))[5] == 6 ^ 6 >> 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_decode_mul(cuda, bits, dtype):
    encoding = random_encoding(bits, 2 + bits, seed=bits)
    rng = np.random.default_rng(bits)
    for n in (0, *SIZES) if bits == 3 else (0, *SIZES[::3]):
        codes = torch.from_numpy(rng.integers(0, 1 << bits, n).astype(np.uint8))
        packed = reference.pack(codes, bits)
        grad = inputs(n, dtype, encoding, seed=n, offset=n % 3)
        expected = product(grad, packed, encoding)
        same(cuda.decode_mul(grad, packed, encoding, offset=n % 2), expected)
        one = inputs(1, dtype, encoding, seed=n)
        expected = product(one.expand(n), packed, encoding)
        same(cuda.decode_mul(one, packed, encoding, n=n), expected)


FUNCTIONS = {  # number in csrc/common/functions.h, of functions that are exact in any arithmetic
    12: ((), torch.relu),
    15: ((0.5, -2.0), lambda x: torch.nn.functional.threshold(x, 0.5, -2.0)),
    16: ((-1.0, 2.0), lambda x: torch.nn.functional.hardtanh(x, -1.0, 2.0)),
}


@pytest.mark.parametrize("dtype", FUSED, ids=str)
@pytest.mark.parametrize("kind", ["few", "many", "unbiased", "in place", "many in place"])
def test_forward(cuda, kind, dtype):
    encoding = {
        "many": lambda: random_encoding(6, 150, seed=2),
        "unbiased": lambda: unbiased_encoding(2, 9),
        "few": lambda: random_encoding(3, 10, seed=1),
    }[kind.split()[0] if "in" not in kind.split()[0] else "few"]()
    seed = torch.tensor([77]) if encoding.unbiased else None
    for n in (0, 1, 33, 255, 1024, 1500, 4097):
        for number, (parameters, function) in FUNCTIONS.items():
            x = inputs(n, dtype, encoding, seed=n, offset=n % 2)
            y, packed = cuda.forward(
                number, parameters, x, encoding, seed, in_place="in place" in kind, offset=n % 3
            )
            same(y, function(x))
            assert torch.equal(packed, reference.encode(x, encoding, seed))


def test_forward_of_every_function(cuda):
    """Every number runs, and is f to float32 rounding (how well is tested on the CPU's kernels)."""
    names = "gelu gelu_tanh quick_gelu silu mish tanh sigmoid softplus selu elu celu hardswish relu relu6 "
    names += "leaky_relu threshold hardtanh hardsigmoid hardshrink softshrink"
    encoding = random_encoding(3, 10, seed=1)
    x = torch.linspace(-6, 6, 999)
    for number, name in enumerate(names.split()):
        function = functions.get(name)
        y, packed = cuda.forward(number, tuple(function.parameters.values()), x, encoding)
        np.testing.assert_allclose(y, function.value(x.numpy()), rtol=1e-5, atol=1e-6)
        assert torch.equal(packed, reference.encode(x, encoding, None))
    with pytest.raises(RuntimeError, match="function number from 0 to 19, got 20"):
        cuda.forward(20, (), x, encoding)


def quantized(kind):
    """Return pairs of a shape and a group size."""
    shapes = (3, 70), (2, 300), (1, 513), (5, 64), (9, 31), (40, 7), (0, 5), (4, 0), (2, 641)
    return [(shape, size) for size in possible_sizes(kind, 32, 64, 256, 320) for shape in shapes]


kinds = pytest.mark.parametrize("kind", KINDS)


def compare_quantizer(
    cuda, x, bits, group_size, fp32_min, widths=None, words=None, offset=0, kind=UNIFORM
):
    if kind in (MASKED, MASKED_UNBIASED):  # about half of the elements are 0
        x = x.clamp(min=0)
    seed = -(2**62) + bits
    arguments = bits, group_size, fp32_min, widths, words
    given = seed if offset else torch.tensor([seed])  # in device memory, or a number
    packed, ranges = cuda.quantize(x, given, *arguments, offset=offset, kind=kind)
    expected = reference.quantize(x, seed, *arguments, kind=kind)
    what = tuple(x.shape), bits, group_size, fp32_min
    assert torch.equal(ranges.view(torch.int16), expected[1].view(torch.int16)), what
    assert torch.equal(packed, expected[0]), what
    restored = torch.empty_like(x)
    reference.dequantize(packed, ranges, bits, group_size, restored, widths, kind=kind)
    copy = packed, ranges, bits, group_size, x.shape, x.dtype, widths, None, offset
    same(cuda.dequantize(*copy, kind=kind), restored)
    if kind != UNIFORM:
        _, mask = random_mask(x.numel())
        reference.dequantize(*copy[:4], restored, widths, kind=kind, mask=mask)
        same(cuda.dequantize(*copy, kind=kind, mask=mask), restored)


@kinds
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_quantizer(cuda, bits, dtype, kind):
    for i, (shape, group_size) in enumerate(quantized(kind)[(bits + DTYPES.index(dtype)) % 2 :: 2]):
        x = inputs(shape[0] * shape[1], dtype, random_encoding(2, 3), seed=i, offset=i % 3)
        # Specials in some groups only: they lose theirs.
        x = torch.where(
            torch.arange(len(x)) % 97 < 90 - 3 * i, x.nan_to_num(0, 9, -9).clamp(-9, 9), x
        )
        x = x.view(shape)
        compare_quantizer(cuda, x, bits, group_size, i % 2 == 1, offset=i % 3, kind=kind)


@kinds
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_quantizer_of_several_widths(cuda, dtype, kind):
    rng = np.random.default_rng(DTYPES.index(dtype))
    for i, (shape, group_size) in enumerate(quantized(kind)):
        x = torch.from_numpy(rng.normal(10 * (i % 2), 1, shape)).to(dtype)
        widths = torch.from_numpy(rng.integers(1, 9, shape[0], np.uint8))
        words = groups.mixed_words(widths.tolist(), shape[1]) + i % 4
        compare_quantizer(cuda, x, 1, group_size, i % 2 == 0, widths, words, i % 3, kind)


@kinds
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_full_groups(cuda, dtype, kind):
    """Two groups of 256 elements that share a warp: of one tensor, of samples of several widths, and across samples."""
    rng = np.random.default_rng(DTYPES.index(dtype))
    for bits in range(1, 9):
        shapes = (0, 3, 512), (1, 5, 256), (0, 80, 32), (0, 3, 776)
        for offset, samples, features in shapes:
            x = inputs(samples * features, dtype, random_encoding(2, 3), seed=bits, offset=offset)
            # Every third group has numbers that are not finite.
            plain = x.nan_to_num(0, 9, -9).clamp(-9, 9)
            x = torch.where(torch.arange(len(x)) // 256 % 3 > 0, plain, x).view(samples, features)
            compare_quantizer(cuda, x, bits, 256, bits % 2 == 0, offset=offset, kind=kind)
            widths = torch.from_numpy(rng.integers(1, 9, samples, np.uint8))
            words = groups.mixed_words(widths.tolist(), features)
            compare_quantizer(cuda, x, 1, 256, bits % 2 == 1, widths, words, kind=kind)


rotated_kinds = pytest.mark.parametrize("kind", KINDS[1:])


@rotated_kinds
@pytest.mark.parametrize("group_size", (32, 96, 224, 256))
def test_rotated_groups_of_every_length(cuda, group_size, kind):
    """Groups of 1 to 256 elements, with all dtypes and bits in turn."""
    rng = np.random.default_rng(group_size)
    for features in range(64, 601, 1 if group_size == 256 else 5):
        dtype, bits = QUANTIZED[features % 3], 1 + features // 4 % 8
        x = torch.from_numpy(rng.normal(1, 2, (2 + features % 2, features))).to(dtype)
        compare_quantizer(cuda, x, bits, group_size, features % 3 == 0, kind=kind)
    for n in range(64):
        x = torch.from_numpy(rng.standard_cauchy((n % 9, n))).float()
        compare_quantizer(cuda, x, 1 + n % 8, group_size, n % 2 == 0, kind=kind)


def unusual_groups(length):
    """Rows that are rare: constant, with one element or two, near the ends of float32, and not finite."""
    x = torch.from_numpy(np.random.default_rng(length).normal(0, 1, (14, length))).float()
    x[0], x[1], x[2] = 0.0, -3.0, 1e-40
    x[3], x[3, length // 3] = 0.0, 5.0
    x[4], x[4, 0], x[4, -1] = 0.0, -1.0, 1.0
    x[5, length // 2] = 100.0
    x[6] *= 1e37
    x[7] *= 1e19
    x[8] *= 1e-25
    x[9] *= 1e-40
    x[10, 7], x[11, 3], x[12, length - 1] = torch.nan, torch.inf, -torch.inf
    x[13, :2] = torch.tensor([3.4e38, -3.4e38])
    return x


@rotated_kinds
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("length", (64, 100, 256, 300, 512))
def test_unusual_rotated_groups(cuda, length, dtype, kind):
    rows = unusual_groups(length)
    for bits in range(1, 9):
        # An odd and an even number of normal groups before: the two groups of a warp differ.
        normal = torch.ones(bits % 3, length).cumsum(1).sin()
        x = torch.cat([normal, rows]).to(dtype)
        compare_quantizer(cuda, x, bits, 256, bits % 2 == 0, kind=kind)


@rotated_kinds
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_groups_with_spikes(cuda, dtype, kind):
    """Groups that are rotated twice, among others: in one of a warp's two groups, in both, and in several pairs in a row."""
    rng = np.random.default_rng(DTYPES.index(dtype))
    for bits in range(1, 6):
        x = torch.from_numpy(rng.normal(0, 1, (70 + bits, 256)))
        spikes = torch.from_numpy(rng.random(len(x)) < 0.2 * bits)
        x[spikes, torch.from_numpy(rng.integers(0, 256, len(x)))[spikes]] = 20.0
        compare_quantizer(cuda, x.to(dtype), bits, 256, bits % 2 == 0, kind=kind)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("bits", (1, 2, 3, 4, 5))
def test_a_relu_and_the_copy_of_its_result(cuda, bits, dtype):
    """In one kernel, if all groups are full ones side by side. Groups may have spikes, or numbers that are not finite."""
    rng = np.random.default_rng(bits)
    shapes = (
        (3, 512),
        (1, 256),
        (7, 768),
        (45, 32),
        (1, 7),
        (300, 63),
        (80, 256),
        (2, 300),
        (0, 256),
    )
    for number, (samples, features) in enumerate(shapes):
        x = torch.from_numpy(rng.normal(0, 1, (samples, features)))
        x.view(-1)[::301] = 30.0
        if number % 3 == 0:
            x[samples // 2, :5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e-30, -0.0])
            x[-1] *= 1e-25
        x, fp32_min, seed = x.to(dtype), number % 2 == 0, number - 4
        for settings in ({}, {"in_place": True}, {"offset": 1}):
            found = cuda.relu_quantized(x, seed, bits, 256, fp32_min, **settings)
            fits = features % 256 == 0 or features < 64
            fits = fits and bits <= 4 and ("offset" not in settings or not x.numel())
            assert (found is not None) == fits
            if found is None:
                continue
            y, mask, packed, ranges = found
            same(y, x.relu())
            assert torch.equal(mask, reference.pack((~(x <= 0)).reshape(-1).to(torch.uint8), 1))
            expected = reference.quantize(x.relu(), seed, bits, 256, fp32_min, kind=MASKED)
            assert torch.equal(packed, expected[0])
            assert torch.equal(ranges.view(torch.int16), expected[1].view(torch.int16))


def compare_with_vectors(cuda, x, group_size, inner, entries, rng, kind, several=(None, None)):
    """Compare normalized quantizing, and affine maps, with the reference backend. several: widths and words, or None."""
    a, b = (torch.from_numpy(rng.normal(1, 1, entries)).float() for _ in range(2))
    what = tuple(x.shape), inner, entries
    seed = torch.tensor([x.numel()])
    for mean in (None, a):
        arguments = seed, 3, group_size, False, *several
        options = {"normalize": (mean, b, inner), "kind": kind}
        made = cuda.quantize(x, *arguments, **options)
        expected = reference.quantize(x, *arguments, **options)
        assert torch.equal(made[0], expected[0]), what
        assert torch.equal(made[1].view(torch.int16), expected[1].view(torch.int16)), what
    packed, ranges, _ = reference.quantize(x, seed, 3, group_size, True, kind=kind)
    for vectors in ((a, b), (None, b), (a, None)):
        affine = *vectors, inner
        copy = packed, ranges, 3, group_size
        out = cuda.dequantize(*copy, x.shape, x.dtype, None, affine, kind=kind)
        expected = torch.empty_like(x)
        reference.dequantize(*copy, expected, affine=affine, kind=kind)
        same(out, expected)


@kinds
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_normalized_and_mapped(cuda, dtype, kind):
    rng = np.random.default_rng(DTYPES.index(dtype))
    for (samples, features), group_size in quantized(kind):
        x = torch.from_numpy(rng.normal(3, 2, (samples, features))).to(dtype)
        widths = torch.from_numpy(rng.integers(1, 9, samples, np.uint8))
        words = groups.mixed_words(widths.tolist(), features)
        # Each for two of the four dtypes.
        for inner, entries in list(indices(x.numel()))[DTYPES.index(dtype) % 2 :: 2]:
            for several in ((None, None), (widths, words)):
                compare_with_vectors(cuda, x, group_size, inner, entries, rng, kind, several)


@kinds
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_normalized_and_mapped_full_groups(cuda, dtype, kind):
    """In full groups, the kernels find entries without divisions if neighbors have one entry, or neighboring ones."""
    rng = np.random.default_rng(DTYPES.index(dtype))
    x = torch.from_numpy(rng.normal(3, 2, (6, 512))).to(dtype)
    for inner, entries in (
        *((1, entries) for entries in (1, 2, 12, 16, 24, 48, 512, 3072)),
        *((2, 12), (2, 256), (64, 3), (256, 2), (512, 6), (3072, 1)),
    ):
        compare_with_vectors(cuda, x, 256, inner, entries, rng, kind)


def indices(n):
    """Some (inner, entries) whose product divides n."""
    divisors = [number for number in range(1, n + 1) if n % number == 0]
    pairs = [
        (inner, divisor) for inner in divisors for divisor in divisors if n // inner % divisor == 0
    ]
    return pairs[:: max(1, len(pairs) // 7)]


def test_warps_take_several_groups_and_tiles(cuda):
    """More groups, and tiles, than a grid of one multiprocessor has warps."""
    x = torch.from_numpy(np.random.default_rng(0).normal(0, 1, (600, 65)))
    encoding = random_encoding(2, 4, seed=3)
    tiles = inputs(64 * 8 * 512 + 3 * 512 + 77, torch.float32, encoding)
    with device_of(cuda, 1):
        compare_quantizer(cuda, x.to(torch.bfloat16), 2, 64, False)
        compare_quantizer(cuda, x.to(torch.bfloat16), 2, 64, False, kind=ROTATED)
        compare_squares(cuda, x.to(torch.float16), 64)
        packed = cuda.encode(tiles, encoding)
    assert torch.equal(packed, reference.encode(tiles, encoding, None))


@pytest.mark.parametrize("is_reversed", [False, True])
@kinds
def test_warps_take_several_full_groups(cuda, kind, is_reversed):
    """More pairs of full groups than warps, some of which have a spike, or numbers that are not finite."""
    x = torch.from_numpy(np.random.default_rng(1).normal(0, 1, (1301, 256))).to(torch.bfloat16)
    x[700::90, 7] = 100.0
    x[901::140, 3] = torch.inf
    with device_of(cuda, 1), in_order(cuda, is_reversed):
        for bits in (1, 2, 3, 4, 5):
            compare_quantizer(cuda, x, bits, 256, bits == 3, kind=kind)
        compare_quantizer(cuda, x.float(), 2, 256, True, kind=kind)
        rng = np.random.default_rng(2)
        x = torch.from_numpy(rng.normal(3, 2, (1200, 256))).to(torch.bfloat16)
        for inner, entries in ((256, 1200), (256, 5), (512, 3), (1, 256), (1, 24), (1, 9600)):
            compare_with_vectors(cuda, x, 256, inner, entries, rng, kind)


@kinds
def test_several_widths_without_room_stop_the_kernel(cuda, kind):
    """Only the device knows how many words mixed widths take, so the kernel itself has to check the room."""
    x, seed = torch.linspace(-1, 1, 300).view(3, 100), torch.tensor([5])
    widths = torch.tensor([2, 8, 5], dtype=torch.uint8)
    words = groups.mixed_words(widths.tolist(), 100)
    packed, ranges = cuda.quantize(x, seed, 1, 256, False, widths, words, kind=kind)
    cuda.dequantize(packed, ranges, 1, 256, x.shape, x.dtype, widths, kind=kind)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        cuda.quantize(x, seed, 1, 256, False, widths, words - 1, kind=kind)
    for cut in ((packed[:-1], ranges, widths), (packed, ranges[:-1], widths)):
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            cuda.dequantize(*cut[:2], 1, 256, x.shape, x.dtype, cut[2], kind=kind)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        cuda.dequantize(packed, ranges, 1, 256, x.shape, x.dtype, widths + 8, kind=kind)


def squares_of_groups(x, group_size, normalize=None):
    """length * range^2 of each group, in float32; NaN where an element is not finite."""
    rows = x.float()
    if normalize is not None:
        mean, rstd, inner = normalize
        index = torch.arange(x.numel()) // inner % len(rstd)
        centered = rows.flatten() - (0.0 if mean is None else mean[index])
        rows = (centered * rstd[index]).view(x.shape)
    terms = [torch.empty(0)]
    for group in (part for row in rows for part in row.split(group_size)):
        extent = group.max() - group.min()
        square = len(group) * (extent * extent)
        terms.append(square.view(1) if group.isfinite().all() else torch.tensor([torch.nan]))
    return torch.cat(terms)


def squares_of_cpu(isa, x, group_size, normalize=None):
    """The same of the CPU's kernels."""
    samples, features = x.shape
    out = torch.empty(groups.group_count(samples, features, group_size))
    copy = _kernels.CopyShape(samples, features, group_size, 1, False, 0)
    _kernels.Cpu(isa).squares(x, copy, out, *native._vectors(normalize, x.numel()))
    return out


def compare_squares(cuda, x, group_size, normalize=None, offset=0):
    found = cuda.squares(x, group_size, normalize, offset)
    same(found, squares_of_groups(x, group_size, normalize))
    for isa in _kernels.cpu_isas() if _kernels else ():
        same(found, squares_of_cpu(isa, x, group_size, normalize))
    return found


def compare_rotated_squares(cuda, x, group_size, normalize=None, kind=ROTATED):
    samples, features = x.shape
    found = cuda.squares(x, group_size, normalize, kind=kind).view(samples, -1)
    same(found.sum(1), reference.squares(x, group_size, normalize, kind))


def squared(kind):
    """Return the pairs of `quantized` whose samples are cut into groups one by one."""
    return [case for case in quantized(kind) if case[0][1] >= groups.LEAST_FEATURES]


@rotated_kinds
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_squares_of_rotated_groups(cuda, dtype, kind):
    rng = np.random.default_rng(DTYPES.index(dtype))
    for shape, group_size in squared(kind):
        if not shape[0]:
            continue
        x = torch.from_numpy(rng.normal(3, 2, shape)).to(dtype)
        x[rng.random(shape) < 0.3] = 0
        compare_rotated_squares(cuda, x, group_size, kind=kind)
        vectors = (torch.from_numpy(rng.normal(1, 1, shape[1])).float() for _ in range(2))
        compare_rotated_squares(cuda, x, group_size, (*vectors, 1), kind)
    for length in (64, 256, 600):
        compare_rotated_squares(cuda, unusual_groups(length).to(dtype), 256, kind=kind)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_squares(cuda, dtype):
    for i, (shape, group_size) in enumerate(squared(UNIFORM)):
        x = inputs(shape[0] * shape[1], dtype, random_encoding(2, 3), seed=i, offset=i % 3)
        # In most groups all elements are finite.
        plain = x.nan_to_num(0, 9, -9).clamp(-9, 9)
        x = torch.where(torch.arange(len(x)) % 97 < 97 - 9 * (i % 2), plain, x).view(shape)
        found = compare_squares(cuda, x, group_size, offset=i % 3)
        assert i % 2 or found.isfinite().all()


def test_squares_of_what_is_beyond_float32(cuda):
    """A range that overflows is infinite, what was not finite is NaN."""
    x = torch.zeros(6, 70)
    x[0, :2] = torch.tensor([3e38, -3e38])
    x[1, 69] = torch.inf
    x[2, 64] = -torch.inf
    x[3, 7] = torch.nan
    x[4] = -torch.inf
    found = compare_squares(cuda, x, 64)
    nan, inf = torch.nan, torch.inf
    same(found, torch.tensor([inf, 0, 0, nan, 0, nan, nan, 0, nan, nan, 0, 0]))


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_squares_of_what_is_normalized(cuda, dtype):
    rng = np.random.default_rng(DTYPES.index(dtype))
    for shape, group_size in squared(UNIFORM):
        x = torch.from_numpy(rng.normal(3, 2, shape)).to(dtype)
        for inner, entries in list(indices(x.numel()))[DTYPES.index(dtype) % 2 :: 2]:
            mean, rstd = (torch.from_numpy(rng.normal(1, 1, entries)).float() for _ in range(2))
            for vectors in ((mean, rstd), (None, rstd)):
                compare_squares(cuda, x, group_size, (*vectors, inner))


def test_squares_of_more_elements_than_an_int_counts(cuda):
    """The last block of a grid over two samples of 2**31 + 1000 elements, in memory that exists only where touched."""
    features = (1 << 31) + 1000
    count = groups.group_count(2, features, 256)
    first = (-(-count // 8) - 1) * 8
    x, out = sparse((2 * features, torch.bfloat16), (count, torch.float32))
    # The last group of a sample has 232 elements.
    tail = torch.from_numpy(np.random.default_rng(0).normal(0, 1, 232 + 9 * 256))
    x[-len(tail) :] = tail
    with device_of(cuda, 1 << 20, first // 8):
        cuda.call("squares", x, 3, int64(2), int64(features), 256, 0, out, *vectors_of(None))
    expected = squares_of_groups(x[None, -len(tail) :].clone(), 256)
    same(out[first:], expected[first - count :])
    assert (out[first:] > 0).all() and not out[first - 1000 : first].any()


@kinds
def test_groups_of_more_elements_than_an_int_counts(cuda, kind):
    """The last block of a grid over 2**31 + 777 elements, in memory that exists only where it is touched."""
    n, bits, seed = (1 << 31) + 777, 2, torch.tensor([-5])
    count = groups.group_count(1, n, 256)
    first = count // 2 // 8 * 16  # the first group of the last block
    rows = count + groups.seed_rows(kind)
    x, packed, ranges, out = sparse(
        (n, torch.bfloat16),
        (packed_words(n, bits), torch.int32),
        (2 * rows, torch.bfloat16),
        (n, torch.bfloat16),
    )
    ranges = ranges.view(-1, 2)
    begin, word = first * 256, first * 8 * bits
    tail = torch.from_numpy(np.random.default_rng(0).normal(0, 1, n - begin)).to(x.dtype)
    x[begin:] = tail.clamp(min=0) if kind in (MASKED, MASKED_UNBIASED) else tail
    shape, of_kind = (int64(1), int64(n), 256), (KINDS.index(kind), codes_of(kind))
    streams = streams_of(None)[1]
    with device_of(cuda, 1 << 20, first // 16):
        made = *seed_of(seed), packed, int64(len(packed)), ranges, int64(count), *vectors_of(None)
        cuda.call("quantize", x, 3, *shape, bits, *streams, 0, *of_kind, *made)
        if kind != UNIFORM:  # the first block writes them
            ranges[count:].view(torch.int16).view(-1)[:4] = seed.view(torch.int16)
        copy = packed, int64(len(packed)), ranges, int64(count), bits, *streams, 0, *of_kind
        cuda.call("dequantize", *copy, *shape, out, 3, *vectors_of(None), None)
    given = seed, bits, 256, False, kind, first
    expected = reference_quantizer._stream(x[begin:][None].float(), *given)
    assert torch.equal(packed[word:], expected[0])
    assert torch.equal(ranges[first:count].view(torch.int16), expected[1].view(torch.int16))
    restored = reference_quantizer._restored(
        *expected, bits, 256, 1, n - begin, kind, None if kind == UNIFORM else seed, first
    )
    same(out[begin:], restored[0].to(out.dtype))
    assert not packed[word - 1000 : word].any() and not out[begin - 1000 : begin].any()


def test_more_elements_than_an_int_counts(cuda, monkeypatch):
    """The last block of a grid over 2**32 elements, in memory that exists only where it is touched."""
    encoding = random_encoding(3, 9, seed=4)
    n = (1 << 32) + 2000
    tail = 8 * 1024 + (n % (8 * 1024))  # at least what the last block holds
    x, out, packed = sparse(
        (n, torch.bfloat16), (n, torch.bfloat16), (packed_words(n, 3), torch.int32)
    )
    tiles = -(-n // 1024)
    blocks = -(-tiles // 8)
    first = (blocks - 1) * 8 * 1024
    x[first - tail :] = inputs(n - first + tail, torch.bfloat16, encoding)
    with device_of(cuda, 1 << 20, blocks - 1):
        cuda.call("encode", cuda.table(encoding), x, 3, int64(n), packed, or_null(None))
        cuda.call("decode_mul", cuda.table(encoding), x, 3, int64(n), packed, out, 0)
    words = packed[first // 32 * 3 :]
    assert torch.equal(words, reference.encode(x[first:].clone(), encoding, None))
    same(out[first:], product(x[first:].clone(), words.clone(), encoding))
    channels = torch.linspace(-2, 2, 8)
    grid = fixed_point.grid_of(channels.cos(), channels, 3, "cpu")
    of_grid = grid, int64(8), int64(2), 3
    with device_of(cuda, 1 << 20, blocks - 1):
        cuda.call("mask_fixed", x, 3, int64(n), packed, *of_grid, ctypes.c_double(0.5), out)
    expected = torch.empty(n - first, dtype=torch.bfloat16)
    reference.mask_fixed(x[first:].clone(), words.clone(), grid, 3, 2, 0.5, expected)
    same(out[first:], expected)
    encoding, seed = unbiased_encoding(3, 9), torch.tensor([-5])
    with device_of(cuda, 1 << 20, blocks - 1):
        cuda.call("encode", cuda.table(encoding), x, 3, int64(n), packed, seed)
    numbers = philox_words(seed, torch.arange(first, n))[0]
    monkeypatch.setattr(reference, "uniform", lambda seed, n: (numbers >> 8).float() * 2.0**-24)
    assert torch.equal(words, reference.encode(x[first:].clone(), encoding, seed))
    assert not packed[first // 32 * 3 - 1000 : first // 32 * 3].any()
    assert not out[first - tail : first].any()


def test_errors_are_one_clear_line(cuda):
    x = torch.zeros(4)
    with pytest.raises(RuntimeError, match="at most 3600 breaks .* got 4000"):
        cuda.encode(x, random_encoding(8, 4001))
    with pytest.raises(RuntimeError, match="at most 1800 knots .* got 1900"):
        cuda.encode(x, unbiased_encoding(3, 1900), torch.tensor([1]))
    with pytest.raises(RuntimeError, match="expected a seed"):
        cuda.encode(x, unbiased_encoding(3, 5))
    with pytest.raises(RuntimeError, match="float64"):
        cuda.forward(0, (), x.double(), random_encoding(2, 4))
    grid = torch.zeros(7, 1)
    with pytest.raises(RuntimeError, match="fewer than 1073741824 entries, got 1073741824"):
        of_grid = grid, int64(1 << 30), int64(1), 3
        cuda.call("mask_fixed", x, 0, int64(1), x, *of_grid, ctypes.c_double(0.5), x)


@pytest.mark.parametrize(
    ("driver", "capability", "reason"),
    [
        (13000, 90, None),
        (13020, 87, None),  # machine code for 8.0
        (13000, 120, None),  # PTX for 9.0
        (0, 90, "no CUDA driver was found"),
        (12040, 90, "the driver supports CUDA 12.4, these kernels need 13.0"),
        (13000, 75, "device 0 has compute capability 7.5, these kernels were built for 8.0, 9.0"),
    ],
)
def test_which_devices_can_run(cuda, driver, capability, reason):
    found = cuda.library.emulated_obstacle(driver, capability)
    assert (found and found.decode()) == reason


# -- the fixed-point code of pre-activations ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", (1, 4, 7, 8))
@pytest.mark.parametrize(
    ("n", "of_channels", "of_statistics"),  # pairs (entries, inner)
    [
        (1, (1, 1), (1, 1)),
        (33, (3, 1), (1, 33)),
        (1400, (7, 5), (140, 10)),
        (3000, (1, 1), (1000, 1)),  # in vectors of four for float32 only
        (4096, (2, 512), (2, 512)),  # one entry for each run of neighbors
        (5000, (5, 1000), (625, 8)),
        (5488, (14, 196), (14, 196)),  # the same for runs of four
        (6144, (24, 1), (24, 1)),  # neighboring entries
        (6144, (3072, 2), (6, 1024)),
        (10000, (2000, 1), (80, 125)),
    ],
)
def test_fixed_point(cuda, n, of_channels, of_statistics, bits, dtype):
    generator = torch.Generator().manual_seed(n + bits)
    channels, inner = of_channels
    offset = bits % 2  # off alignment

    def normal(size, dtype=torch.float32):
        return (2 * torch.randn(size + offset, generator=generator)).to(dtype)[offset:]

    gamma, beta = normal(channels), normal(channels)
    gamma[0], beta[1::7], gamma[2::7], beta[2::7] = 0.0, 20.0, 0.0, -0.0
    gamma[3::7], gamma[4::9] = -0.1, torch.nan
    x, y = normal(n, dtype), normal(n, dtype)
    y[::9], y[1::9] = 0.0, torch.nan
    x[::11], x[1::13], x[2::13], x[3::17] = torch.nan, torch.inf, -torch.inf, 1e4
    mean, rstd, scale = (normal(of_statistics[0]) for _ in range(3))
    grid = fixed_point.grid_of(gamma, beta, bits, "cpu")
    same(cuda.grid_fixed(gamma, beta, bits), reference.grid_fixed(gamma, beta, bits))
    of = grid, bits, inner
    statistics = rstd, of_statistics[1]
    for given, equal in (
        (None, None),
        ((None, *statistics), (torch.zeros_like(rstd), *statistics)),
        ((mean, *statistics), (mean, *statistics)),
    ):
        packed = cuda.encode_fixed(x, y, *of, given)
        assert torch.equal(packed, reference.encode_fixed(x, y, *of, equal))
    for options in (
        {},
        {"scale": (scale, of_statistics[1])},
        *({"slope": slope} for slope in (1.0, 0.0, 0.1)),
    ):
        expected = torch.empty(n, dtype=dtype)
        reference.decode_fixed(packed, *of, expected, **options)
        same(cuda.decode_fixed(packed, *of, n, dtype, **options, offset=offset), expected)
    grad, expected = normal(n, dtype), torch.empty(n, dtype=dtype)
    grad[::5] = torch.inf
    for slope in (0.0, 0.1):
        reference.mask_fixed(grad, packed, *of, slope, expected)
        same(cuda.mask_fixed(grad, packed, *of, slope, offset=offset), expected)


# -- The bits of samples ---------------------------------------------------------------------------------

SPECIAL = torch.tensor([0.0, torch.inf, torch.nan, -0.0, 1.0, 1.0, 1e-42, 3e38])


@kinds
@pytest.mark.parametrize("samples", [1, 3, 31, 255, 256, 700])
def test_bits_of_samples(cuda, samples, kind):
    rng = np.random.default_rng(samples)
    spread = torch.from_numpy(np.exp(rng.normal(0, 3, samples)).astype(np.float32))
    ties = torch.from_numpy(rng.integers(0, 3, samples).astype(np.float32))
    special = SPECIAL[torch.from_numpy(rng.integers(0, len(SPECIAL), samples))]
    totals = {samples, samples + 1, 2 * samples, 5 * samples // 2 + 1, 8 * samples - 1, 8 * samples}
    for squares in (spread, ties, torch.zeros(samples), special):
        for total in totals:
            if samples <= total <= 8 * samples:
                found = cuda.share_bits(squares, total, kind)
                assert torch.equal(found, reference.share_bits(squares, total, kind)), total
                assert found.sum() == total


@pytest.mark.parametrize("samples", [0, 1, 31, 256, 257, 1000])
def test_order_of_samples(cuda, samples):
    rng = np.random.default_rng(samples)
    for least, most in ((0, 9), (1, 9), (2, 3)):
        widths = torch.from_numpy(rng.integers(least, most, samples, np.uint8))
        order, counts = cuda.order_samples(widths)
        assert order.tolist() == sorted(range(samples), key=lambda i: widths[i])  # stable
        assert counts.tolist() == [int((widths == bits).sum()) for bits in range(9)]
