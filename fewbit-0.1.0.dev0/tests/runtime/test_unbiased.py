"""The promises of docs/concepts/quantizer.md that hold for exactly unbiased copies: their mean, and their randomness."""

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
from fewbit.catalog.normal_levels import unbiased_levels
from fewbit.catalog.unbiased_codes import packed_codes, unbiased_code
from fewbit.errors import FewbitError, InputError
from fewbit.runtime import backends
from fewbit.runtime.backends import reference_unbiased
from fewbit.runtime.format.distortion import distortion
from fewbit.runtime.ops import quantizer_ops
from fewbit.table.staircase import build_staircase, draw_codes

try:
    from fewbit.runtime.backends import native
except ImportError:
    native = None


def copied(backend, x, bits, seed=0, group_size=256, fp32_min=True):
    """Return the values of an unbiased copy, float64."""
    packed, ranges, _ = quantize(backend, x, bits, group_size, fp32_min, seed=seed, kind="unbiased")
    return dequantize(backend, packed, ranges, x, bits, group_size, kind="unbiased").double()


def draws_of(backend, x, bits, seeds=8, rows=64, **settings):
    """Return independent copies of one sample: of several seeds, and as several samples, (seeds * rows, n)."""
    many = x.expand(rows, -1).contiguous()
    return torch.cat(
        [copied(backend, many, bits, 1000 * bits + i, **settings) for i in range(seeds)]
    )


def check_mean(errors, x):
    """Check that the mean error is 0: of the elements, along the group, and of their sum."""
    x = x.double()
    v = x - x.mean()
    least = 1e-6 * float(x.abs().max())  # float32's rounding of the values
    scores = (
        pooled_z(errors, 0 * x, least),
        z_score(errors @ v / (v @ v).clamp(min=1e-12)),
        z_score(errors.sum(1) / x.norm()),
    )
    assert max(map(abs, scores)) < 4.5, scores


# -- the mean error ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp32_min", [False, True], ids=["bfloat16", "fp32_min"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("data", GROUPS)
def test_mean_error(usual_backend, data, bits, fp32_min):
    x = one_group(data)
    check_mean(draws_of(usual_backend, x, bits, fp32_min=fp32_min) - x, x)


@pytest.mark.parametrize("bits", [1, 2])
def test_mean_error_of_a_large_element(usual_backend, bits):
    """A rotated copy restores this element as 1.04 or 1.015 times its value in the mean, an unbiased copy exactly."""
    x = one_group("normal").double()
    x -= x.mean()
    x[0] = 0
    x[0] = (0.12 / 0.88 * x @ x).sqrt()
    x = x.float()
    errors = draws_of(usual_backend, x, bits, rows=512) - x
    assert abs(z_score(errors[:, 0] / float(x[0]))) < 4
    deviation = float(errors[:, 0].std() / x[0]) / math.sqrt(len(errors))
    assert deviation < {1: 0.04, 2: 0.015}[bits] / 4  # the error of a rotated copy would be seen


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 9, 12, 33, 48])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_mean_error_of_short_groups(usual_backend, n, bits):
    for seed in range(3):
        x = inputs((1, 64 + n), torch.float32, seed=seed)[0]
        errors = draws_of(usual_backend, x, bits, rows=256, group_size=64) - x
        check_mean(errors[:, -n:], x[-n:])


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_weight_gradient_is_exact_in_expectation(usual_backend, bits):
    """The input has an outlier, of which rotated copies have a mean error."""
    x = one_group("outlier").to(usual_backend.device).expand(4, -1).contiguous()
    weight = torch.zeros(3, 256, device=usual_backend.device, requires_grad=True)
    grad = inputs((4, 3), torch.float32).to(usual_backend.device)
    found = []
    for i in range(150):
        torch.manual_seed(i)
        y = F.linear(x, weight, bits=bits, quantizer="unbiased")
        found.append(torch.autograd.grad(y, weight, grad)[0].double().cpu())
    exact = (grad.t() @ x).double().cpu()
    assert abs(pooled_z(torch.stack(found), exact, 1e-5, independent=256)) < 4.5


