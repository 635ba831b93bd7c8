"""Pooling: torch's values, indices and gradients to the bit, and windows of every size."""

from functools import partial
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import POOLINGS, first_of_each, ids, saved_by
from samples import normal, same, same_sums
from torch.nn import functional as torch_f

import fewbit.functional.pooling as F
from fewbit.runtime.format.windows import Windows
from fewbit.runtime.quantizers import integers

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*", "ignore:.*isinstance.*treespec"
)


every_sample = pytest.mark.parametrize("layer", **ids(POOLINGS))


def step(function, x):
    """(results, gradient) of x, a leaf with its own strides."""
    x = x.detach().requires_grad_()
    results = function(x)
    results = results if isinstance(results, tuple) else (results,)
    y = results[0]
    (grad,) = torch.autograd.grad(y, x, normal(y.shape, y.dtype, y.device, seed=6))
    return results, grad


def check(ours, theirs, x):
    """The same results and gradient to the bit, or the same refusal."""
    try:
        theirs, theirs_grad = step(theirs, x)
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            step(ours, x)
        return
    ours, ours_grad = step(ours, x)
    assert len(ours) == len(theirs)
    assert same(ours[0], theirs[0]) and ours[0].stride() == theirs[0].stride()
    assert same_sums(ours_grad, theirs_grad)
    if len(ours) > 1:
        assert torch.equal(ours[1], theirs[1]) and ours[1].stride() == theirs[1].stride()


@pytest.mark.parametrize("layer", **ids(first_of_each(POOLINGS)))
def test_ties_nan_and_infinities(device, layer):
    x = normal(layer.shape, device=device, scale=1.0).round()
    x[x == 2] = torch.nan
    x[x == 1] = torch.inf
    check(layer.ours(), layer.theirs(), x)
    check(layer.ours(), layer.theirs(), torch.zeros_like(x))
    check(layer.ours(), layer.theirs(), torch.full_like(x, -torch.inf))


def test_a_window_of_minus_infinity_whose_index_torch_gets_wrong():
    """The CPU kernel for channels-last volumes says depth 0; the gradient lands in the plane."""
    x = torch.full((1, 16, 4, 4, 4), -torch.inf).to(memory_format=torch.channels_last_3d)
    for padding in (0, 1):
        results, grad = step(lambda x: F.max_pool3d(x, 2, 2, padding), x)  # noqa: B023
        grad_y = normal(results[0].shape, seed=6)
        torch.testing.assert_close(grad.sum((2, 3, 4)), grad_y.sum((2, 3, 4)))


def test_k_of_each_number_of_bits(device):
    for k in range(1, 12):
        x = normal((3, 40), device=device).requires_grad_()
        ours, theirs = (
            partial(library.max_pool1d, kernel_size=k, stride=1) for library in (F, torch_f)
        )
        y, saved = saved_by(ours, x)
        bits = ceil(torch.tensor(float(k)).log2().item())
        assert sum(tensor.nbytes for tensor in saved) == 4 * bits * ceil(y.numel() / 32)
        check(ours, theirs, x)


def test_unpooling(device):
    x = normal((2, 3, 8, 8), device=device)
    pooled, indices = F.max_pool2d(x.requires_grad_(), 2, return_indices=True)
    y = torch_f.max_unpool2d(pooled, indices, 2)
    assert same(torch.autograd.grad(y.sum(), x)[0], (y == x).to(x.dtype))


@given(st.integers(1, 30), st.integers(1, 30))
def test_the_longest_adaptive_window(size, out):
    longest = max(ceil((o + 1) * size / out) - o * size // out for o in range(out))
    assert Windows.adaptive((size,), (out,)).count == longest


def test_integers(device):
    for count in (2, 3, 8, 9, 200, 256, 257, 1 << 15, (1 << 15) + 1):
        values = torch.arange(77, device=device).remainder(count)
        kept = integers.pack(values, count)
        assert torch.equal(kept.spec.dequantize(kept.tensors).to(torch.int64), values)
    swapped = torch.arange(15, device=device).view(3, 5).t()
    kept = integers.pack(swapped, 15)
    assert torch.equal(kept.spec.dequantize(kept.tensors).to(torch.int64), swapped)


def test_the_ops_of_integers(device):
    values = torch.arange(77, device=device).remainder(5)
    for arguments in ((values, 3, 5, [1]), (values.int(), 3, 5, [1]), (values, 16, 300, [1])):
        torch.library.opcheck(torch.ops.fewbit.pack_kept.default, arguments)
    torch.library.opcheck(torch.ops.fewbit.narrow_kept.default, (values, torch.int16))


# -- all configurations ----------------------------------------------------------------------------
