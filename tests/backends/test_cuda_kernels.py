"""The CUDA kernels without a GPU, in an emulation on the CPU, through their bindings, against the reference backend."""

import numpy as np
import pytest
import torch
from cuda_emulation import needs_compiler, sparse, without_pairs
from quantized import check_bits_of_samples, kinds, mixed, possible_sizes, random_mask

from fewbit import functions
from fewbit.catalog import store
from fewbit.config import MASKED, ROTATED, UNIFORM
from fewbit.runtime.backends import reference, reference_quantizer
from fewbit.runtime.backends.reference_bits import philox_words
from fewbit.runtime.format import groups
from fewbit.runtime.format.channels import Normalization
from fewbit.runtime.format.encoding import Encoding
from fewbit.table import Knots

pytestmark = needs_compiler
DTYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16
QUANTIZED = DTYPES[0], DTYPES[2], DTYPES[3]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
quantized_dtypes = pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
rotated_kinds = pytest.mark.parametrize("kind", ["rotated", "masked"])


# -- tables and inputs -----------------------------------------------------------------------------------


def random_encoding(bits, pieces, seed=0, scale=3.0):
    """Many-plane flips, both kinds of closed, breaks at zeros and subnormals."""
    rng = np.random.default_rng(seed)
    breaks = np.unique(np.concatenate([rng.normal(0, scale, pieces), [0.0, 1e-45, -1e-40, 6e-8]]))
    breaks = np.sort(rng.choice(breaks, pieces - 1, replace=False))
    codes = rng.integers(0, 1 << bits, pieces)
    for i in range(1, pieces):
        codes[i] = (codes[i] + (codes[i] == codes[i - 1])) % (1 << bits)
    closed = tuple(rng.choice(["left", "right"], pieces - 1))
    return Encoding(bits, np.sort(rng.normal(0, 1, 1 << bits)), breaks, codes, closed)


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
    return off_alignment(pool[torch.from_numpy(rng.integers(0, len(pool), n))], offset)


def off_alignment(x, offset):
    """Return x in memory that begins `offset` elements off alignment."""
    memory = torch.zeros(x.numel() + offset, dtype=x.dtype)
    memory[offset:] = x.reshape(-1)
    return memory[offset:].view(x.shape)


def mostly_finite(x, share):
    """Return x with finite numbers in that share of every 97 elements."""
    plain = x.nan_to_num(0, 9, -9).clamp(-9, 9)
    return torch.where(torch.arange(len(x)) % 97 < share, plain, x)


def normal(rng, shape, dtype=torch.float32, mean=0.0, std=1.0):
    return torch.from_numpy(rng.normal(mean, std, shape)).to(dtype)


def random_vectors(rng, entries):
    return [normal(rng, entries, mean=1) for _ in range(2)]


