"""Gradients that are documented as exact, at kinks and beside them, for ordinary and degenerate parameters."""

from __future__ import annotations

import math

import pytest
import torch
from samples import DTYPES, name_of
from torch import nn

import fewbit
import fewbit.functional as F

torch_f = torch.nn.functional

PARAMETERS = {
    "hardshrink": [(0.0,), (-0.0,), (1e-50,), (1e-40,), (0.5,), (1.0,)],
    "softshrink": [(0.0,), (-0.0,), (1e-50,), (1e-40,), (0.5,), (1.0,)],
    "hardtanh": [(0.0, 1.0), (-1.0, 0.0), (1.0, 2.0), (0.0, 1e-40), (-2.0, 0.5)],
    "threshold": [(0.0, 0.0), (0.0, 5.0), (1.0, 1.0), (-1.0, 3.0), (1e-40, 0.0)],
    "leaky_relu": [(0.0,), (1.0,), (-1.0,), (2.0,), (1e-40,)],
    "rrelu": [(0.1, 0.1), (1.0, 1.0), (0.0, 0.0), (-1.0, 1.0)],
    "relu": [()],
    "relu6": [()],
}
CASES = [(name, given) for name, several in PARAMETERS.items() for given in several]


def points(parameters, dtype):
    """Return kinks, zeros and ones with their neighboring floats, more than one block of them."""
    numbers = [0.0, -0.0, 1.0, -1.0, 6.0, *parameters, *(-number for number in parameters)]
    x = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    end = torch.tensor(math.inf, dtype=dtype)
    return torch.cat([x, x.nextafter(end), x.nextafter(-end)]).repeat(9)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name, parameters", CASES)
def test_gradients_are_torchs(name, parameters, dtype, backend):
    x = points(parameters, dtype).to(backend.device).requires_grad_()
    ours, theirs = getattr(F, name)(x, *parameters), getattr(torch_f, name)(x, *parameters)
    assert torch.equal(ours, theirs)
    (gradient,) = torch.autograd.grad(ours.sum(), x)
    (expected,) = torch.autograd.grad(theirs.sum(), x)
    assert torch.equal(gradient, expected), x[gradient != expected]


@pytest.mark.parametrize("kind", [nn.Hardshrink, nn.Softshrink])
def test_shrinks_of_nothing_in_a_compressed_model(kind):
    model = nn.Sequential(kind(0.0))
    fewbit.compress_(model, bits=2)
    x = torch.tensor([0.0, -0.0, 1.0, -1e-45]).requires_grad_()
    model(x).sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert type(model[0]) is getattr(fewbit, kind.__name__)