# -- randomness ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_errors_of_equal_tokens_average_out(usual_backend, bits):
    """The error of the weight's gradient falls as 1 / N if N tokens are equal."""
    x = one_group("normal")
    v = (x - x.mean()).double()
    for tokens in (1, 8, 64):
        means = [
            copied(usual_backend, x.expand(tokens, -1).contiguous(), bits, seed=i).mean(0) - x
            for i in range(4096 // tokens // 8)
        ]
        found = float(torch.stack(means).square().sum(1).mean() / (v @ v))
        assert 0.75 < found * tokens / distortion("unbiased", bits) < 1.25, tokens


@pytest.mark.parametrize("bits", [1, 2, 8])
@pytest.mark.parametrize("seeds", [(7, 8), (7, 7 + 2**32), (7, -7), (0, -(2**63))], ids=str)
def test_copies_of_two_seeds_are_independent(usual_backend, seeds, bits):
    x = inputs((128, 256), torch.float32)
    a, b = (copied(usual_backend, x, bits, seed=seed) - x for seed in seeds)
    assert abs(float((a * b).sum() / (a.norm() * b.norm()))) < 4.5 / math.sqrt(a.numel())


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_errors_of_elements_are_not_correlated(usual_backend, bits):
    """Elements share no random numbers, so their errors have no correlation that 4,096 copies show."""
    x = one_group("normal")
    errors = draws_of(usual_backend, x, bits, seeds=16, rows=256) - x
    correlations = torch.corrcoef(errors.t())
    apart = correlations[~torch.eye(256, dtype=torch.bool)]
    expected = 1 / math.sqrt(len(errors))
    assert 0.9 < float(apart.square().mean().sqrt()) / expected < 1.2
    assert float(apart.abs().max()) < 7 * expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_among_zeros(backend, value):
    for place in (0, 100, 255):
        x = torch.zeros(3, 256)
        x[1, place] = value
        out = copied(backend, x, 2)
        assert out[1].isnan().all() and not out[::2].any()


# -- the codes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_are_those_of_the_staircase(bits):
    """The inequality of `unbiased_codes` gives the codes that `draw_codes` draws with the same random numbers."""
    rng = np.random.default_rng(bits)
    code = unbiased_code(bits)
    limit = 1 / code.inverse_limit
    z, noise = rng.uniform(-limit, limit, 10000), rng.random(10000)
    shared = rng.integers(0, len(code.levels), 10000)
    above = (
        z[:, None] > (code.means + noise[:, None, None] * code.gaps)[range(10000), shared][:, :-1]
    )
    assert (above.sum(1) == draw_codes(code.levels, z, shared, noise)).mean() > 0.9999


def test_codes_are_packed_as_the_kernels_read_them():
    packed = packed_codes()
    stairs = [build_staircase(np.float32(unbiased_levels(bits))) for bits in range(1, 9)]
    np.testing.assert_allclose(packed[:8], [1 / stair.means[-1] for stair in stairs], rtol=1e-6)
    levels = np.float32(unbiased_levels(2))
    np.testing.assert_array_equal(packed[8 + 3 * 128 :][: levels.size], levels.ravel())
    assert len(packed) == 8 + 3 * sum(np.size(unbiased_levels(bits)) for bits in range(1, 9))


# -- codes on a device ---------------------------------------------------------------------------------------


def test_codes_that_are_made_while_a_compiler_traces(backend):
    """They are no fake tensors, so that later copies can use them."""
    x = inputs((2, 256), torch.float32)
    expected = copied(backend, x, 2)
    for cache in (reference_unbiased._code, *([native._unbiased_levels] if native else [])):
        cache.cache_clear()
    with FakeTensorMode():
        backends.prepare(torch.device(backend.device))
    assert torch.equal(copied(backend, x, 2), expected)


@pytest.mark.skipif(native is None, reason="fewbit was installed without kernels")
def test_a_capture_without_a_step_before_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        FewbitError, match="^the codes of unbiased copies are not on cuda:7 yet: run a step there"
    ):
        native.levels_of("unbiased", torch.device("cuda:7"))


@pytest.mark.parametrize(
    "kind, expected", [("unbiased", 2), ("masked-unbiased", 2), ("rotated", 0)]
)
def test_a_compiler_prepares_the_device(kind, expected, monkeypatch):
    """Otherwise, the codes would be in the memory of the first CUDA graph."""
    devices = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends, "prepare", devices.append)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 256, device="cuda")
        seed = torch.empty(1, dtype=torch.int64, device="cuda")
        packed, ranges, _ = quantizer_ops.quantize_op(x, x.stride(), seed, 2, 256, False, kind)
        quantizer_ops.dequantize_op(packed, ranges, 2, 256, (2, 256), (256, 1), x.dtype, kind)
    assert [device.type for device in devices] == ["cuda"] * expected


# -- settings ------------------------------------------------------------------------------------------------


def test_groups_that_are_too_large_are_refused():
    message = "expected at most 256 for group_size with unbiased copies, got 288$"
    with pytest.raises(InputError, match=f"^{message}"):
        fewbit.nn.Linear(4, 4, group_size=288, quantizer="unbiased")
    with pytest.raises(InputError, match=f"^layers: {message}"):
        layers = fewbit.LayerSettings(group_size=288, quantizer="unbiased")
        fewbit.compress_(torch.nn.Linear(4, 4), bits=2, layers=layers)
