"""The promises of docs/concepts/quantizer.md that hold for rotated copies: their error, its mean, and their randomness."""

import math

import numpy as np
import pytest
import torch
from expectation import pooled_z, z_score
from groups_of_numbers import GROUPS, one_group
from quantized import dequantize, inputs, quantize
from torch._subclasses.fake_tensor import FakeTensorMode

import fewbit
import fewbit.functional as F
from fewbit.catalog.normal_levels import normal_levels, rotated_levels
from fewbit.errors import InputError
from fewbit.runtime.format import groups, layout
from fewbit.runtime.ops import quantizer_ops


def distortion(bits):
    """Return D, the mean squared error of a standard normal number's level times the best factor, in closed form."""
    breaks, levels = np.array(normal_levels(bits)[0]), np.array(rotated_levels(bits))
    ends = np.array([0.0, *breaks, np.inf])
    density = np.exp(-(ends**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([math.erf(end / math.sqrt(2)) for end in ends]) / 2
    mass, first = np.diff(below), -np.diff(density)
    return float(1 - 2 * (levels * first).sum() ** 2 / (levels**2 * mass).sum())


DISTORTION = {bits: distortion(bits) for bits in range(1, 9)}


def copied(backend, x, bits, group_size=256, fp32_min=True, seed=0):
    """Return the values of a rotated copy, float64, and the scales of its groups."""
    packed, ranges, _ = quantize(backend, x, bits, group_size, fp32_min, seed=seed, kind="rotated")
    out = dequantize(backend, packed, ranges, x, bits, group_size, kind="rotated")
    scales = (ranges[:-2, 1].astype(np.uint32) << 16).view(np.float32)
    return out.double(), np.abs(scales).astype(np.float64)


# -- the squared error of normal data ------------------------------------------------------------------------


def distortion_of_directions(n, bits, count):
    """Return E|e|^2 / |v|^2 if a group's n numbers have a random direction, in float64 and without rotations.

    The direction is orthogonal to another random one, as a rotated group is orthogonal to the rotated constant vector.
    """
    rng = np.random.default_rng([n, bits])
    y, constant = rng.normal(size=(2, count, n))
    share = (y * constant).sum(1) / (constant * constant).sum(1)
    y = np.abs(y - constant * share[:, None])
    energy = (y * y).sum(1, keepdims=True)
    breaks, levels = np.array(normal_levels(bits)[0]), np.array(rotated_levels(bits))
    chosen = levels[np.searchsorted(breaks, y / np.sqrt(energy / n))]
    scale = energy / (y * chosen).sum(1, keepdims=True)
    return float(((y - scale * chosen) ** 2).sum() / energy.sum())


def found_distortion(backend, shape, group_size, bits, last):
    """Return the relative squared error of the groups of normal samples, or of their last groups, and their length.

    What the scale's rounding to bfloat16 adds is taken off. It is a sixth of the squared distance of neighbors.
    """
    x = inputs(shape, torch.float32, seed=bits)
    out, scales = copied(backend, x, bits, group_size)
    start = (shape[1] - 1) // group_size * group_size if last else 0
    scales = scales.reshape(shape[0], -1)
    scales = scales[:, -1] if last else scales
    cut = [row.double()[:, start:].split(group_size, 1) for row in (x, out)]
    errors, energy = 0.0, 0.0
    for exact, restored in zip(*cut, strict=True):
        errors += float((restored - exact).square().sum())
        energy += float((exact - exact.mean(1, keepdim=True)).square().sum())
    step = np.exp2(np.floor(np.log2(scales)) - 7)
    rounding = float(((step / scales) ** 2).mean()) / 6 / (1 - DISTORTION[bits])
    return errors / energy - rounding, cut[0][0].shape[1]


SIZES = {
    "256": ((2048, 256), 256, False),
    "64": ((8192, 64), 64, False),
    "128": ((4096, 128), 128, False),
    "100, the last of a sample": ((4096, 356), 256, True),
    "44, the last of a sample": ((4096, 108), 64, True),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_squared_error(usual_backend, size, bits):
    """It is that of the table, D / (1 - D), but for the directions of short groups, which the simulation knows."""
    found, n = found_distortion(usual_backend, *SIZES[size][:2], bits, SIZES[size][2])
    expected = distortion_of_directions(n, bits, 2**20 // n)
    within = (
        0.015 if bits < 5 else 0.03
    )  # with more bits, the error is that of few numbers beyond the levels
    assert abs(found / expected - 1) < within, (found, expected)
    limit = DISTORTION[bits] / (1 - DISTORTION[bits])
    assert 1 - 4.6 / n - within < found / limit < 1 + within, (found, limit)


def test_squared_error_beside_a_uniform_copy(usual_backend):
    x = inputs((256, 256), torch.float32)
    packed, ranges, _ = quantize(usual_backend, x, 2, kind="uniform")
    uniform = dequantize(usual_backend, packed, ranges, x, 2, kind="uniform").double() - x
    rotated = copied(usual_backend, x, 2, fp32_min=False)[0] - x
    assert rotated.square().sum() < uniform.square().sum() / 4


# -- the mean error ------------------------------------------------------------------------------------------


def draws_of(backend, x, bits, fp32_min=True, seeds=8, rows=64, group_size=256):
    """Return independent copies of one sample: of several seeds, and as several samples, (seeds * rows, n)."""
    many = x.expand(rows, -1).contiguous()
    drawn = [
        copied(backend, many, bits, group_size, fp32_min, 1000 * bits + i)[0] for i in range(seeds)
    ]
    return torch.cat(drawn)


@pytest.mark.parametrize("fp32_min", [False, True], ids=["bfloat16", "fp32_min"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("data", GROUPS)
def test_mean_error(usual_backend, data, bits, fp32_min):
    """The mean error is 0 in view of its deviation: along the group, across it, and of the sum of the elements.

    The rounding of the scale changes all elements in the same proportion. So the errors across the group are almost
    independent, but those of the elements are not.
    """
    x = one_group(data).double()
    errors = draws_of(usual_backend, x.float(), bits, fp32_min) - x
    v = x - x.mean()
    gain = errors @ v / (v @ v).clamp(min=1e-12)
    across = errors - gain[:, None] * v
    least = 1e-6 * float(x.abs().max())  # float32's rounding of the values
    scores = z_score(gain), z_score(across.sum(1) / x.norm()), pooled_z(across, 0 * x, least)
    assert max(map(abs, scores)) < 4.5, scores


@pytest.mark.parametrize("bits, gain", [(1, 0.31), (2, 0.117)])
def test_mean_error_of_a_large_element_that_is_rotated_once(usual_backend, bits, gain):
    """An element with the share s < 1/8 of the energy is restored as (1 + gain s) times its value in the mean."""
    x = one_group("normal").double()
    x -= x.mean()
    x[0] = 0
    x[0] = (0.12 / 0.88 * x @ x).sqrt()
    errors = draws_of(usual_backend, x.float(), bits, rows=512) - x
    v = x - x.mean()
    share = float(v[0] ** 2 / (v @ v))
    found = errors[:, 0] / v[0]
    standard_error = float(found.std()) / math.sqrt(len(found))
    assert 0.1 < share < 1 / 8
    assert abs(float(found.mean()) - gain * share) < 4 * standard_error
    assert float(found.mean()) > 4 * standard_error  # it is not 0


LIMITS = {1: (0.6, 0.06), 2: (0.31, 0.03), 4: (0.085, 0.005)}
"""The norm of the mean error over the norm of the group, by bits: in groups of 3 to 8 elements, and in longer ones."""


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 9, 12, 33, 48])
@pytest.mark.parametrize("bits", LIMITS)
def test_mean_error_of_short_groups(usual_backend, n, bits):
    """A group of few elements has few patterns of signs. Its mean error is not 0, but orthogonal to the group."""
    for seed in range(3):
        x = inputs((1, 64 + n), torch.float32, seed=seed)[0]
        errors = (draws_of(usual_backend, x, bits, rows=256, group_size=64) - x)[:, -n:]
        v = x[-n:].double() - x[-n:].double().mean()
        energy = v @ v
        assert abs(z_score(errors @ v / energy)) < 4.5
        sampling = errors.var(0).sum() / len(errors)
        bias = float(((errors.mean(0).square().sum() - sampling) / energy).clamp(min=0).sqrt())
        assert bias < (0.001 if n == 2 else LIMITS[bits][n > 8]), bias


# -- randomness ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_errors_of_equal_tokens_average_out(usual_backend, bits):
    """The error of the weight's gradient falls as 1 / N if N tokens are equal: every group has signs of its own."""
    x = one_group("normal")
    v = (x - x.mean()).double()
    found = {}
    for tokens in (1, 8, 64):
        means = [
            copied(usual_backend, x.expand(tokens, -1).contiguous(), bits, seed=i)[0].mean(0) - x
            for i in range(4096 // tokens // 8)
        ]
        found[tokens] = float(torch.stack(means).square().sum(1).mean() / (v @ v))
    expected = DISTORTION[bits] / (1 - DISTORTION[bits])
    for tokens, error in found.items():
        assert 0.75 < error * tokens / expected < 1.25, (found, expected)


@pytest.mark.parametrize("tokens", [16, 256])
def test_a_weight_gradient_of_equal_tokens(usual_backend, tokens):
    x = one_group("normal").to(usual_backend.device)
    weight = torch.zeros(1, 256, device=usual_backend.device, requires_grad=True)
    many, grad = (
        x.expand(tokens, -1).contiguous(),
        torch.ones(tokens, 1, device=usual_backend.device),
    )
    errors = []
    for i in range(8):
        torch.manual_seed(i)
        y = F.linear(many, weight, bits=2, quantizer="rotated")
        (found,) = torch.autograd.grad(y, weight, grad)
        errors.append((found / tokens - x).double().square().sum() / x.double().square().sum())
    expected = DISTORTION[2] / (1 - DISTORTION[2]) / tokens
    assert 0.7 < float(torch.stack(errors).mean()) / expected < 1.3


def test_copies_of_one_seed_are_equal(backend):
    x = inputs((4, 512), torch.float32)
    first, again = (quantize(backend, x, seed=7, kind="rotated") for _ in range(2))
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1])


@pytest.mark.parametrize("bits", [1, 2, 8])
@pytest.mark.parametrize("seeds", [(7, 8), (7, 7 + 2**32), (7, -7), (0, -(2**63))], ids=str)
def test_copies_of_two_seeds_are_independent(usual_backend, seeds, bits):
    """Errors have no correlation: of elements, which also have signs and levels in common, and of scales."""
    x = inputs((128, 256), torch.float32)
    errors = [copied(usual_backend, x, bits, seed=seed)[0] - x for seed in seeds]
    v = x.double() - x.double().mean(1, keepdim=True)
    gains = [(e * v).sum(1) / (v * v).sum(1) for e in errors]
    across = [e - gain[:, None] * v for e, gain in zip(errors, gains, strict=True)]
    for a, b in (gains, across):
        correlation = float((a * b).sum() / (a.norm() * b.norm()))
        assert abs(correlation) < 4.5 / math.sqrt(a.numel())


def test_neighboring_groups_have_signs_of_their_own(usual_backend):
    """One element is restored as levels with the signs of its group, which differ between groups."""
    x = torch.zeros(64, 512)
    x[:, 0] = x[:, 256] = 1.0
    packed, _, _ = quantize(usual_backend, x, 1, 256, True, kind="rotated")
    codes = np.unpackbits(packed.view(np.uint8), bitorder="little").reshape(128, 256)
    agreement = codes.astype(float) @ codes.T + (1.0 - codes) @ (1 - codes.T)
    apart = agreement[~np.eye(128, dtype=bool)] / 256 - 0.5
    assert abs(apart).max() < 6 * 0.5 / math.sqrt(256)


# -- groups that are not finite ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [1, 8])
def test_one_number_that_is_not_finite_among_zeros(backend, value, bits):
    for place in (0, 100, 255):
        for fp32_min in (False, True):
            x = torch.zeros(3, 256)
            x[1, place] = value
            packed, ranges, _ = quantize(backend, x, bits, 256, fp32_min, kind="rotated")
            out = dequantize(backend, packed, ranges, x, bits, kind="rotated")
            assert out[1].isnan().all() and not out[::2].any()


# -- groups that are too large -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rotated", "masked"])
def test_groups_that_are_too_large_are_refused(backend, kind):
    x, seed = inputs((2, 320), torch.float32).to(backend.device), torch.tensor([3])
    seed, widths = seed.to(backend.device), torch.tensor([2, 3], dtype=torch.uint8)
    packed, ranges = quantizer_ops.quantize(x, seed, 2, 256, kind=kind)
    place = x.shape, x.stride(), x.dtype
    message = f"^expected at most 256 for group_size with {kind} copies, got 288$"
    for call in (
        lambda: quantizer_ops.quantize(x, seed, 2, 288, kind=kind),
        lambda: quantizer_ops.quantize_op(x, x.stride(), seed, 2, 288, False, kind),
        lambda: quantizer_ops.squares(x, 288, kind=kind),
        lambda: quantizer_ops.dequantize(packed, ranges, 2, 288, *place, kind=kind),
        lambda: quantizer_ops.dequantize_op(packed, ranges, 2, 288, *place, kind),
        lambda: quantizer_ops.dequantize_samples(
            packed, ranges, widths.to(backend.device), 2, 288, *place, kind=kind
        ),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_layers_refuse_large_rotated_groups():
    message = "expected at most 256 for group_size with rotated copies, got 288$"
    with pytest.raises(InputError, match=f"^{message}"):
        fewbit.nn.Linear(4, 4, group_size=288, quantizer="rotated")
    settings = fewbit.LayerSettings(group_size=288, quantizer="rotated")
    with pytest.raises(InputError, match=f"^layers: {message}"):
        fewbit.compress_(torch.nn.Linear(4, 4), 2, layers=settings, verbose=False)


# -- the torch ops -------------------------------------------------------------------------------------------


def copied_by_ops(x, seed, bits, group_size, fp32_min):
    """Return the saved tensors of a rotated copy and the values that the ops dequantize from it."""
    stride = layout.by_sample_stride(x)
    packed, ranges, _ = quantizer_ops.quantize_op(
        x, stride, seed, bits, group_size, fp32_min, "rotated"
    )
    place = bits, group_size, x.shape, stride, x.dtype, "rotated"
    return packed, ranges, quantizer_ops.dequantize_op(packed, ranges, *place)


@pytest.mark.inductor
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(backend, dynamic):
    torch.compiler.reset()
    run = torch.compile(copied_by_ops, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for shape in ((5, 300), (40, 7)) if dynamic else ((5, 300),):
        for bits, fp32_min in ((2, False), (3, True)):
            x = inputs(shape, torch.float32).to(backend.device)
            seed = torch.tensor([5], device=backend.device)
            packed, ranges = quantizer_ops.quantize(x, seed, bits, 64, fp32_min, kind="rotated")
            made = run(x, seed, bits, 64, fp32_min)
            assert torch.equal(made[0], packed)
            assert torch.equal(made[1].view(torch.int16), ranges.view(torch.int16))
            place = bits, 64, x.shape, x.stride(), x.dtype
            expected = quantizer_ops.dequantize(packed, ranges, *place, kind="rotated")
            assert torch.equal(made[2], expected)


@pytest.mark.parametrize("shape", [(7, 100), (3, 1000), (50, 3), (4, 8, 9), (0, 5), (3, 0), ()])
def test_fake_tensors_have_the_same_sizes(backend, shape):
    x = torch.ones(shape, device=backend.device)
    seed = torch.tensor([3], device=backend.device)
    for bits in (1, 8):
        for group_size, fp32_min in ((64, False), (256, True)):
            settings = bits, group_size, fp32_min
            real = copied_by_ops(x, seed, *settings)
            with FakeTensorMode() as mode:
                fake = copied_by_ops(mode.from_tensor(x), mode.from_tensor(seed), *settings)
            for a, b in zip(real, fake, strict=True):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
            found = sum(tensor.nbytes for tensor in real[:2])
            assert found == groups.quantized_bytes(shape, bits, group_size, fp32_min)


def test_opcheck_of_rotated_copies(backend):
    x, seed = inputs((5, 70), torch.float32).to(backend.device), torch.tensor([3])
    seed, checks = seed.to(backend.device), ("test_schema", "test_faketensor")
    arguments = x, [70, 1], seed, 3, 64, False, "rotated"
    torch.library.opcheck(quantizer_ops.quantize_op, arguments, test_utils=checks)
    packed, ranges, _ = quantizer_ops.quantize_op(*arguments)
    place = packed, ranges, 3, 64, [5, 70], [70, 1], torch.float32, "rotated"
    torch.library.opcheck(quantizer_ops.dequantize_op, place, test_utils=checks)
