"""Gradients of compiled models, for tests of `fewbit.compile`."""

import pytest
import torch

import fewbit

MARKS = [
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
"""The marks of all tests of the compiler mode."""
EXACT = {"": None}
"""Overrides that leave all tensors exact."""


def gradient(model, compiled, x, seed=3):
    """Return the gradient of all parameters after one step, as a float64 vector."""
    model.zero_grad()
    torch.manual_seed(seed)
    compiled(x).backward()
    gradients = [
        parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None
    ]
    return torch.cat(gradients).double()


def exact_gradient(model, x, **settings):
    compiled = fewbit.compile(model, overrides=EXACT, **settings)
    found = gradient(model, compiled, x)
    torch._dynamo.reset()
    return found


def error(found, exact):
    return float((found - exact).norm() / exact.norm())
