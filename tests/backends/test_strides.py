"""Strides of results are torch's, for every function and every layout of the input, sizes of 0 and 1 included."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from samples import LAYOUTS, laid_out, normal

import fewbit.functional as F

torch_f = torch.nn.functional

ACTIVATIONS = (
    "relu relu6 leaky_relu threshold hardtanh hardsigmoid hardshrink softshrink rrelu gelu elu celu selu silu mish "
    "hardswish sigmoid logsigmoid tanh tanhshrink softsign softplus"
).split()
ARGUMENTS = {"threshold": (0.1, -2.0)}


def test_every_activation_is_here():
    named = {
        name
        for name, function in inspect.getmembers(F, inspect.isfunction)
        if hasattr(torch_f, name)
    }
    takes_table = {
        name for name in named if "table" in inspect.signature(getattr(F, name)).parameters
    }
    assert takes_table == set(ACTIVATIONS)


def strides(functions, call, x):
    """Return the strides of the result and of the input's gradient, or the type of the error that the call raises."""
    x = x.detach().requires_grad_()
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            y = call(functions, x)
            (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
        except (RuntimeError, ValueError, IndexError) as refusal:
            return type(refusal), None
    return y.stride(), gradient.stride()


SIZES_OF_1 = {
    "matrix of one column": normal((2, 1, 4)).mT,
    "image of one column": normal((2, 3, 4, 1)).contiguous(memory_format=torch.channels_last),
    "permuted volume of one layer": normal((2, 2, 1, 3, 2)).permute(0, 4, 1, 2, 3),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    def call(functions, x):
        return getattr(functions, name)(x, *ARGUMENTS.get(name, ()))

    for layout, x in ({layout: laid_out(layout) for layout in LAYOUTS} | SIZES_OF_1).items():
        ours, theirs = strides(F, call, x), strides(torch_f, call, x)
        if layout == "stepped and transposed":  # the gradient has the order of the result
            ours, theirs = ours[0], theirs[0]
        assert ours == theirs, (layout, x.stride())


def plain(name, *arguments, **options):
    return lambda functions, x: getattr(functions, name)(x, *arguments, **options)


CALLS = {  # {name: (numbers of dimensions, or None for any but 0, call)}
    "rms_norm": (None, lambda m, x: m.rms_norm(x, x.shape[-1:])),
    "prelu": (None, lambda m, x: m.prelu(x, normal((1,)).requires_grad_())),
    "prelu of channels": (
        (2, 3, 4, 5),
        lambda m, x: m.prelu(x, normal((x.shape[1],)).requires_grad_()),
    ),
    "rrelu in training": (None, plain("rrelu", training=True)),
    "dropout": (None, plain("dropout", 0.5, True)),
    "alpha_dropout": (None, plain("alpha_dropout", 0.5, True)),
    "feature_alpha_dropout": (None, plain("feature_alpha_dropout", 0.5, True)),
    "dropout1d": ((3,), plain("dropout1d", 0.5, True)),
    "dropout2d": ((4,), plain("dropout2d", 0.5, True)),
    "dropout3d": ((5,), plain("dropout3d", 0.5, True)),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_functions(name):
    """These functions are not torch's own; test_layer_properties.py compares the strides of all functions."""
    dims, call = CALLS[name]
    for layout in LAYOUTS:
        x = laid_out(layout)
        if x.dim() and (dims is None or x.dim() in dims):
            ours, theirs = strides(F, call, x), strides(torch_f, call, x)
            assert ours[0] == theirs[0], (layout, x.stride())


def test_a_view_of_what_logsigmoid_returns():
    x = torch.randn(3, 4).t().requires_grad_()
    assert F.logsigmoid(x).view(-1).shape == (12,)
