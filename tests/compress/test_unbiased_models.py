"""Converted models whose layers save unbiased copies: with all ways of choosing bits, and compiled."""

import pytest
import torch
from torch import nn

import fewbit

CONFIGS = {
    "2 bits": 2,
    "8 bits": 8,
    "adaptive": fewbit.AdaptiveBits(2),
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
    assert error(gradient(network, steps=3)) < (0.1 if name == "8 bits" else 0.8)


@pytest.mark.inductor
def test_a_compiled_model():
    network = model()
    compiled = fewbit.compile(network, bits=4, layers=LAYERS, backend="aot_eager")
    loss_of(compiled).backward()
    found = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
    assert 0.01 < error(found) < 0.2
