"""The promises of docs/concepts/quantizer.md for rotated copies: their mean error, and their randomness."""

import math

import numpy as np
import pytest
import torch
from expectation import pooled_z, z_score
from quantized import dequantize, inputs, quantize, quantized_bytes
from torch._subclasses.fake_tensor import FakeTensorMode

import fewbit
from fewbit.errors import InputError
from fewbit.runtime.format import layout
from fewbit.runtime.format.distortion import distortion
from fewbit.runtime.ops import dense_ops, quantizer_ops, traced_copies


def one_group(data, n=256):
    """Return the n elements of a group, float32."""
    x = np.random.default_rng(n).normal(size=n)
    if data == "relu":
        x = np.maximum(x, 0)
    elif data == "outlier":
        x[5] *= 30
    elif data == "one-hot":
        x = np.eye(n)[3]
    elif data == "two-sparse":
        x = np.eye(n)[3] - np.eye(n)[n - 2]
    elif data == "half of the energy in one":
        x[7] = math.sqrt((x * x).sum() - x[7] ** 2)
    elif data == "constant":
        x = np.full(n, 0.7)
    elif data.startswith("offset"):
        x += float(data.split()[1])
    return torch.from_numpy(x).float()


GROUPS = (
    *("normal", "relu", "outlier", "one-hot", "two-sparse", "half of the energy in one"),
    *("constant", "offset 10", "offset 1000", "offset 1002"),  # 2 from the nearest bfloat16
)


def copied(backend, x, bits, seed=0, group_size=256):
    """Return the values of a rotated copy, float64."""
    packed, ranges = quantize(backend, x, bits, group_size, seed=seed, kind="rotated")
    return dequantize(backend, packed, ranges, x, bits, group_size, kind="rotated").double()


def draws_of(backend, x, bits, seeds=8, rows=64, **settings):
    """Return independent copies of one sample: of several seeds, and as several samples, (seeds * rows, n)."""
    many = x.expand(rows, -1).contiguous()
    return torch.cat(
        [copied(backend, many, bits, 1000 * bits + i, **settings) for i in range(seeds)]
    )


def along_and_across(errors, x):
    """Return the errors' components along the group without its mean, and the rest of the errors."""
    v = x.double() - x.double().mean(-1, keepdim=True)
    gain = (errors * v).sum(-1) / (v * v).sum(-1).clamp(min=1e-12)
    return gain, errors - gain[..., None] * v


def check_mean(errors, x):
    """Check that the mean error is 0 in view of its deviation: along the group, across it, and of the sum of the elements."""
    gain, across = along_and_across(errors, x)
    least = 1e-6 * float(x.abs().max())  # float32's rounding of the values
    scores = z_score(gain), z_score(across.sum(1) / x.norm()), pooled_z(across, 0 * x, least)
    assert max(map(abs, scores)) < 4.5, scores


# -- the mean error ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 8])
@pytest.mark.parametrize("data", GROUPS)
def test_mean_error(usual_backend, data, bits):
    x = one_group(data)
    check_mean(draws_of(usual_backend, x, bits) - x, x)


LIMITS = {1: (0.6, 0.06), 2: (0.31, 0.03), 4: (0.085, 0.005)}
"""The norm of the mean error over the norm of the group, by bits: in groups of 3 to 8 elements, and in longer ones."""
LIMIT_OF_PAIRS = 0.002
"""The same in groups of 2 elements. If their mean was not rounded to bfloat16, they would have no mean error."""


@pytest.mark.parametrize("n", [2, 3, 5, 8, 12, 33])
@pytest.mark.parametrize("bits", LIMITS)
def test_mean_error_of_short_groups(usual_backend, n, bits):
    """A rotated group of few elements has few patterns of signs. Its mean error is not 0, but orthogonal to the group."""
    for seed in range(3):
        x = inputs((1, 64 + n), torch.float32, seed=seed)[0]
        errors = (draws_of(usual_backend, x, bits, rows=256, group_size=64) - x)[:, -n:]
        x = x[-n:]
        assert abs(z_score(along_and_across(errors, x)[0])) < 4.5
        energy = (x.double() - x.double().mean()).square().sum()
        sampling = errors.var(0).sum() / len(errors)
        bias = float(((errors.mean(0).square().sum() - sampling) / energy).clamp(min=0).sqrt())
        assert bias < (LIMIT_OF_PAIRS if n == 2 else LIMITS[bits][n > 8]), bias


