"""Transforms and second derivatives of layers, and the bias of norms. All else is in test_layer_properties.py."""

import pytest
import torch
from expectation import covariance, pooled_z, signed_z
from layers import (
    EVERY,
    first,
    gradients,
    ids,
    saved_by,
)
from samples import normal

import fewbit.functional as F
import fewbit.nn

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel",
    "ignore:Mismatch dtype between input and weight",
    "ignore:input's size at dim=0",
    "ignore::DeprecationWarning:torch.*",
    "ignore:.*isinstance.*treespec",
)
every_layer = pytest.mark.parametrize("layer", **ids(EVERY))


def seeded(function, *arguments):
    """Call the function from a fixed random state, so that dropouts draw the same mask."""
    torch.manual_seed(3)
    return function(*arguments)


def outcome(function, *arguments):
    """Return the seeded function's result, or the type of the error that it raises."""
    try:
        return seeded(function, *arguments)
    except (RuntimeError, ValueError, IndexError) as refusal:
        return type(refusal)


def test_a_frozen_batch_norm_in_evaluation_mode_keeps_nothing(device):
    module = fewbit.nn.BatchNorm2d(3).to(device).eval().requires_grad_(False)
    _, saved = saved_by(module, normal((2, 3, 4, 5), device=device).requires_grad_())
    assert {x.data_ptr() for x in saved} <= {x.data_ptr() for x in module.buffers()}


# -- exact in expectation -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "draws"),
    [
        ("uniform", 600),
        *(pytest.param(kind, 4000, marks=pytest.mark.slow) for kind in ("rotated", "unbiased")),
    ],
)
def test_the_bias_of_a_norm_with_one_copy(kind, draws):
    """The bias is -Cov g / (N s), and nothing else (long version of ActNN, appendix B.2).

    In a uniform copy, elements are rounded independently, and this is -g Var / (N s) elementwise. The bias of other
    copies is smaller, so more draws are needed to see it.
    """
    (layer,) = first("LayerNorm")
    _, theirs = layer.pair(2, dtype=torch.float64)
    x = layer.input().double()
    torch.manual_seed(0)
    many = x.repeat(draws, 1).requires_grad_()  # each row has groups of its own
    weights = theirs.weight.detach(), theirs.bias.detach()
    y = F.layer_norm(many, (96,), *weights, bits=2, quantizer=kind)
    grad = normal(x.shape, torch.float64, scale=1.0, seed=7)
    samples = torch.autograd.grad(y, many, grad.repeat(draws, 1))[0].view(draws, *x.shape)
    exact = gradients(theirs, x)[1]
    g = normal(x.shape, torch.float64, scale=1.0, seed=7) * theirs.weight.detach().double()
    deviation = (x.var(-1, unbiased=False, keepdim=True) + theirs.eps).sqrt()
    normalized = (x - x.mean(-1, keepdim=True)) / deviation
    rounded = [covariance(row, 2, kind) @ of_row for row, of_row in zip(normalized, g, strict=True)]
    bias = -torch.stack(rounded) / (96 * deviation)
    assert abs(pooled_z(samples, exact[0] + bias, 1e-9)) < 5
    assert max(abs(z) for z in signed_z(samples, exact[0] + bias, 1e-9)) < 4
    assert abs(pooled_z(samples, exact[0], 1e-9)) > 5  # it is seen
    assert signed_z(samples, exact[0], 1e-9)[1] < -15  # along the gradient still better
    assert (
        bias.norm() / exact[0].norm() < {"uniform": 0.02, "rotated": 0.005, "unbiased": 0.01}[kind]
    )  # and small
