"""Bilinear, PReLU, Softmax and LogSoftmax: properties of these layers alone."""

from math import ceil

import pytest
import torch
from expectation import pooled_z
from layers import relative, saved_by
from quantized import quantized_bytes
from samples import normal, same
from torch.nn import functional as torch_f

import fewbit.functional as F
from fewbit.functional.softmax import log_softmax, softmax
from fewbit.runtime.quantizers.quantizer import Quantizer

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*", "ignore:.*isinstance.*treespec"
)


# -- PReLU -----------------------------------------------------------------------------------------


def test_prelu_keeps_what_is_asked_for(device):
    shape = (4, 5, 9, 8)
    x = normal(shape, device=device)
    slopes = torch.full((5,), 0.3, device=device)
    sign, rest = 4 * ceil(x.numel() / 32), quantized_bytes(shape, 3)
    for needs_x, needs_weight in ((True, True), (True, False), (False, True)):
        inputs = x.clone().requires_grad_(needs_x), slopes.clone().requires_grad_(needs_weight)
        saved = saved_by(lambda x, slopes: F.prelu(x, slopes, bits=3), *inputs)[1]
        pointers = {x.data_ptr() for x in inputs}
        found = sum(tensor.nbytes for tensor in saved if tensor.data_ptr() not in pointers)
        assert found == sign * needs_x + rest * needs_weight


def test_prelu_at_zero_and_beyond_numbers(device):
    x = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1.0, -1.0], device=device)
    x = x.requires_grad_()
    slope = torch.tensor([0.25], device=device)
    grad = normal(x.shape, device=device, seed=6)
    ours = torch.autograd.grad(F.prelu(x, slope), x, grad)[0]
    assert same(ours, torch.autograd.grad(torch_f.prelu(x, slope), x, grad)[0])


# -- Softmax ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "draws"), [("uniform", 20000), ("rotated", 40000)])
@pytest.mark.parametrize("bits", [1, 2])
def test_the_bias_of_softmax(bits, kind, draws):
    """The bias E[grad^] - grad = -Cov[y^] g is measured over equal rows.

    In a uniform copy, elements are rounded independently, so this is -g_j Var[y^_j].
    """
    width = 64
    torch.manual_seed(0)
    x = normal((1, width), torch.float64, scale=1.0).expand(draws, width).requires_grad_()
    g = normal((1, width), torch.float64, scale=1.0, seed=6).expand(draws, width)
    y = torch_f.softmax(x, -1)
    (exact,) = torch.autograd.grad(y, x, g)
    kept = Quantizer(bits, kind=kind).quantize(y.detach())
    covariance = kept.spec.dequantize(kept.tensors, torch.float64).t().cov()
    if kind == "uniform":
        covariance = covariance.diagonal().diag()
    (found,) = torch.autograd.grad(softmax(x, -1, bits=bits, quantizer=kind), x, g)
    bias, measured = -covariance @ g[0], found.mean(0) - exact[0]
    assert abs(pooled_z(found, exact[0], 1e-7, 60)) > 4
    assert abs(pooled_z(found, exact[0] + bias, 1e-7, 60)) < 4
    # Along the formula's direction: 1 where it holds, 0 where there is no bias.
    assert abs(float((measured * bias).sum() / bias.square().sum()) - 1) < 0.1


def test_softmax_dtype_and_dim(device):
    x = normal((3, 70), torch.bfloat16, device, scale=1.0).requires_grad_()
    grad = normal((3, 70), device=device, seed=6)
    for ours, theirs in ((softmax, torch_f.softmax), (log_softmax, torch_f.log_softmax)):
        y = ours(x, 1, dtype=torch.float32, bits=8)
        their_y = theirs(x, 1, dtype=torch.float32)
        assert same(y, their_y)
        found, expected = (torch.autograd.grad(result, x, grad)[0] for result in (y, their_y))
        assert found.dtype == torch.bfloat16 and relative(found, expected) < 0.02
        for shape in ((), (5,), (3, 4), (2, 3, 4)):
            z = normal(shape, device=device).requires_grad_()
            with pytest.warns(UserWarning, match="Implicit dimension choice"):
                chosen = ours(z)
            with pytest.warns(UserWarning):
                assert same(chosen, theirs(z))
            chosen.sum().backward()
    with pytest.raises(IndexError):
        softmax(x, 5)
