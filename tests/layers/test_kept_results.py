"""Sigmoid, tanh, softmax and exp whose results are kept anyway, so that their gradients are computed from the exact results."""

import gc
import weakref

import pytest
import torch
from samples import normal
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fewbit

SHAPE = (8, 256)
FUNCTIONS = {
    "Sigmoid": nn.Sigmoid,
    "sigmoid": lambda: torch.sigmoid,
    "method": lambda: lambda x: x.sigmoid(),
    "Tanh": nn.Tanh,
    "tanh": lambda: torch.tanh,
    "Softmax": lambda: nn.Softmax(-1),
    "softmax": lambda: lambda x: F.softmax(x, -1),
    "exp": lambda: lambda x: torch.exp(-x.square()),
}
"""Modules are made anew for each model, because compress_ changes them."""
RETURNS = {
    "result": lambda y: y,
    "view": lambda y: y.view(-1),
    "transposed": lambda y: y.t(),
    "part": lambda y: y[:, :4],
    "containers": lambda y: {"all": (y, [1])},
}
POLICIES = [2, fewbit.AdaptiveBits(2), fewbit.ErrorBound(0.5)]


class Model(nn.Module):
    """A model that returns returns(function(x))."""

    def __init__(self, function, returns):
        super().__init__()
        self.function, self.returns = function, returns

    def forward(self, x):
        return self.returns(self.function(x))


def tensor_of(outputs):
    return outputs["all"][0] if isinstance(outputs, dict) else outputs


def loss_of(y):
    """Return a loss whose gradient is large where y is near 0 or 1."""
    target = torch.linspace(0, 1, y.numel()).view(y.shape)
    return F.binary_cross_entropy(y.abs(), target, reduction="sum")


def sum_of_squares(y):
    return y.square().sum()


def own_loss(y):
    return F.binary_cross_entropy(y, torch.linspace(0, 1, y.numel()).view(y.shape), reduction="sum")


KEEPING = {
    "binary_cross_entropy": own_loss,
    "log": lambda y: y.log().sum(),
    "log2": lambda y: torch.log2(y.view(-1)).sum(),
    "logit": lambda y: torch.logit(y.clamp(1e-6, 1 - 1e-6)).sum() + y.log10().mean(),
    "both sides": lambda y: (0.5 * torch.log(1 - y.view(-1).clamp(max=0.999)) + y.mean()).sum(),
}


def gradient(model, x, loss=loss_of):
    x = x.clone().requires_grad_()
    loss(tensor_of(model(x))).backward()
    return x.grad


def compressed(function, returns=RETURNS["result"], bits=2, **layers):
    model = Model(FUNCTIONS[function](), returns).train()
    fewbit.compress_(model, bits, verbose=False, layers=layers)
    return model


@pytest.mark.parametrize("bits", POLICIES, ids=repr)
@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_returned_result_is_exact(function, returns, bits):
    x = normal(SHAPE, scale=4)
    returns = RETURNS[returns]
    expected = gradient(Model(FUNCTIONS[function](), returns), x)
    model = compressed(function, returns, bits)
    for _ in range(3):
        torch.testing.assert_close(gradient(model, x), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("function", ["Sigmoid", "sigmoid", "method", "Softmax", "softmax"])
@pytest.mark.parametrize("keeps", KEEPING)
def test_a_result_that_a_function_saves_is_exact(function, keeps):
    x, keeps = normal(SHAPE, scale=4), KEEPING[keeps]
    expected = gradient(Model(FUNCTIONS[function](), keeps), x, torch.clone)
    found = gradient(compressed(function, keeps), x, torch.clone)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("function", ["Sigmoid", "sigmoid", "Softmax", "softmax"])
def test_a_result_that_any_operation_saves_in_full_is_exact(function):
    x, keeps = normal(SHAPE, scale=4), lambda y: torch.lgamma(y).sum()
    expected = gradient(Model(FUNCTIONS[function](), keeps), x, torch.clone)
    found = gradient(compressed(function, keeps, everything=True), x, torch.clone)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_result_that_is_not_kept_is_copied(function):
    x, weight = normal(SHAPE), normal((SHAPE[1], 8), seed=1)
    total = lambda y: (y @ weight).sum()  # noqa: E731
    expected = gradient(Model(FUNCTIONS[function](), total), x, torch.clone)
    found = gradient(compressed(function, total), x, torch.clone)
    assert 0 < (found - expected).norm() < expected.norm()


@pytest.mark.parametrize("make", [nn.Sigmoid, nn.Tanh, nn.Softplus, lambda: F.softplus])
@pytest.mark.parametrize("shape", [(3,), (7, 9)])
def test_activations_of_few_elements_are_exact(make, shape):
    x, total = normal(shape, scale=4), lambda y: (3 * y).sum()
    expected = gradient(Model(make(), total), x, torch.clone)
    model = Model(make(), total).train()
    fewbit.compress_(model, 2, verbose=False)
    assert torch.equal(gradient(model, x, torch.clone), expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_result_that_changes_in_place_is_replaced_by_its_copy(function):
    x = normal(SHAPE)

    def loss(y):
        total = sum_of_squares(y.clone())
        with torch.no_grad():
            y.zero_()
        return total

    expected = gradient(Model(FUNCTIONS[function](), torch.clone), x, sum_of_squares)
    found = gradient(compressed(function), x, loss)
    assert 0 < (found - expected).norm() < expected.norm()


def test_a_result_in_a_checkpointed_region_is_copied():
    x = normal(SHAPE)
    expected = gradient(Model(torch.sigmoid, torch.clone), x, sum_of_squares)
    layer = nn.Sigmoid()
    region = Model(lambda x: checkpoint(layer, x, use_reentrant=False), torch.clone)
    region.layer = layer
    fewbit.compress_(region.train(), 2, verbose=False)
    found = gradient(region, x, sum_of_squares)
    assert 0 < (found - expected).norm() < expected.norm()


def test_nothing_outlives_the_graph():
    model, x = compressed("sigmoid"), normal(SHAPE).requires_grad_()
    gc.disable()
    try:
        y = model(x)
        storage = weakref.ref(y.untyped_storage())
        loss = loss_of(y)
        loss.backward()
        node = weakref.ref(y.grad_fn)
        del y, loss
        assert node() is None and storage() is None
    finally:
        gc.enable()


def test_the_error_is_that_of_logits():
    x, target = normal((64, 64)), (normal((64, 256)) > 1).float()
    losses = {
        torch.sigmoid: F.binary_cross_entropy,
        torch.clone: F.binary_cross_entropy_with_logits,
    }
    found = []
    for function, loss in losses.items():
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 256))
        model = Model(layers, lambda x, function=function: function(4 * x)).train()
        fewbit.compress_(model, 2, verbose=False)
        loss(model(x), target, reduction="sum").backward()
        found.append(torch.cat([p.grad.flatten() for p in layers.parameters()]))
    assert (found[0] - found[1]).norm() < 1e-5 * found[1].norm()
