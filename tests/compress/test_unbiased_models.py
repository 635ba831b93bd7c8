"""Converted models whose layers save unbiased copies: with all ways of choosing bits, and compiled."""

import pytest
import torch
from torch import nn

import fewbit

CONFIGS = {
    "2 bits": 2,
    "8 bits": 8,
    "adaptive": fewbit.AdaptiveBits(2),
    "budget": fewbit.Budget("40 KB"),
    "error bound": fewbit.ErrorBound(0.5),
}
LAYERS = {"quantizer": "unbiased"}


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.LayerNorm(256),
        nn.Linear(256, 256),
        nn.GELU(),
        nn.Linear(256, 64),
    )


def loss_of(network):
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, 128, 64, generator=generator)
    return (network(x) - target).square().mean()


def gradient(network, steps=1):
    for _ in range(steps):
        network.zero_grad()
        loss_of(network).backward()
    return torch.cat([parameter.grad.flatten() for parameter in network.parameters()])


def error(found):
    exact = gradient(model())
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients(name):
    network = model()
    fewbit.compress_(network, bits=CONFIGS[name], layers=LAYERS, verbose=False)
    assert error(gradient(network, steps=3)) < (0.05 if name == "8 bits" else 0.8)


def test_unbiased_copies_take_the_bytes_of_rotated_ones():
    """A ReLU's result has a masked copy otherwise, which takes no more bytes either."""
    found = {}
    for kind in ("rotated", "unbiased"):
        network = fewbit.compress_(model(), bits=2, layers={"quantizer": kind}, verbose=False)
        found[kind] = fewbit.saved_bytes(network, lambda network=network: loss_of(network))
    assert found["rotated"] == found["unbiased"]


def test_more_bits_than_four_have_smaller_errors_than_rotated_copies():
    """The input of a linear layer is normal, so the error of the weight's gradient is that of the copy."""
    x = torch.randn(2048, 256, generator=torch.Generator().manual_seed(2))
    errors = {}
    for kind in ("rotated", "unbiased"):
        layer = fewbit.nn.Linear(256, 1, bits=8, quantizer=kind)
        layer(x).backward(torch.ones(2048, 1))
        errors[kind] = float((layer.weight.grad - x.sum(0)).square().sum())
    assert 0.75 < errors["unbiased"] / errors["rotated"] < 1


def test_a_compiled_model():
    network = model()
    compiled = fewbit.compile(network, bits=4, layers=LAYERS, backend="aot_eager")
    loss_of(compiled).backward()
    found = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
    assert 0.01 < error(found) < 0.2