# -- randomness ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_errors_of_equal_tokens_average_out(usual_backend, bits):
    """The error of the weight's gradient falls as 1 / N if N tokens are equal: groups have random numbers of their own."""
    x = one_group("normal")
    v = (x - x.mean()).double()
    for tokens in (1, 8, 64):
        many = x.expand(tokens, -1).contiguous()
        means = [
            copied(usual_backend, many, bits, seed=i).mean(0) - x
            for i in range(4096 // tokens // 8)
        ]
        found = float(torch.stack(means).square().sum(1).mean() / (v @ v))
        assert 0.75 < found * tokens / distortion("rotated", bits) < 1.25, tokens


@pytest.mark.parametrize("bits", [1, 2, 8])
@pytest.mark.parametrize("seeds", [(7, 8), (7, 7 + 2**32), (7, -7), (0, -(2**63))], ids=str)
def test_copies_of_two_seeds_are_independent(usual_backend, seeds, bits):
    """Errors have no correlation: of elements, which also have signs and levels in common, and of scales."""
    x = inputs((128, 256), torch.float32)
    errors = [copied(usual_backend, x, bits, seed) - x for seed in seeds]
    for a, b in zip(*(along_and_across(error, x) for error in errors), strict=True):
        assert abs(float((a * b).sum() / (a.norm() * b.norm()))) < 4.5 / math.sqrt(a.numel())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_among_zeros(backend, value):
    for place in (0, 100, 255):
        x = torch.zeros(3, 256)
        x[1, place] = value
        for bits in (1, 8):
            out = copied(backend, x, bits)
            assert out[1].isnan().all() and not out[::2].any()


# -- groups that are too large -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rotated", "masked"])
def test_groups_that_are_too_large_are_refused(backend, kind):
    x, seed = inputs((2, 320), torch.float32).to(backend.device), torch.tensor([3])
    seed, widths = seed.to(backend.device), torch.tensor([2, 3], dtype=torch.uint8)
    packed, ranges = quantizer_ops.quantize(x, seed, 2, 256, kind=kind)
    place = x.shape, x.stride(), x.dtype
    message = f"^group_size with {kind} copies: expected at most 256, got 288$"
    for call in (
        lambda: quantizer_ops.quantize(x, seed, 2, 288, kind=kind),
        lambda: quantizer_ops.squares(x, 288, kind=kind),
        lambda: quantizer_ops.dequantize(packed, ranges, 2, 288, *place, kind=kind),
        lambda: quantizer_ops.dequantize(
            packed, ranges, 0, 288, *place, widths.to(backend.device), kind=kind
        ),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_layers_refuse_large_groups():
    message = "group_size with rotated copies: expected at most 256, got 288$"
    with pytest.raises(InputError, match=f"^{message}"):
        fewbit.nn.Linear(4, 4, group_size=288, quantizer="rotated")
    settings = fewbit.LayerSettings(group_size=288, quantizer="rotated")
    with pytest.raises(InputError, match=f"^layers: {message}"):
        fewbit.compress_(torch.nn.Linear(4, 4), 2, layers=settings, verbose=False)


# -- the torch ops -------------------------------------------------------------------------------------------


def copied_by_ops(x, seed, bits, group_size):
    """Return the saved tensors of a rotated copy and the values that the ops dequantize from it."""
    stride = layout.by_sample_stride(x)
    packed, ranges, *_ = traced_copies.quantize(x, stride, seed, bits, group_size, "rotated")
    place = bits, group_size, x.shape, stride, x.dtype, "rotated"
    return packed, ranges, traced_copies.dequantize(packed, ranges, *place)


@pytest.mark.parametrize("shape", [(7, 100), (3, 1000), (50, 3), (4, 8, 9), (0, 5), (3, 0), ()])
def test_fake_tensors_have_the_same_sizes(backend, shape):
    x = torch.ones(shape, device=backend.device)
    seed = torch.tensor([3], device=backend.device)
    for settings in ((1, 64), (8, 256)):
        real = copied_by_ops(x, seed, *settings)
        with FakeTensorMode() as mode:
            fake = copied_by_ops(mode.from_tensor(x), mode.from_tensor(seed), *settings)
        for a, b in zip(real, fake, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        found = sum(tensor.nbytes for tensor in real[:2])
        assert found == quantized_bytes(shape, *settings)


def test_opcheck_of_rotated_copies(backend):
    x, seed = inputs((5, 70), torch.float32).to(backend.device), torch.tensor([3])
    seed, checks = seed.to(backend.device), ("test_schema", "test_faketensor")
    arguments = x, seed, 3, 64, "rotated"
    torch.library.opcheck(traced_copies.quantize_op, arguments, test_utils=checks)
    packed, *_ = traced_copies.quantize_op(*arguments)
    torch.library.opcheck(dense_ops.anchor_op, (packed,), test_utils=checks)
