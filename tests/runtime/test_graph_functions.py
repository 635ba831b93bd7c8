"""Compression of what a user's autograd Functions save (`autograd_functions`)."""

import copy
import json

import pytest
import torch
from composed import Composed
from test_graph_compressor import Block, flat, gradients, inputs, saved
from torch import nn
from torch.autograd import Function

import fewbit
from fewbit.errors import InputError


class Product(Function):
    """The function a * b + 1/c, whose gradients are linear in a and b, but not in c."""

    @staticmethod
    def forward(ctx, a, b, c):
        # `a + 0` is made in the forward and needs no gradient.
        ctx.save_for_backward(a + 0, b, None, c)
        return a * b + 1 / c

    @staticmethod
    def backward(ctx, grad):
        a, b, _, c = ctx.saved_tensors
        return grad * b, grad * a, -grad / c**2


class Result(Function):
    """The exponential, which saves its own result."""

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


def product(x, y):
    return Product.apply(x, y, 3 + (x - y).abs())


def compressed(model, functions, bits=8, **layers):
    model = copy.deepcopy(model)
    layers |= {"everything": True, "functional": False, "autograd_functions": functions}
    fewbit.compress_(model, bits=bits, layers=layers, verbose=False)
    return model


@pytest.mark.parametrize(
    ("function", "name", "positions", "packed"),
    [(product, Product, [0, 1], 2), (product, Product, [1], 1), (lambda x, y: Result.apply(x), Result, [0], 1)],
)  # fmt: skip
def test_named_tensors_are_quantized(function, name, positions, packed):
    model = Block(function)
    exact = gradients(model, inputs())
    found = gradients(compressed(model, {name: positions}), inputs())
    assert 0 < (flat(found) - flat(exact)).norm() / flat(exact).norm() < 0.02
    after = saved(compressed(model, {name: positions}, 2), inputs())
    before = saved(compressed(model, None, 2), inputs())
    assert after["packed"] - before.get("packed", 0) == packed * 3072 * 2 // 8
    assert before["activation"] - after.get("activation", 0) == packed * 3072 * 4


def test_parameters_and_inputs_stay():
    """They are in memory anyway."""

    def forward(model, x):
        w = model.w.t()
        return (Product.apply(x, w, ones) + Product.apply(w, x, ones)).sum()

    ones, x = torch.ones(64, 24), torch.randn(64, 24)
    model = Composed(forward, w=nn.Parameter(torch.randn(24, 64)))
    few = compressed(model, {Product: [1]}, 1)
    assert all(map(torch.equal, gradients(few, x), gradients(model, x)))


def test_overrides_give_functions_to_some_modules():
    model = nn.Sequential(Block(product), Block(product))
    few = copy.deepcopy(model)
    change = {"everything": True, "functional": False, "autograd_functions": {Product: [0, 1]}}
    fewbit.compress_(few, layers={"functional": False}, overrides={"1": change}, verbose=False)
    paths = {e.module for e in fewbit.saved_bytes(few, inputs()).entries if e.kind == "packed"}
    assert paths == {"1"}


def test_settings_are_plain_json():
    settings = fewbit.LayerSettings(everything=True, autograd_functions={Product: (0, 1)})
    assert settings.autograd_functions == {f"{__name__}.Product": [0, 1]}
    text = json.dumps(settings.to_dict())
    assert fewbit.LayerSettings.from_dict(json.loads(text)) == settings
    assert eval(repr(settings)) == settings


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"nowhere.Product": [0]}, "does not exist or is not imported"),
        ({nn.Linear: [0]}, "expected the name of a torch.autograd.Function"),
        ({Product: []}, "lists of positions"),
        ({Product: [-1]}, "lists of positions"),
        ({Product: 0}, "lists of positions"),
        ([Product], "expected a mapping"),
        ({"fewbit.functional.products._Mul": [0]}, "expected Functions that fewbit does not define"),
    ],
)  # fmt: skip
def test_refuses(functions, message):
    with pytest.raises(InputError, match=message):
        compressed(Block(product), functions)


def test_refuses_functions_without_everything():
    layers = {"autograd_functions": {Product: [0]}}
    with pytest.raises(InputError, match="expected everything=True with autograd_functions"):
        fewbit.compress_(Block(product), layers=layers, verbose=False)


def test_refuses_a_position_without_tensor():
    model = compressed(Block(product), {Product: [1, 4]})
    with pytest.raises(InputError, match="expected positions below 4 for .*Product, which saves 4"):
        model(inputs())


@pytest.mark.slow
@pytest.mark.parametrize("length, most", [(128, 1.0), (256, 0.2), (1000, 0.3)])
def test_a_small_factor_of_a_channel_beside_large_ones(length, most):
    """Snake: groups that crossed from channel to channel made the gradients of small factors 15 to 130 times too large."""

    def forward(model, x):
        x, a = model.conv(x), model.a
        return (x + torch.sin(a * x) ** 2 / a).square().mean()

    torch.manual_seed(0)
    small = torch.arange(32) % 8 == 0
    a = nn.Parameter(torch.where(small, 0.01, 1.0)[:, None])
    model, x = Composed(forward, conv=nn.Conv1d(8, 32, 3), a=a), torch.randn(8, 8, length + 2)
    model(x).backward()
    exact, squares, draws = a.grad[small].clone(), 0, 4
    fewbit.compress_(model, 4, layers={"everything": True}, verbose=False)
    for _ in range(draws):
        model.zero_grad()
        model(x).backward()
        squares += (a.grad[small] - exact).square().mean() / draws
    assert squares.sqrt() < most * exact.square().mean().sqrt()
