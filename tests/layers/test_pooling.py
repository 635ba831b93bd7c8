"""Pooling: torch's values, indices and gradients to the bit, and windows of every size."""

from functools import partial
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import POOLINGS, check_equal, first_of_each, ids, saved_by
from samples import normal, same
from torch.nn import functional as torch_f

import fewbit.functional.pooling as F
from fewbit.runtime.format.windows import Windows

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*", "ignore:.*isinstance.*treespec"
)


@pytest.mark.parametrize("layer", **ids(first_of_each(POOLINGS)))
def test_ties_nan_and_infinities(device, layer):
    x = normal(layer.shape, device=device, scale=1.0).round()
    x[x == 2] = torch.nan
    x[x == 1] = torch.inf
    check_equal(layer.ours(), layer.theirs(), x)
    check_equal(layer.ours(), layer.theirs(), torch.zeros_like(x))
    check_equal(layer.ours(), layer.theirs(), torch.full_like(x, -torch.inf))


def test_a_window_of_minus_infinity_whose_index_torch_gets_wrong():
    """The CPU kernel for channels-last volumes says depth 0; the gradient lands in the plane."""
    x = torch.full((1, 16, 4, 4, 4), -torch.inf).to(memory_format=torch.channels_last_3d)
    for padding in (0, 1):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = F.max_pool3d(leaf, 2, 2, padding)
        grad_y = normal(y.shape, seed=6)
        (grad,) = torch.autograd.grad(y, leaf, grad_y)
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
        check_equal(ours, theirs, x)


def test_unpooling(device):
    x = normal((2, 3, 8, 8), device=device)
    pooled, indices = F.max_pool2d(x.requires_grad_(), 2, return_indices=True)
    y = torch_f.max_unpool2d(pooled, indices, 2)
    assert same(torch.autograd.grad(y.sum(), x)[0], (y == x).to(x.dtype))


@given(st.integers(1, 30), st.integers(1, 30))
def test_the_longest_adaptive_window(size, out):
    longest = max(ceil((o + 1) * size / out) - o * size // out for o in range(out))
    assert Windows.adaptive((size,), (out,)).count == longest


def test_the_ops_of_integers(device):
    values = torch.arange(77, device=device).remainder(5)
    for arguments in ((values, 3), (values.int(), 3), (values, 8)):
        torch.library.opcheck(torch.ops.fewbit.pack_kept.default, arguments)
    torch.library.opcheck(torch.ops.fewbit.narrow_kept.default, (values, torch.int16))
