"""Training steps in CUDA graphs: a replay computes what a step computes, with new random numbers each time."""

import copy

import pytest
import torch
from conftest import CUDA
from samples import normal
from torch import nn
from torch.nn import functional as F

import fewbit

pytestmark = CUDA

WIDTH = 256


class Attention(nn.Module):
    """Causal attention with four heads."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + y.transpose(1, 2).flatten(2)


def mlp():
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
    )


def images():
    return nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3)
    )


MODELS = {
    "mlp": (mlp, (64, WIDTH)),
    "attention": (Attention, (4, 32, WIDTH)),
    "images": (images, (8, 4, 32, 32)),
}
SETTINGS = {
    "2 bits": {"bits": 2},
    "uniform": {"bits": 2, "layers": {"quantizer": "uniform"}},
}


def made(name):
    torch.manual_seed(0)
    model, shape = MODELS[name]
    return model().cuda(), normal(shape, device="cuda", scale=1.0)


def gradient_of(model):
    return torch.cat([each.grad.flatten() for each in model.parameters()])


def captured(run, warm=3):
    """Return a graph of run(), after `warm` calls on another stream, as PyTorch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_replays_draw_anew(name, settings):
    """Gradients of replays are about as far from the exact gradient as those of steps, and their mean is closer."""
    exact, x = made(name)
    model = copy.deepcopy(exact)
    exact(x).square().mean().backward()
    true = gradient_of(exact)
    fewbit.compress_(model, verbose=False, **SETTINGS[settings])

    def run():
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    def error():
        return float((gradient_of(model) - true).norm() / true.norm())

    run()
    eager = error()
    graph = captured(run)
    gradients, errors = [], []
    for _ in range(16):
        graph.replay()
        gradients.append(gradient_of(model))
        errors.append(error())
    assert all(0.5 * eager < each < 2 * eager for each in errors)
    assert not any(torch.equal(a, b) for a, b in zip(gradients, gradients[1:], strict=False))
    mean = torch.stack(gradients).mean(0)
    assert (mean - true).norm() < 0.6 * eager * true.norm()


@pytest.mark.parametrize("name", MODELS)
def test_graphed_callables(name):
    """torch.cuda.make_graphed_callables takes a compressed model."""
    exact, x = made(name)
    model = copy.deepcopy(exact)
    exact(x).square().mean().backward()
    true = gradient_of(exact)
    fewbit.compress_(model, bits=8, layers={"activation_bits": 8}, verbose=False)
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    graphed(x).square().mean().backward()
    assert (gradient_of(model) - true).norm() < 0.03 * true.norm()
