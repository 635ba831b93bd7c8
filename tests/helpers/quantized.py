"""Inputs for the group quantizer, calls of its backends, and the comparison with the reference backend."""

import numpy as np
import pytest
import torch

from fewbit.config import GROUP_SIZE, LARGEST_ROTATED_GROUP, ROTATED
from fewbit.runtime.backends import reference
from fewbit.runtime.format import groups
from fewbit.runtime.format.encoding import packed_words

try:
    from fewbit import _kernels
    from fewbit.runtime.backends import native
except ImportError:
    _kernels = None

ISAS = _kernels.cpu_isas() if _kernels else ()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that the kernels have. The ops convert float64."""
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
compiled = pytest.mark.skipif(_kernels is None, reason="fewbit was installed without kernels")
kinds = pytest.mark.parametrize("kind", ["uniform", "rotated", "masked"])
DATA = (
    "normal",
    "offset",
    "scales",
    "specials",
    "zeros",
    "sparse",
    "relu",
    "samples of all scales",
)
SEED = -(2**63) + 12345
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


def cpu_backends():
    """Return the reference backend, and the kernels of every instruction set."""
    return [reference, *(native.cpu(isa) for isa in ISAS)]


def inputs(shape, dtype, data="normal", seed=0):
    """Return numbers of a name in DATA, on the CPU."""
    rng = np.random.default_rng([seed, *shape])
    x = rng.normal(0, 1, shape)
    if data == "offset":
        x = 10 + 1e-3 * x
    elif data == "scales":  # from subnormal ones to those whose range overflows
        x = x * 10.0 ** rng.integers(-45, 39, shape)
    elif data == "specials":
        special = rng.choice([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 65504.0, -0.0], shape)
        x = np.where(rng.random(shape) < 2 / (1 + shape[-1]), special, x)
    elif data == "zeros":
        x = np.where(rng.random(shape) < 0.5, -0.0, 0.0)
    elif data == "sparse":  # rotated copies of such groups are rotated twice
        x = np.where(rng.random(shape) < 3 / (1 + shape[-1]), x, 0.0)
    elif data == "relu":  # the elements that masked copies leave out
        x = np.maximum(x, 0)
    elif data == "samples of all scales":
        x = x * 10.0 ** rng.integers(-45, 39, (shape[0], *[1] * (len(shape) - 1)))
    return torch.from_numpy(x).to(dtype)


def possible_sizes(kind, *sizes):
    """Return the group sizes that copies of a kind can have."""
    return [size for size in sizes if kind == "uniform" or size <= LARGEST_ROTATED_GROUP]


def mixed(samples, seed=0):
    return torch.from_numpy(
        np.random.default_rng([seed, samples]).integers(1, 9, samples, np.uint8)
    )


def quantize(
    backend,
    x,
    bits=2,
    group_size=256,
    widths=None,
    seed=SEED,
    normalize=None,
    kind="uniform",
    room=0,
):
    """Return packed (uint32) and ranges (uint16) of a backend, or of bare kernels of the CPU."""
    words, device = None, getattr(backend, "device", "cpu")
    if widths is not None:
        words = groups.mixed_words(widths.tolist(), groups.samples_of(x.shape)[1]) + room
        widths = widths.to(device)
    seed = torch.tensor([seed], device=device)
    packed, ranges = getattr(backend, "kernels", backend).quantize(
        x.to(device),
        seed,
        bits,
        group_size,
        widths,
        words,
        to_device(normalize, device),
        kind,
    )
    ranges = ranges.cpu().view(torch.int16).numpy().view(np.uint16)
    return packed.cpu().numpy().view(np.uint32), ranges


def dequantize(
    backend,
    packed,
    ranges,
    like,
    bits=2,
    group_size=256,
    widths=None,
    affine=None,
    kind="uniform",
    mask=None,
):
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
        kind,
        None if mask is None else mask.to(device),
    )
    return result.cpu()


def random_mask(n):
    """Return a mask of n random bits, int32, in which bit i % 32 of word i // 32 is bit i."""
    bits = np.random.default_rng(n).integers(0, 2, n).astype(bool)
    packed = np.packbits(np.pad(bits, (0, -n % 32)), bitorder="little").view(np.int32)
    return torch.from_numpy(packed)


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


def check_saved(made, expected, what=""):
    """Compare the codes and ranges of two results of `quantize`."""
    assert np.array_equal(made[0], expected[0]) and np.array_equal(made[1], expected[1]), what


def check(backends, x, bits, group_size, widths=None, *, kind):
    """Compare codes, ranges and dequantized values of backends with the reference backend's, and return the saved tensors."""
    settings = bits, group_size, widths
    packed, ranges = quantize(reference, x, *settings, kind=kind)
    place = packed, ranges, x, bits, group_size, widths, None, kind
    masks = (None,) if kind == "uniform" else (None, random_mask(x.numel()))
    restored = [dequantize(reference, *place, mask) for mask in masks]
    for backend in backends:
        made = quantize(backend, x, *settings, kind=kind)
        what = backend, tuple(x.shape), x.dtype, *settings
        check_saved(made, (packed, ranges), what)
        for mask, values in zip(masks, restored, strict=True):
            assert same(dequantize(backend, *place, mask), values), what
    return packed, ranges


def limits_of(ranges):
    """Return the minimum and the range of each group of a uniform copy, or mean and scale, (groups, 2) float64."""
    return (ranges.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def vectors(n, seed):
    """Return pairs of vectors that n elements can share, and inner: 1, n and numbers between."""
    rng = np.random.default_rng([n, abs(seed)])
    divisors = [number for number in range(1, n + 1) if n % number == 0] or [1]
    pairs = [
        (inner, divisor) for inner in divisors for divisor in divisors if n // inner % divisor == 0
    ]
    for inner, count in (pairs[i] for i in {0, len(pairs) - 1, *rng.integers(0, len(pairs), 5)}):
        yield *(torch.from_numpy(rng.normal(1, 1, count)).float() for _ in range(2)), inner


SPECIAL = torch.tensor([0.0, torch.inf, torch.nan, -0.0, 1.0, 1.0, 1e-42, 3e38])


def check_bits_of_samples(kernels, samples, kind, device="cpu"):
    """Compare how kernels divide bits among samples with the reference, also for ties and for numbers that are not finite."""
    rng = np.random.default_rng(samples)
    spread = torch.from_numpy(np.exp(rng.normal(0, 3, samples)).astype(np.float32))
    ties = torch.from_numpy(rng.integers(0, 3, samples).astype(np.float32))
    special = SPECIAL[torch.from_numpy(rng.integers(0, len(SPECIAL), samples))]
    totals = {samples, samples + 1, 2 * samples, 5 * samples // 2 + 1, 8 * samples - 1, 8 * samples}
    for squares in (spread, ties, torch.zeros(samples), special):
        for total in totals:
            found = kernels.share_bits(squares.to(device), total, kind).cpu()
            assert torch.equal(found, reference.share_bits(squares, total, kind)), total
            assert found.sum() == total


def quantized_bytes(shape, bits, group_size=GROUP_SIZE, kind=ROTATED):
    """Return the bytes of a quantized copy: codes, 4 for each group, and 8 for a seed."""
    samples, features = groups.samples_of(shape)
    count = groups.group_count(samples, features, group_size) + groups.seed_rows(kind)
    return 4 * packed_words(samples * features, bits) + 4 * count
