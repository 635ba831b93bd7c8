"""The CUDA kernels of batch norm's backward without a GPU, in an emulation on the CPU."""

import numpy as np
import pytest
import torch
from cuda_emulation import needs_compiler, without_pairs

from fewbit.config import ROTATED
from fewbit.runtime.backends import reference

pytestmark = needs_compiler
ULP = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
dtypes = pytest.mark.parametrize("dtype", ULP, ids=str)


def problem(samples, features, channels, dtype, bits, seed=0):
    """Return a copy of random values, some of whose groups are rotated twice, and a gradient, in a dict of arguments."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(0, 1, (samples, features))).float()
    x.view(-1)[::1901] = 30.0
    grad = torch.from_numpy(rng.normal(0.5, 1, (samples, features))).to(dtype)
    rstd, weight = (torch.from_numpy(rng.uniform(0.5, 2, channels)).float() for _ in range(2))
    packed, ranges = reference.quantize(x, seed - 3, bits, 256, kind=ROTATED)
    return packed, ranges, bits, grad, rstd, weight


def run(cuda, packed, ranges, bits, grad, rstd, weight, needs_input=True):
    """Return the gradients that the kernels compute; None if they do not support the arguments."""
    return cuda.kernels.batch_norm_backward(
        packed, ranges, bits, 256, grad, rstd, weight, needs_input
    )


def gradients(packed, ranges, bits, grad, rstd, weight):
    """Return the gradients of input, weight and bias in float64, and the sums of the magnitudes that each is computed from."""
    x = torch.empty(grad.shape)
    reference.dequantize(packed, ranges, bits, 256, x, kind=ROTATED)
    x, g = (each.double().view(-1, len(rstd)) for each in (x, grad))
    factor = rstd.double() * (1 if weight is None else weight.double())
    of_bias, of_weight = g.sum(0), (g * x).sum(0)
    of_input = factor * (g - of_bias / len(g) - x * of_weight / len(g))
    bias_parts, weight_parts = g.abs().sum(0), (g * x).abs().sum(0)
    parts = factor * (g.abs() + bias_parts / len(g) + x.abs() * weight_parts / len(g))
    return (of_input.view(grad.shape), of_weight, of_bias), (
        parts.view(grad.shape),
        weight_parts,
        bias_parts,
    )


def compare(found, given):
    expected, magnitudes = gradients(*given)
    precision = ULP[given[3].dtype], ULP[torch.float32], ULP[torch.float32]
    for actual, value, magnitude, ulp in zip(found, expected, magnitudes, precision, strict=True):
        assert ((actual.double() - value).abs() <= (ulp + 2.0**-18) * magnitude + 1e-7).all()


# Samples, features, channels. A channel is in every group, or in one of several groups.
SHAPES = [
    (3, 256, 8),
    (5, 1024, 64),
    (9, 768, 96),
    (4, 2560, 320),
    (1, 256, 256),
    (6, 4096, 2048),
    (60, 512, 512),
    (400, 32, 32),  # groups run across samples
    (2, 32_000, 1000),  # more phases than blocks that run at once
]


@without_pairs
@dtypes
@pytest.mark.parametrize("bits", (1, 2, 3, 4))
def test_gradients(cuda, bits, dtype):
    # Each shape for a third of the dtypes and bits.
    for number in range((bits + list(ULP).index(dtype)) % 3, len(SHAPES), 3):
        given = problem(*SHAPES[number], dtype, bits, seed=number)
        if number == 2:
            given = *given[:-1], None
        found = run(cuda, *given)
        compare(found, given)
        if number < 3:
            none, *again = run(cuda, *given, needs_input=False)
            assert none is None and all(map(torch.equal, again, found[1:]))


@pytest.mark.parametrize("is_reversed", [False, True])
@dtypes
def test_a_warp_visits_several_groups(cuda, dtype, is_reversed):
    """With one multiprocessor, a warp visits more groups than it computes random numbers for at once."""
    given = problem(1024, 512, 512, dtype, 2)
    with cuda.device_of(1, is_reversed=is_reversed):
        compare(run(cuda, *given), given)


def test_numbers_that_are_not_finite(cuda):
    """Infinite gradients make all gradients of their channels NaN, and no others; results beyond float16 are infinite."""
    copy = *settings, grad, rstd, weight = problem(4, 512, 64, torch.float16, 2)
    large = run(cuda, *settings, grad, rstd * 1e5, weight)[0]
    assert large.isinf().any() and not large.isnan().any()
    grad[1, 70] = torch.inf
    bad = ~run(cuda, *copy)[0].view(-1, 64).isfinite()
    assert bad[:, 6].all() and bad.sum() == len(bad)


def test_what_the_kernels_do_not_fit(cuda):
    *settings, grad, rstd, weight = problem(4, 512, 64, torch.float32, 2)
    misaligned = cuda.empty(4, 512, dtype=torch.float32, offset=1).copy_(grad)
    assert run(cuda, *settings, grad, rstd, weight) is not None
    assert run(cuda, *settings, misaligned, rstd, weight) is None
    for samples, features, channels, bits, fits in (
        (4, 512, 64, 4, True),
        (4, 512, 64, 5, False),  # too many bits
        (4, 600, 8, 2, False),  # groups that are not full
        (4, 512, 4, 2, False),  # a number of channels that is no multiple of 8
        (2, 512, 1024, 2, True),  # four groups, and each channel in one of them
        (1, 512, 1024, 2, False),  # channels without elements
        (1, 133_376, 4168, 2, False),  # 521 phases
    ):
        given = problem(samples, features, channels, torch.float32, bits)
        assert (run(cuda, *given) is not None) == fits
