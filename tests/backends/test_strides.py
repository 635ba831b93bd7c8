"""Strides of results are torch's, for every function and every layout of the input, sizes of 0 and 1 included."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch

import fewbit.functional as F

torch_f = torch.nn.functional

SHAPES = [
    *((), (0,), (5,), (1, 5), (5, 1), (4, 6), (0, 3), (2, 3, 4)),
    *((2, 1, 4), (2, 3, 1), (2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (2, 3, 0, 5)),
    *((1, 3, 2, 2, 2), (2, 1, 2, 2, 2)),
]
halves = pytest.mark.parametrize("shapes", [SHAPES[::2], SHAPES[1::2]], ids=["even", "odd"])


def make(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def permuted(shape, order):
    """A tensor of that shape whose dimensions lie in memory in that order."""
    return make([shape[dim] for dim in order]).permute(
        [order.index(dim) for dim in range(len(order))]
    )


def layouts(shape):
    """(name, tensor) of that shape in every layout that its number of dimensions allows."""
    dims = list(range(len(shape)))
    yield "contiguous", make(shape)
    if shape:
        yield "expanded whole", make(()).expand(shape)
        yield "every other", make((*shape[:-1], 2 * shape[-1]))[..., ::2]
        yield "every other sample", make((2 * shape[0], *shape[1:]))[::2]
        yield "narrow", make((*shape[:-1], shape[-1] + 3))[..., 1 : shape[-1] + 1]
    if len(shape) >= 2:
        yield "transposed", permuted(shape, [1, 0, *dims[2:]])
        yield "last transposed", permuted(shape, [*dims[:-2], dims[-1], dims[-2]])
        yield "reversed", permuted(shape, dims[::-1])
        yield "channels inmost", permuted(shape, [0, *dims[2:], 1])
        yield "expanded first", make((1, *shape[1:])).expand(shape)
        yield "expanded last", make((*shape[:-1], 1)).expand(shape)
    if len(shape) in (4, 5):
        last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        yield "channels last", make(shape).contiguous(memory_format=last)


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


@pytest.mark.fast(10)
@halves
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, shapes):
    def call(functions, x):
        return getattr(functions, name)(x, *ARGUMENTS.get(name, ()))

    for shape in shapes:
        for layout, x in layouts(shape):
            assert strides(F, call, x) == strides(torch_f, call, x), (shape, layout, x.stride())


def plain(name, *arguments, **options):
    return lambda functions, x: getattr(functions, name)(x, *arguments, **options)


CALLS = {  # {name: (numbers of dimensions, or None for any but 0, call)}
    "rms_norm": (None, lambda m, x: m.rms_norm(x, x.shape[-1:])),
    "prelu": (None, lambda m, x: m.prelu(x, make((1,)).requires_grad_())),
    "prelu of channels": (
        (2, 3, 4, 5),
        lambda m, x: m.prelu(x, make((x.shape[1],)).requires_grad_()),
    ),
    "rrelu in training": (None, plain("rrelu", training=True)),
    "dropout": (None, plain("dropout", 0.5, True)),
    "alpha_dropout": (None, plain("alpha_dropout", 0.5, True)),
    "feature_alpha_dropout": (None, plain("feature_alpha_dropout", 0.5, True)),
    "dropout1d": ((3,), plain("dropout1d", 0.5, True)),
    "dropout2d": ((4,), plain("dropout2d", 0.5, True)),
    "dropout3d": ((5,), plain("dropout3d", 0.5, True)),
}


@pytest.mark.fast(10)
@halves
@pytest.mark.parametrize("name", CALLS)
def test_other_functions(name, shapes):
    """These functions are not torch's own; test_layer_properties.py compares the strides of all functions."""
    dims, call = CALLS[name]
    for shape in shapes:
        if shape and (dims is None or len(shape) in dims):
            for layout, x in layouts(shape):
                ours, theirs = strides(F, call, x), strides(torch_f, call, x)
                assert ours[0] == theirs[0], (shape, layout, x.stride())


def test_a_view_of_what_logsigmoid_returns():
    x = torch.randn(3, 4).t().requires_grad_()
    assert F.logsigmoid(x).view(-1).shape == (12,)
