"""Converted models whose layers save unbiased copies: with all ways of choosing bits, and compiled."""

import pytest
import torch
from layers import gradients, relative
from samples import normal
from torch import nn

import fewbit

CONFIGS = {
    "2 bits": 2,
    "8 bits": 8,
    "adaptive": fewbit.AdaptiveBits(2),
    "error bound": fewbit.ErrorBound(0.5),
}
LAYERS = {"quantizer": "unbiased"}
X = normal((128, 64), scale=1.0)


def model():
    torch.manual_seed(0)
    parts = nn.Linear(64, 256), nn.ReLU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU()
    return nn.Sequential(*parts, nn.Linear(256, 64))


def error(network):
    """Return the relative error of the whole gradient."""
    found = (gradients(either, X)[1] for either in (network, model()))
    return relative(*(torch.cat([grad.flatten() for grad in grads]) for grads in found))


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients(name):
    network = model()
    fewbit.compress_(network, bits=CONFIGS[name], layers=LAYERS, verbose=False)
    errors = [error(network) for _ in range(3)]
    assert errors[-1] < (0.1 if name == "8 bits" else 0.8)


@pytest.mark.inductor
def test_a_compiled_model():
    compiled = fewbit.compile(model(), bits=4, layers=LAYERS, backend="aot_eager")
    assert 0.01 < error(compiled) < 0.2
