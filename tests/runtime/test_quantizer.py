"""The group quantizer of every backend, bit for bit against the reference backend, for each kind of copies."""

import functools
import math
import mmap

import numpy as np
import pytest
import torch
from quantized import (
    DATA,
    DTYPES,
    ISAS,
    SEED,
    check,
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
)

from fewbit.runtime.backends import reference, reference_quantizer
from fewbit.runtime.ops import quantizer_ops

if ISAS:
    from fewbit.runtime.backends import native


@pytest.mark.fast(8)
@kinds
@pytest.mark.parametrize("first", range(0, 71, 3))
def test_every_small_size(backends, first, kind):
    for features in range(first, min(first + 3, 71)):
        bits, group_size = 1 + features % 8, (32, 64, 256)[features % 3]
        for samples in (1, 3):
            x = inputs((samples, features), DTYPES[features % 3], DATA[features % 8])
            check(backends, x, bits, group_size, kind=kind)
            if samples > 1:
                check(backends, x, 0, group_size, mixed(samples), kind=kind)


@kinds
@dtypes
@pytest.mark.parametrize("data", DATA)
def test_every_width(backends, dtype, data, kind):
    for bits in range(1, 9):
        x = inputs((2, 321), dtype, data, seed=bits)
        check(backends, x, bits, 256, kind=kind)


SIZES = [
    (kind, size)
    for kind in ("uniform", "rotated", "masked")
    for size in possible_sizes(kind, 32, 64, 96, 224, 256, 288, 1024)
]


@pytest.mark.fast(12)
@pytest.mark.parametrize(
    "shape", [(2, 1321), (1, 2048), (40, 31), (0, 70), (5, 0), (3, 257)], ids=str
)
@pytest.mark.parametrize("kind, group_size", SIZES)
def test_group_sizes(backends, group_size, kind, shape):
    dtype = DTYPES[(group_size // 32 + shape[0]) % 3]
    x = inputs(shape, dtype, seed=group_size)
    check(backends, x, 3, group_size, kind=kind)
    check(backends, x, 0, group_size, mixed(shape[0]), kind=kind)


@kinds
@dtypes
@pytest.mark.parametrize(
    "features, data", [(31, "normal"), (32, "offset"), (63, "relu"), (7, "sparse")]
)
def test_groups_that_run_across_samples(backends, features, data, dtype, kind):
    """Samples of several widths have less than 64 features each, and each width has several full groups."""
    x = inputs((4500 // features, features), dtype, data)
    check(backends, x, 0, 256, mixed(len(x)), kind=kind)


def test_the_largest_group(backends):
    x = inputs((1, 65536 + 100), torch.float32)
    check(backends, x, 2, 65536, kind="uniform")


@kinds
def test_shapes(backend, kind):
    """Samples are along dimension 0. A scalar is one sample of one feature."""
    for shape in ((), (5,), (3, 4, 5), (2, 3, 7, 11), (0, 3), (3, 0, 2)):
        x = inputs((math.prod(shape),), torch.float32).reshape(shape)
        check([backend], x, 2, 256, kind=kind)


@kinds
def test_channels_last(backend, kind):
    """A dense tensor whose samples are outermost is quantized and dequantized in storage order."""
    x = inputs((2, 3, 8, 9), torch.float32).to(memory_format=torch.channels_last)
    flat = x.permute(0, 2, 3, 1).reshape(2, -1)
    kept = check([backend], flat, 2, 64, kind=kind)
    packed, ranges = quantize(backend, x, 2, 64, kind=kind)
    assert np.array_equal(packed, kept[0]) and np.array_equal(ranges, kept[1])
    out = dequantize(backend, packed, ranges, x, 2, 64, kind=kind)
    assert out.stride() == x.stride()
    restored = dequantize(reference, packed, ranges, flat, 2, 64, kind=kind)
    assert torch.equal(out.permute(0, 2, 3, 1).reshape(2, -1), restored)


@functools.cache
def shared_words(shape, dtype, several, kind):
    """Return groups that begin inside a word, enough for several threads, and the reference's result."""
    x, widths = inputs(shape, dtype, "specials"), mixed(shape[0]) if several else None
    kept = quantize(reference, x, 3, 256, widths, kind=kind)
    return x, widths, kept, dequantize(reference, *kept, x, 3, 256, widths, kind=kind)


@kinds
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(1201, 67), (1, 150_001), (2, 65_537), (7001, 11)], ids=str)
def test_threads_that_share_words(isa, shape, threads, kind):
    for several in (False, True):
        x, widths, kept, restored = shared_words(shape, DTYPES[shape[1] % 3], several, kind)
        made = quantize(native.cpu(isa), x, 3, 256, widths, kind=kind)
        check_saved(made, kept)
        out = dequantize(native.cpu(isa), *kept, x, 3, 256, widths, kind=kind)
        assert same(out, restored)


@kinds
def test_room_beyond_the_codes_is_zero(backend, kind):
    x, widths = inputs((6, 70), torch.float32), mixed(6)
    packed, ranges = quantize(reference, x, 0, widths=widths, kind=kind)
    made = quantize(backend, x, 0, widths=widths, kind=kind, room=9)
    check_saved(made, (np.append(packed, np.zeros(9, np.uint32)), ranges))


FEATURES, SAMPLES = 256, (1 << 23) + 5  # more elements than an int counts


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("kind", ["uniform", "rotated"])
def test_more_elements_than_an_int_counts(kind):
    """Nine groups at the end of zeros, in memory that exists only where it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        space = mmap.mmap(-1, 2 * SAMPLES * FEATURES, flags=flags)
    except OSError:
        pytest.skip("no address space for 4 GB")
    x = torch.frombuffer(space, dtype=torch.bfloat16).view(SAMPLES, FEATURES)
    last, seed = inputs((9, FEATURES), x.dtype), torch.tensor([SEED])
    x[-9:] = last
    packed, ranges = native.cpu().quantize(x, seed, 1, FEATURES, kind=kind)
    place = seed, 1, FEATURES, kind, SAMPLES - 9
    expected = reference_quantizer._stream(last.float(), *place)
    rows = ranges[:SAMPLES].view(torch.int16)
    assert torch.equal(packed[-9 * FEATURES // 32 :], expected[0])
    assert torch.equal(rows[-9:], expected[1].view(torch.int16))
    assert not packed[: -9 * FEATURES // 32].any() and not rows[:-9].any()


@kinds
def test_float64_is_quantized_as_float32(kind):
    """The result of rounding to float32 is quantized, and the dequantized values are those in float32."""
    x = inputs((6, 300), torch.float64)
    assert not torch.equal(x, x.float().double())
    settings = 7, 3, 256
    made = quantizer_ops.quantize(x, *settings, kind=kind)
    for ours, expected in zip(
        made, quantizer_ops.quantize(x.float(), *settings, kind=kind), strict=True
    ):
        assert torch.equal(ours, expected)
    place = 3, 256, (6, 300), (300, 1)
    narrow = quantizer_ops.dequantize(*made, *place, torch.float32, kind=kind)
    wide = quantizer_ops.dequantize(*made, *place, torch.float64, kind=kind)
    assert wide.dtype == torch.float64 and torch.equal(wide, narrow.double())
    squares = quantizer_ops.squares(x, 256, kind=kind)
    assert torch.equal(squares, quantizer_ops.squares(x.float(), 256, kind=kind))