def same(actual, expected):
    """Equal bits, any NaN for any NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    numbers = ~expected.isnan()
    assert torch.equal(actual.signbit()[numbers], expected.signbit()[numbers])


def compare_encode(cuda, x, encoding, seed=None):
    packed = cuda.kernels.encode(x, encoding, seed)
    assert torch.equal(packed, reference.encode(x, encoding, seed)), len(x)
    return packed


def compare_decode(cuda, grad, packed, encoding, offset=0):
    out = cuda.empty(grad.numel(), dtype=grad.dtype, offset=offset)
    cuda.kernels.decode_mul(grad, packed, encoding, out)
    expected = torch.empty(grad.shape, dtype=grad.dtype)
    reference.decode_mul(grad, packed, encoding, expected)
    same(out, expected)


# -- activations -----------------------------------------------------------------------------------------

SIZES = [0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1023, 1025, 4097]


@pytest.mark.parametrize("bits", range(1, 9))
def test_pack_and_unpack(cuda, bits):
    rng = np.random.default_rng(bits)
    for n in SIZES:
        codes = torch.from_numpy(rng.integers(0, 1 << bits, n).astype(np.uint8))
        packed = cuda.kernels.pack(off_alignment(codes, n % 4), bits)
        assert torch.equal(packed, reference.pack(codes, bits))
        assert torch.equal(cuda.kernels.unpack(packed, bits, n), codes)


def test_seeds(cuda):
    for count in (0, 1, 255, 256, 1000):
        counters = [torch.tensor([-5], dtype=torch.int64) for _ in range(2)]
        seeds = cuda.kernels.draw_seeds(counters[0], count)
        assert torch.equal(seeds, reference.draw_seeds(counters[1], count))
        assert torch.equal(*counters)


@dtypes
@pytest.mark.parametrize("bits", range(1, 9))
@without_pairs
def test_codes_and_products_of_every_size(cuda, bits, dtype):
    encoding = random_encoding(bits, 2 + 3 * bits, seed=bits)
    for n in SIZES if bits == 3 else SIZES[bits % 3 :: 3]:
        x = inputs(n, dtype, encoding, seed=n, offset=n % 3)
        packed = compare_encode(cuda, x, encoding)
        compare_decode(cuda, x, packed, encoding, offset=n % 2)
        compare_decode(cuda, inputs(1, dtype, encoding, seed=n).expand(n), packed, encoding)


@dtypes
@pytest.mark.parametrize("pieces", [1, 2, 3, 24, 25, 30, 97, 100, 401, 402, 2001])
def test_encode_with_any_number_of_breaks(cuda, pieces, dtype):
    encoding = random_encoding(4 if pieces < 1000 else 8, pieces, seed=pieces)
    compare_encode(cuda, inputs(2500, dtype, encoding), encoding)


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
@without_pairs
def test_encode_every_16_bit_input(cuda, dtype):
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    tables = [store.load_table(name, bits=bits) for name, bits in (("gelu", 3), ("relu6", 1))]
    for encoding in (random_encoding(3, 9, seed=5, scale=0.5), *map(Encoding.of, tables)):
        y = cuda.empty(len(x), dtype=dtype)
        packed = cuda.kernels.forward(x, "relu", (), encoding, None, y)
        same(y, torch.relu(x))
        assert torch.equal(packed, compare_encode(cuda, x, encoding))


@dtypes
def test_breaks_beyond_the_range_of_a_type_and_at_minus_zero(cuda, dtype):
    breaks = np.array([-3.4e38, -1e5, -65504.0, -1.0, 65504.0, 65519.0, 1e5, 3.39e38])
    codes = np.arange(9) % 8
    for side in ("left", "right"):
        encoding = Encoding(3, np.arange(8.0), breaks, codes, (side,) * 8)
        compare_encode(cuda, inputs(1500, dtype, encoding), encoding)
    encoding = Encoding(1, np.arange(2.0), np.array([-0.0]), np.array([0, 1]), ("right",))
    x = torch.tensor([-1.0, -0.0, 0.0, 1.0], dtype=dtype)
    assert compare_encode(cuda, x, encoding).tolist() == [0b1000]


@dtypes
@pytest.mark.parametrize("knots", [2, 5, 255, 256, 1800])
def test_draws(cuda, knots, dtype):
    encoding = unbiased_encoding(8 if knots == 5 else 3, knots, seed=knots)
    for n, seed in ((1, 0), (33, -1), (2600, 1234567890123)):
        x = inputs(n, dtype, encoding, seed=n, offset=n % 2)
        compare_encode(cuda, x, encoding, torch.tensor([seed]))


def test_draws_from_a_stand_in_that_overflows(cuda):
    """The difference of two x is infinite, and infinity times a slope of 0 is NaN, for which the last level but one is drawn."""
    stand_in = Knots(np.array([-3e38, 3e38]), np.array([0.3, 0.3]), ("right", "right"))
    encoding = Encoding(3, np.linspace(0, 1, 8), np.array([]), np.array([0]), (), stand_in)
    x = torch.tensor([-3.4e38, -3e38, -1.0, 0.0, 1e38, 2.9e38, 3e38, 3.4e38, torch.inf, torch.nan])
    for seed in map(torch.tensor, range(20)):
        packed = compare_encode(cuda, x, encoding, seed.view(1))
    assert cuda.kernels.unpack(packed, 3, len(x))[5] == 6 ^ 6 >> 1


EXACT = {  # functions that are exact in any arithmetic
    "relu": ((), torch.relu),
    "threshold": ((0.5, -2.0), lambda x: torch.nn.functional.threshold(x, 0.5, -2.0)),
    "hardtanh": ((-1.0, 2.0), lambda x: torch.nn.functional.hardtanh(x, -1.0, 2.0)),
}
ENCODINGS = {
    "few": lambda: random_encoding(3, 10, seed=1),
    "many": lambda: random_encoding(6, 150, seed=2),
    "unbiased": lambda: unbiased_encoding(2, 9),
}


@quantized_dtypes
@pytest.mark.parametrize("breaks", ENCODINGS)
@pytest.mark.parametrize("in_place", [False, True])
def test_forward(cuda, breaks, in_place, dtype):
    encoding = ENCODINGS[breaks]()
    seed = torch.tensor([77]) if encoding.unbiased else None
    for n in (0, 1, 33, 255, 1024, 1500, 4097):
        for name, (parameters, function) in EXACT.items():
            x = inputs(n, dtype, encoding, seed=n, offset=n % 2)
            y = cuda.empty(n, dtype=dtype, offset=n % 3)
            given = y.copy_(x) if in_place else x
            packed = cuda.kernels.forward(given, name, parameters, encoding, seed, y)
            same(y, function(x))
            assert torch.equal(packed, reference.encode(x, encoding, seed))


def test_forward_of_every_function(cuda):
    """Every function runs, and is right to float32 rounding (how well is tested on the CPU's kernels)."""
    encoding = random_encoding(3, 10, seed=1)
    x = torch.linspace(-6, 6, 999)
    for name in cuda.native._kernels.FUNCTIONS:
        function, y = functions.get(name), cuda.empty(999, dtype=x.dtype)
        parameters = tuple(function.parameters.values())
        packed = cuda.kernels.forward(x, name, parameters, encoding, None, y)
        np.testing.assert_allclose(y, function.value(x.numpy()), rtol=1e-5, atol=1e-6)
        assert torch.equal(packed, reference.encode(x, encoding, None))


# -- the group quantizer ---------------------------------------------------------------------------------


def quantized(kind):
    """Return pairs of a shape and a group size."""
    shapes = (3, 70), (2, 300), (1, 513), (5, 64), (9, 31), (40, 7), (0, 5), (4, 0), (2, 641)
    return [(shape, size) for size in possible_sizes(kind, 32, 64, 256, 320) for shape in shapes]


def check_copy(found, expected, *what):
    """Check that two copies have the same codes and ranges, bit for bit. `what` is shown if they differ."""
    assert torch.equal(found[0], expected[0]), what
    assert torch.equal(found[1].view(torch.int16), expected[1].view(torch.int16)), what


def compare_quantizer(cuda, x, bits, group_size, widths=None, words=None, offset=0, kind=UNIFORM):  # fmt: skip
    if kind == MASKED:  # about half of the elements are 0
        x = off_alignment(x.clamp(min=0), offset)
    if widths is not None and words is None:
        words = groups.mixed_words(widths.tolist(), x.shape[1])
    seed = -(2**62) + bits
    given = seed if offset else torch.tensor([seed])  # in device memory, or a number
    settings = bits, group_size, widths, words, None, kind
    packed, ranges = cuda.kernels.quantize(x, given, *settings)
    check_copy(
        (packed, ranges), reference.quantize(x, seed, *settings), tuple(x.shape), bits, group_size
    )
    for mask in (None,) if kind == UNIFORM else (None, random_mask(x.numel())):
        restored, out = torch.empty_like(x), cuda.empty(*x.shape, dtype=x.dtype, offset=offset)
        for kernels, to in ((reference, restored), (cuda.kernels, out)):
            kernels.dequantize(packed, ranges, bits, group_size, to, widths, None, kind, mask)
        same(out, restored)


@kinds
@quantized_dtypes
@without_pairs
def test_quantizer(cuda, dtype, kind):
    for i, (shape, group_size) in enumerate(quantized(kind)):
        x = inputs(shape[0] * shape[1], dtype, random_encoding(2, 3), seed=i, offset=i % 3)
        x = off_alignment(mostly_finite(x, 90 - i).view(shape), i % 3)
        if (i + DTYPES.index(dtype)) % 2:
            compare_quantizer(cuda, x, 1 + i % 8, group_size, offset=i % 3, kind=kind)
            continue
        words = groups.mixed_words(mixed(shape[0]).tolist(), shape[1]) + i % 4
        arguments = 1, group_size, mixed(shape[0]), words, i % 3
        compare_quantizer(cuda, x, *arguments, kind=kind)


@kinds
@quantized_dtypes
@without_pairs
def test_full_groups(cuda, dtype, kind):
    """Two groups of 256 elements that share a warp: of one tensor, of samples of several widths, and across samples."""
    shapes = (0, 3, 512), (1, 5, 256), (0, 80, 32), (0, 3, 776)
    for bits in range(1, 9):
        for offset, samples, features in shapes if bits == 2 else shapes[bits % 4 :][:1]:
            x = inputs(samples * features, dtype, random_encoding(2, 3), seed=bits, offset=offset)
            # Every third group has numbers that are not finite.
            plain = x.nan_to_num(0, 9, -9).clamp(-9, 9)
            x = torch.where(torch.arange(len(x)) // 256 % 3 > 0, plain, x).view(samples, features)
            x = off_alignment(x, offset)
            compare_quantizer(cuda, x, bits, 256, offset=offset, kind=kind)
            compare_quantizer(cuda, x, 1, 256, mixed(samples, bits), kind=kind)


@rotated_kinds
@pytest.mark.parametrize("group_size", (32, 96, 224, 256))
def test_rotated_groups_of_every_length(cuda, group_size, kind):
    """Groups of 1 to 256 elements, with all dtypes and bits in turn."""
    rng = np.random.default_rng(group_size)
    for features in range(257, 513, 1 if (group_size, kind) == (256, ROTATED) else 11):
        dtype, bits = QUANTIZED[features % 3], 1 + features // 4 % 8
        x = normal(rng, (1 + features % 2, features), dtype, mean=1, std=2)
        compare_quantizer(cuda, x, bits, group_size, kind=kind)
    for n in range(1, 64, 3):
        x = torch.from_numpy(rng.standard_cauchy((n % 9, n))).float()
        compare_quantizer(cuda, x, 1 + n % 8, group_size, kind=kind)


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
@quantized_dtypes
def test_unusual_rotated_groups(cuda, dtype, kind):
    """Groups that are rare, and groups with spikes, which are rotated twice: in one of a warp's two groups, and in both."""
    rng = np.random.default_rng(DTYPES.index(dtype))
    for bits, length in zip((*range(1, 9), 2, 3), 2 * (64, 100, 256, 300, 512), strict=True):
        # An odd and an even number of normal groups before: the two groups of a warp differ.
        before = torch.ones(bits % 3, length).cumsum(1).sin()
        x = torch.cat([before, unusual_groups(length)]).to(dtype)
        compare_quantizer(cuda, x, bits, 256, kind=kind)
    for bits in range(1, 6):
        x = normal(rng, (40 + bits, 256), dtype)
        spikes = torch.from_numpy(rng.random(len(x)) < 0.2 * bits)
        x[spikes, torch.from_numpy(rng.integers(0, 256, len(x)))[spikes]] = 20.0
        compare_quantizer(cuda, x, bits, 256, kind=kind)


STEP = Encoding(1, np.arange(2.0), np.zeros(1), np.array([0, 1]), ("right",))


@quantized_dtypes
@pytest.mark.parametrize("bits", (1, 2, 3, 4, 5))
@without_pairs
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
        (40, 256),
        (2, 300),
        (0, 256),
    )
    for number, (samples, features) in enumerate(shapes):
        x = normal(rng, (samples, features), torch.float64)
        x.view(-1)[::301] = 30.0
        if number % 3 == 0:
            x[samples // 2, :5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e-30, -0.0])
            x[-1] *= 1e-25
        x, settings, seed = x.to(dtype), (bits, 256), number - 4
        for way in ("new", "in place", "off alignment"):
            y = cuda.empty(*x.shape, dtype=dtype, offset=int(way == "off alignment"))
            given = y.copy_(x) if way == "in place" else x
            found = cuda.kernels.forward_quantized(
                given, "relu", (), STEP, None, y, seed, *settings, MASKED
            )
            fits = bits <= 4 and (features % 256 == 0 or features < 64)
            assert (found is not None) == (fits and (way != "off alignment" or not x.numel()))
            if found is None:
                continue
            same(y, x.relu())
            assert torch.equal(found.codes, reference.encode(x, STEP, None))
            expected = reference.quantize(x.relu(), seed, *settings, kind=MASKED)
            check_copy((found.packed, found.ranges), expected)


def test_fused_kernels_refuse_other_kinds(cuda):
    """A kernel that makes or reads one kind of copies refuses the others, whose memory has another size."""
    kernels, x = cuda.native._kernels, torch.zeros(4, 512)
    mask, packed = (torch.zeros(words, dtype=torch.int32) for words in (64, 128))
    ranges, rows = torch.zeros(10, 2).bfloat16(), torch.ones(4)
    for number, kind in enumerate(("uniform", "rotated", "masked")):
        copy = kernels.CopyShape(4, 512, 256, 2, number)
        if kind != MASKED:
            with pytest.raises(ValueError, match="^relu_quantized: kind: expected 2"):
                kernels.cuda.relu_quantized(x, copy, x, mask, 7, packed, ranges)
        if kind != ROTATED:
            grads = x, rows, None, rows, x, rows, rows
            with pytest.raises(ValueError, match="^batch_norm_backward: kind: expected 1"):
                kernels.cuda.batch_norm_backward(packed, ranges, copy, *grads)


def compare_with_vectors(cuda, x, group_size, inner, entries, rng, kind, widths=None):
    """Compare normalized quantizing, and affine maps, with the reference backend."""
    a, b = random_vectors(rng, entries)
    seed = torch.tensor([x.numel()])
    words = None if widths is None else groups.mixed_words(widths.tolist(), x.shape[1])
    for mean in (None, a):
        arguments = seed, 3, group_size, widths, words, (mean, b, inner), kind
        made, expected = (kernels.quantize(x, *arguments) for kernels in (cuda.kernels, reference))
        check_copy(made, expected, tuple(x.shape), inner, entries)
    packed, ranges = reference.quantize(x, seed, 3, group_size, kind=kind)
    for vectors in ((a, b), (None, b), (a, None)):
        out, expected = cuda.empty(*x.shape, dtype=x.dtype), torch.empty_like(x)
        for kernels, to in ((cuda.kernels, out), (reference, expected)):
            kernels.dequantize(packed, ranges, 3, group_size, to, None, (*vectors, inner), kind)
        same(out, expected)


def indices(n):
    """Some (inner, entries) whose product divides n."""
    divisors = [number for number in range(1, n + 1) if n % number == 0]
    pairs = [
        (inner, divisor) for inner in divisors for divisor in divisors if n // inner % divisor == 0
    ]
    return pairs[:: max(1, len(pairs) // 7)]


@kinds
@quantized_dtypes
def test_normalized_and_mapped(cuda, dtype, kind):
    """In full groups, the kernels find entries without divisions if neighbors have one entry, or neighboring ones."""
    rng, number = np.random.default_rng(0), DTYPES.index(dtype)
    for i, (shape, group_size) in enumerate(quantized(kind)):
        x = normal(rng, shape, dtype, mean=3, std=2)
        # Each for one or two of the dtypes.
        for inner, entries in list(indices(x.numel()))[(number + i) % 3 :: 3]:
            widths = mixed(shape[0]) if entries % 2 else None
            compare_with_vectors(cuda, x, group_size, inner, entries, rng, kind, widths)
    x = normal(rng, (6, 512), dtype, mean=3, std=2)
    for inner, entries in (
        *((1, entries) for entries in (1, 2, 12, 16, 24, 48, 512, 3072)),
        *((2, 12), (2, 256), (64, 3), (256, 2), (512, 6), (3072, 1)),
    ):
        compare_with_vectors(cuda, x, 256, inner, entries, rng, kind)


# -- channels --------------------------------------------------------------------------------------------


CHANNELS = [  # shape, channels, whether samples may have widths of their own
    ((6, 512), 512, True),
    ((6, 512), 48, True),
    ((8, 256), 256, True),
    ((7, 768), 16, True),
    ((6, 500), 500, True),
    ((5, 320), 40, True),
    ((6, 512), 8, True),
    ((6, 510), 3, True),
    ((9, 70), 70, True),
    ((300, 8), 8, False),
    ((40, 7), 7, False),
    ((1, 4096), 1024, True),
]


def skewed(rng, shape, dtype, count):
    """Return numbers whose channels have very different means and deviations."""
    x = rng.normal(0, 1, (int(np.prod(shape)) // count, count))
    x = x * np.exp(rng.normal(0, 2, count)) + rng.normal(0, 3, count)
    return torch.from_numpy(x.reshape(shape)).to(dtype)


def off_word(numbers):
    """Return a copy that begins in the middle of a word."""
    flat = torch.empty(numbers.numel() + 1, dtype=numbers.dtype)[1:]
    return flat.copy_(numbers.flatten()).view(numbers.shape)


@quantized_dtypes
@pytest.mark.parametrize("shape, count, has_widths", CHANNELS, ids=str)
@without_pairs
def test_channels(cuda, shape, count, has_widths, dtype):
    """Statistics, codes, squares and values, alone and together with a normalization or an affine map."""
    rng = np.random.default_rng([count, *shape])
    x = skewed(rng, shape, dtype, count)
    n, seed = x.numel(), torch.tensor([5])
    by_rows, by_features = (random_vectors(rng, entries) for entries in (n // count, count))
    ways = [(None, None, 1), (*by_rows, count), (*by_features, 1), (None, by_features[1], 1)]
    for number, way in enumerate(ways):
        before = None if number == 0 else way
        numbers = reference.channel_statistics(x, count, before)
        found = cuda.kernels.channel_statistics(x, count, before)
        assert torch.equal(found.view(torch.int16), numbers.view(torch.int16))
        if number == 2:
            numbers = off_word(numbers)
        normalize = Normalization(*way, numbers)
        widths = mixed(shape[0]) if number == 1 and has_widths else None
        words = None if widths is None else groups.mixed_words(widths.tolist(), shape[1])
        for bits, group_size in ((2, 256), (4, 256), (7, 256), (3, 64)):
            settings = bits, group_size, widths, words, normalize, ROTATED
            made, expected = (by.quantize(x, seed, *settings) for by in (cuda.kernels, reference))
            check_copy(made, expected, way, bits, group_size)
            for affine in (None, (*by_features, 1), (*by_rows, count)):
                out, values = cuda.empty(*shape, dtype=dtype), torch.empty_like(x)
                for kernels, to in ((cuda.kernels, out), (reference, values)):
                    copy = *expected, bits, group_size, to, widths, affine
                    kernels.dequantize(*copy, ROTATED, None, numbers)
                same(out, values)
        if shape[1] >= groups.LEAST_FEATURES:
            arguments = x, 256, normalize, ROTATED
            same(cuda.kernels.squares(*arguments), reference.squares(*arguments))


def test_channels_of_many_rows(cuda):
    """A row is chosen without divisions, also if there are very many, and if rows have no common divisor with the chosen ones."""
    rng = np.random.default_rng(3)
    for rows, count in ((5, 300), (33, 12), (257, 12), (2049, 5), (4999, 3), (70001, 2)):
        x = skewed(rng, (rows, count), torch.float32, count)
        found = cuda.kernels.channel_statistics(x, count)
        assert torch.equal(found, reference.channel_statistics(x, count)), rows


@kinds
def test_warps_take_several_groups(cuda, kind):
    """More groups, and pairs of full groups, than warps, some of which have a spike, or numbers that are not finite."""
    rng = np.random.default_rng(1)
    x = normal(rng, (601, 256), torch.bfloat16)
    x[300::40, 7] = 100.0
    x[401::60, 3] = torch.inf
    short = normal(rng, (300, 65), torch.bfloat16)
    for bits in (1, 2, 3, 4, 5):
        with cuda.device_of(1, is_reversed=bits % 2 == 0):
            compare_quantizer(cuda, x.float() if bits == 5 else x, bits, 256, kind=kind)
            compare_quantizer(cuda, short, bits, 64, kind=kind)
    x = normal(rng, (600, 256), torch.bfloat16, mean=3, std=2)
    for inner, entries in ((256, 600), (256, 5), (512, 3), (1, 256), (1, 24), (1, 4800)):
        with cuda.device_of(1, is_reversed=entries % 5 > 0):
            compare_with_vectors(cuda, x, 256, inner, entries, rng, kind)


def test_warps_take_several_tiles(cuda):
    encoding = random_encoding(2, 4, seed=3)
    with cuda.device_of(1):
        compare_encode(cuda, inputs(67 * 8 * 512 + 77, torch.float32, encoding), encoding)


@kinds
def test_several_widths_without_room_stop_the_kernel(cuda, kind):
    """Only the device knows how many words mixed widths take, so the kernel itself has to check the room."""
    x, widths = torch.linspace(-1, 1, 300).view(3, 100), torch.tensor([2, 8, 5], dtype=torch.uint8)
    words, out = groups.mixed_words(widths.tolist(), 100), torch.empty(3, 100)
    settings = torch.tensor([5]), 1, 256, widths
    packed, ranges = cuda.kernels.quantize(x, *settings, words, None, kind)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        cuda.kernels.quantize(x, *settings, words - 1, None, kind)
    for copy in ((packed[:-1], ranges, widths), (packed, ranges[:-1], widths), (packed, ranges, widths.clamp(5))):  # fmt: skip
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            cuda.kernels.dequantize(*copy[:2], 1, 256, out, copy[2], None, kind)


# -- numbers by which bits are shared --------------------------------------------------------------------


def down(x):
    """Return the largest number of bfloat16 that is not above x."""
    bits = x.view(torch.int32)
    cut = bits & ~0xFFFF
    return torch.where((bits < 0) & (cut != bits), cut + 0x10000, cut).view(torch.float32)


def naive_squares(x, group_size, normalize=None):
    """length * range^2 of each group, with ranges as they are stored; NaN where an element or the range is not finite."""
    rows = x.float()
    if normalize is not None:
        mean, rstd, inner = normalize
        index = torch.arange(x.numel()) // inner % len(rstd)
        centered = rows.flatten() - (0.0 if mean is None else mean[index])
        rows = (centered * rstd[index]).view(x.shape)
    terms = [torch.empty(0)]
    for group in (part for row in rows for part in row.split(group_size)):
        extent = -down(down(group.min()) - group.max())
        square = len(group) * (extent * extent)
        is_finite = group.isfinite().all() and extent.isfinite()
        terms.append(square.view(1) if is_finite else torch.tensor([torch.nan]))
    return torch.cat(terms)


def compare_squares(cuda, x, group_size, normalize=None):
    found = cuda.squares_of_groups(x, group_size, normalize)
    same(found, naive_squares(x, group_size, normalize))
    return found


def squared(kind):
    """Return the pairs of `quantized` whose samples are cut into groups one by one."""
    return [case for case in quantized(kind) if case[0][1] >= groups.LEAST_FEATURES]


@rotated_kinds
@quantized_dtypes
def test_squares_of_rotated_groups(cuda, dtype, kind):
    rng = np.random.default_rng(DTYPES.index(dtype))
    rows = [(unusual_groups(length).to(dtype), 256) for length in (64, 256, 600)]
    for shape, group_size in squared(kind):
        x = normal(rng, shape, dtype, mean=3, std=2)
        x[rng.random(shape) < 0.3] = 0
        rows.append((x, group_size))
    for x, group_size in rows:
        for normalize in (None, (*random_vectors(rng, x.shape[1]), 1)):
            arguments = x, group_size, normalize, kind
            same(cuda.kernels.squares(*arguments), reference.squares(*arguments))


@quantized_dtypes
def test_squares(cuda, dtype):
    rng = np.random.default_rng(DTYPES.index(dtype))
    for i, (shape, group_size) in enumerate(squared(UNIFORM)):
        x = inputs(shape[0] * shape[1], dtype, random_encoding(2, 3), seed=i, offset=i % 3)
        # In most groups all elements are finite.
        x = off_alignment(mostly_finite(x, 97 - 9 * (i % 2)).view(shape), i % 3)
        found = compare_squares(cuda, x, group_size)
        assert i % 2 or found.isfinite().all()
        x = normal(rng, shape, dtype, mean=3, std=2)
        for inner, entries in list(indices(x.numel()))[(DTYPES.index(dtype) + i) % 2 :: 2]:
            mean, rstd = random_vectors(rng, entries)
            compare_squares(cuda, x, group_size, (mean if i % 3 else None, rstd, inner))


def test_squares_of_what_is_beyond_float32(cuda):
    """A group has no square if its range overflows, or if an element is not finite."""
    x = torch.zeros(6, 70)
    x[0, :2] = torch.tensor([3e38, -3e38])
    x[1, 69], x[2, 64], x[3, 7], x[4] = torch.inf, -torch.inf, torch.nan, -torch.inf
    found = compare_squares(cuda, x, 64)
    nan = torch.nan
    same(found, torch.tensor([nan, 0, 0, nan, 0, nan, nan, 0, nan, nan, 0, 0]))


@pytest.mark.parametrize("kind", ["uniform", "rotated"])
@pytest.mark.parametrize("samples", [1, 3, 31, 255, 256, 700])
def test_bits_of_samples(cuda, samples, kind):
    check_bits_of_samples(cuda.kernels, samples, kind)


@pytest.mark.parametrize("samples", [0, 1, 31, 256, 257, 1000])
def test_order_of_samples(cuda, samples):
    rng = np.random.default_rng(samples)
    for least, most in ((0, 9), (1, 9), (2, 3)):
        widths = torch.from_numpy(rng.integers(least, most, samples, np.uint8))
        order, counts = cuda.native._order(widths)
        assert order.tolist() == sorted(range(samples), key=lambda i: widths[i])  # stable
        assert counts.tolist() == [int((widths == bits).sum()) for bits in range(9)]


# -- more elements than an int counts, in memory that exists only where it is touched ----------------------


def test_squares_of_more_elements_than_an_int_counts(cuda):
    """The last block of a grid over two samples of 2**31 + 1000 elements."""
    features = (1 << 31) + 1000
    count = groups.group_count(2, features, 256)
    first = (-(-count // 8) - 1) * 8
    (x,) = sparse((2 * features, torch.bfloat16))
    # The last group of a sample has 232 elements.
    tail = normal(np.random.default_rng(0), 232 + 9 * 256)
    x[-len(tail) :] = tail
    with cuda.device_of(1 << 20, first // 8):
        out = cuda.squares_of_groups(x.view(2, features), 256)
    expected = naive_squares(x[None, -len(tail) :].clone(), 256)
    same(out[first:], expected[first - count :])
    assert (out[first:] > 0).all() and not out[first - 1000 : first].any()


@kinds
def test_groups_of_more_elements_than_an_int_counts(cuda, kind):
    """The last block of a grid over 2**31 + 777 elements."""
    n, bits, seed = (1 << 31) + 777, 2, torch.tensor([-5])
    count = groups.group_count(1, n, 256)
    first = count // 2 // 8 * 16  # the first group of the last block
    x, out = sparse((n, torch.bfloat16), (n, torch.bfloat16))
    begin, word = first * 256, first * 8 * bits
    tail = normal(np.random.default_rng(0), n - begin, x.dtype)
    x[begin:] = tail.clamp(min=0) if kind == MASKED else tail
    with cuda.device_of(1 << 20, first // 16):
        packed, ranges = cuda.kernels.quantize(x[None], seed, bits, 256, kind=kind)
        if kind != UNIFORM:  # the first block writes them
            ranges[count:].view(torch.int16).view(-1)[:4] = seed.view(torch.int16)
        cuda.kernels.dequantize(packed, ranges, bits, 256, out[None], kind=kind)
    given = seed, bits, 256, kind, first
    expected = reference_quantizer._stream(x[begin:][None].float(), *given)
    assert torch.equal(packed[word:], expected[0])
    assert torch.equal(ranges[first:count].view(torch.int16), expected[1].view(torch.int16))
    restored = reference_quantizer._restored(
        *expected, bits, 256, 1, n - begin, kind, None if kind == UNIFORM else seed, first
    )
    same(out[begin:], restored[0].to(out.dtype))
    assert not packed[word - 1000 : word].any() and not out[begin - 1000 : begin].any()


def test_activations_of_more_elements_than_an_int_counts(cuda, monkeypatch):
    """The last block of a grid over 2**32 elements."""
    encoding = random_encoding(3, 9, seed=4)
    n = (1 << 32) + 2000
    tail = 8 * 1024 + (n % (8 * 1024))  # at least what the last block holds
    x, out = sparse((n, torch.bfloat16), (n, torch.bfloat16))
    blocks = -(-n // (8 * 1024))
    first = (blocks - 1) * 8 * 1024
    x[first - tail :] = inputs(n - first + tail, torch.bfloat16, encoding)
    end, expected = x[first:].clone(), torch.empty(n - first, dtype=torch.bfloat16)
    channels, seed = torch.linspace(-2, 2, 8), torch.tensor([-5])
    grid, drawn = reference.grid_fixed(channels.cos(), channels, 3), unbiased_encoding(3, 9)
    with cuda.device_of(1 << 20, blocks - 1):
        packed = cuda.kernels.encode(x, encoding, None)
        words = packed[first // 32 * 3 :]
        assert torch.equal(words, reference.encode(end, encoding, None))
        cuda.kernels.decode_mul(x, packed, encoding, out)
        reference.decode_mul(end, words, encoding, expected)
        same(out[first:], expected)
        cuda.kernels.mask_fixed(x, packed, grid, 3, 2, 0.5, out)
        reference.mask_fixed(end, words, grid, 3, 2, 0.5, expected)
        same(out[first:], expected)
        assert not packed[first // 32 * 3 - 1000 : first // 32 * 3].any()
        assert not out[first - tail : first].any()
        packed = cuda.kernels.encode(x, drawn, seed)
    numbers = philox_words(seed, torch.arange(first, n))[0]
    monkeypatch.setattr(reference, "uniform", lambda seed, n: (numbers >> 8).float() * 2.0**-24)
    assert torch.equal(packed[first // 32 * 3 :], reference.encode(end, drawn, seed))


# -- refusals and devices --------------------------------------------------------------------------------


def test_errors_are_one_clear_line(cuda, monkeypatch):
    x = torch.zeros(4)
    monkeypatch.setattr(cuda.native, "_MOST_BREAKS", 1 << 20)
    monkeypatch.setattr(cuda.native, "_MOST_POINTS", 1 << 20)
    with pytest.raises(RuntimeError, match="at most 3600 breaks .* got 4000"):
        cuda.kernels.encode(x, random_encoding(8, 4001), None)
    compare_encode(cuda, x, random_encoding(8, 3601))
    with pytest.raises(RuntimeError, match="at most 1800 knots .* got 1900"):
        cuda.kernels.encode(x, unbiased_encoding(3, 1900), torch.tensor([1]))
    n = 1 << 30
    grid, x, packed = sparse((7 * n, torch.float32), (n, torch.float32), (3 * n // 32, torch.int32))
    with pytest.raises(RuntimeError, match="fewer than 1073741824 entries, got 1073741824"):
        cuda.kernels.mask_fixed(x, packed, grid.view(7, n), 3, 1, 0.5, x)


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
    cuda.library.emulated_driver(driver, capability)
    assert cuda.native.cuda_unusable(torch.device("cuda", 0)) == (reason or "")


# -- the fixed-point code of pre-activations ---------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("bits", (1, 4, 8))
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
    rng = np.random.default_rng(n + bits)
    channels, inner = of_channels
    offset = bits % 2

    def made(size, dtype=torch.float32):
        return off_alignment(normal(rng, size, dtype, std=2), offset)

    gamma, beta = made(channels), made(channels)
    gamma[0], beta[1::7], gamma[2::7], beta[2::7] = 0.0, 20.0, 0.0, -0.0
    gamma[3::7], gamma[4::9] = -0.1, torch.nan
    x, y = made(n, dtype), made(n, dtype)
    y[::9], y[1::9] = 0.0, torch.nan
    x[::11], x[1::13], x[2::13], x[3::17] = torch.nan, torch.inf, -torch.inf, 1e4
    mean, rstd, scale = (made(of_statistics[0]) for _ in range(3))
    grid = reference.grid_fixed(gamma, beta, bits)
    same(cuda.kernels.grid_fixed(gamma, beta, bits), grid)
    of = grid, bits, inner
    statistics = rstd, of_statistics[1]
    for given, equal in (
        (None, None),
        ((None, *statistics), (torch.zeros_like(rstd), *statistics)),
        ((mean, *statistics), (mean, *statistics)),
    ):
        packed = cuda.kernels.encode_fixed(x, y, *of, given)
        assert torch.equal(packed, reference.encode_fixed(x, y, *of, equal))

    def compare(call):
        out, expected = cuda.empty(n, dtype=dtype, offset=offset), torch.empty(n, dtype=dtype)
        call(cuda.kernels, out)
        call(reference, expected)
        same(out, expected)

    for options in ((), (None, (scale, of_statistics[1])), (1.0,), (0.0,), (0.1,)):
        compare(
            lambda kernels, out, options=options: kernels.decode_fixed(packed, *of, out, *options)
        )
    grad = made(n, dtype)
    grad[::5] = torch.inf
    for slope in (0.0, 0.1):
        compare(lambda kernels, out, slope=slope: kernels.mask_fixed(grad, packed, *of, slope, out))
