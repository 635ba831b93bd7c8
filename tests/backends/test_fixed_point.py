"""The fixed-point code of pre-activations: its values, and every backend against the reference backend."""

import math

import pytest
import torch
from samples import normal
from torch import nn

from fewbit.runtime.backends import reference
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.ops import fixed_point

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
BITS = range(1, 9)


GAMMA = (1.0, -0.5, 0.0, 0.0, 2.0, 1e-30, -1e20, 0.75, 3.0, 0.25)
BETA = (0.0, 0.25, 0.5, -0.5, 20.0, 1e-30, 3e19, -3.5, -9.0, 0.75)


def block(n, inner, device="cpu", dtype=torch.float32):
    """x~, gamma and beta by element, y, and the two vectors; n: a multiple of 10 inner."""
    gamma, beta = (torch.tensor(vector, device=device) for vector in (GAMMA, BETA))
    x = (1.5 * normal((n,), torch.float32, device, seed=1)).to(dtype)
    index = torch.arange(n, device=device) // inner % len(GAMMA)
    y = (x.double() * gamma.double()[index] + beta.double()[index]).to(dtype)
    return x, index, y, gamma, beta


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_values(backend, bits, dtype):
    """Values are within half a step (eq. 11) where the grid reaches, and maps of them have the sign of y."""
    x, index, y, gamma, beta = block(640, 4, backend.device, dtype)
    grid = fixed_point.grid_of(gamma, beta, bits, x.device)
    packed = fixed_point.encode(x, y, grid, bits, 4)
    assert packed.shape == (packed_words(640, bits),) and packed.dtype == torch.int32

    def restored(dtype=torch.float32, **options):
        return fixed_point.decode(packed, grid, bits, 4, (640,), (1,), dtype, **options)

    values, step = restored(), 6 / 2**bits
    gamma, beta = gamma[index], beta[index]
    usual = (gamma.abs() > 0.1) & (gamma.abs() < 10)  # others overflow or vanish in float16
    inside = usual & (beta.abs() <= 3 * gamma.abs()) & (x.abs() < 3 - step)
    rounding = 1e-5 + 8 * torch.finfo(dtype).eps  # of y, whose sign decides
    assert ((values - x).abs()[inside] <= step / 2 + rounding).all()
    assert inside.sum() > 50 or bits == 1
    scale = torch.arange(1.0, 161.0, device=x.device)
    expected = values * scale.repeat_interleave(4)
    torch.testing.assert_close(restored(scale=(scale, 4)), expected, rtol=1e-5, atol=1e-3)
    ours, positive = restored(slope=1.0), y > 0
    torch.testing.assert_close(ours, gamma * values + beta, rtol=2e-5, atol=1e-5)
    assert (ours[positive] >= 0).all() and (ours[~positive] <= 0).all()
    assert torch.equal(restored(slope=0.0), ours * positive)
    assert torch.equal(restored(slope=0.25), torch.where(positive, ours, ours * 0.25))
    assert torch.equal(restored(dtype), values.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_grids_agree_to_the_last_bit(backend, bits, dtype):
    extremes = torch.tensor([*GAMMA, 1e-45, -1e-45, math.inf, math.nan, 1.0, 1.0, 1.0, -1.0, 0.0])
    gamma = torch.cat([extremes, normal((200,), seed=1)]).to(dtype)
    extremes = torch.tensor([*BETA, 1.0, 1e-45, 1.0, 1.0, math.nan, 3.0, -3.0, math.inf, 0.0])
    beta = torch.cat([extremes, normal((200,), scale=2.0, seed=2)]).to(dtype)
    ours = fixed_point.grid_of(gamma.to(backend.device), beta.to(backend.device), bits, None).cpu()
    wide = torch.promote_types(dtype, torch.float32)
    expected = reference.grid_fixed(gamma.to(wide), beta.to(wide), bits)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    assert ours.shape == (7, 219) and ours.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", (1, 3, 8))
@pytest.mark.parametrize(
    "n, channels, inner",
    [
        *((70, 7, 1), (70, 1, 1), (1400, 7, 5), (4096, 2, 1024), (1530, 510, 1)),
        *((200_000, 100, 1), (200_000, 50, 1000)),  # more than one thread is given
    ],
)
def test_backends_agree_to_the_last_bit(backend, n, channels, inner, bits, dtype):
    """This includes statistics with an index of their own, and chunks and runs that end at different places."""
    device = backend.device
    gamma, beta = normal((channels,), seed=2), normal((channels,), seed=3)
    gamma[0] = 0.0
    x = normal((n,), dtype, scale=2.0, seed=4) + 0.5
    y = normal((n,), dtype, seed=5)
    y[::9], y[4] = 0.0, torch.nan
    x[5], x[6] = torch.nan, torch.inf
    mean, rstd = normal((n // 10,), seed=6), normal((n // 10,), seed=7).abs() + 0.1
    statistics = (mean, rstd, 10) if n % 10 == 0 else None
    grid = fixed_point.grid_of(gamma, beta, bits, "cpu")
    expected = reference.encode_fixed(x, y, grid, bits, inner, statistics)

    def there(argument):
        return argument.to(device) if isinstance(argument, torch.Tensor) else argument

    moved = None if statistics is None else tuple(map(there, statistics))
    packed = fixed_point.encode(there(x), there(y), there(grid), bits, inner, moved)
    assert torch.equal(packed.cpu(), expected)
    scale = None if statistics is None else (rstd, 10)
    for options in ({}, {"scale": scale}, {"slope": 1.0}, {"slope": 0.0}, {"slope": -0.3}):
        theirs = torch.empty(n, dtype=dtype)
        reference.decode_fixed(expected, grid, bits, inner, theirs, **options)
        options = {
            k: tuple(map(there, v)) if isinstance(v, tuple) else v for k, v in options.items()
        }
        ours = fixed_point.decode(packed, there(grid), bits, inner, (n,), (1,), dtype, **options)
        assert torch.equal(ours.cpu(), theirs)
    grad = normal((n,), dtype, seed=8)
    grad[3] = torch.inf
    for slope in (0.0, 0.01):
        theirs = torch.empty_like(grad)
        reference.mask_fixed(grad, expected, grid, bits, inner, slope, theirs)
        ours = fixed_point.mask(there(grad), packed, there(grid), bits, inner, slope)
        assert torch.equal(ours.cpu(), theirs)


def test_sizes_of_zero(backend):
    x = torch.zeros(0, device=backend.device)
    grid = fixed_point.grid_of(None, None, 4, x.device)
    packed = fixed_point.encode(x, x, grid, 4, 1)
    assert not packed.numel()
    assert not fixed_point.decode(packed, grid, 4, 1, (0,), (1,), torch.float32).numel()
    assert not fixed_point.mask(x, packed, grid, 4, 1, 0.0).numel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_a_mask_is_torchs(backend, dtype):
    x, index, y, gamma, beta = block(640, 4, backend.device, dtype)
    y[gamma[index] * (torch.arange(640, device=y.device) % 7 == 0) != 0] = 0.0
    grid = fixed_point.grid_of(gamma, beta, 4, x.device)
    grad = normal((640,), dtype, backend.device, seed=3)
    grad[::7] = torch.inf  # which times 0 would be NaN
    for slope in (0.0, 0.1):
        if not slope:
            y[3] = torch.nan  # ReLU passes its gradient, LeakyReLU does not
        leaf = y.clone().requires_grad_()
        (nn.functional.leaky_relu(leaf, slope) if slope else torch.relu(leaf)).backward(grad)
        packed = fixed_point.encode(x, y, grid, 4, 4)
        ours = fixed_point.mask(grad, packed, grid, 4, 4, slope)
        torch.testing.assert_close(ours, leaf.grad, rtol=0, atol=0)
        y[3] = 1.0
