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
    "half": lambda y: y[:, 1::2],
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
    "kl_div": lambda y: F.kl_div(torch.zeros(y.shape), y, reduction="sum"),
    "gaussian_nll_loss": lambda y: F.gaussian_nll_loss(
        torch.ones(y.shape), torch.zeros(y.shape), y
    ),
    "keyword": lambda y: torch.log(input=y).sum(),
    "in place": lambda y: (y + 1e-6).log_().sum(),
    "xlogy": lambda y: torch.xlogy(y.detach(), y).sum(),
    "quotient": lambda y: (1 / (y + 1e-3)).sum(),
    "normalized": lambda y: (y / y.sum(-1, keepdim=True)).clamp(min=1e-6).log().sum(),
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


NOT_KEPT = {
    "detached": lambda y, weight: ((y @ weight).sum(), y.detach()),
    "part": lambda y, weight: ((y @ weight).sum(), y[:, :4]),
    "other dtype": lambda y, weight: ((y @ weight).sum(), y.detach().view(torch.int32)),
    "without gradients": lambda y, weight: (y @ weight).sum() + y.detach().log().mean(),
    "mean": lambda y, weight: (y @ weight).sum() + 1e-9 * y.mean(0).log().sum(),
    "changed": lambda y, weight: ((y.clone() @ weight).sum(), y.mul_(2)),
    "exposed": lambda y, weight: (y @ weight).sum() + 0 * y.data.sum() + 1e-9 * y.log().sum(),
    "lazy": lambda y, weight: ((y @ weight).sum(), nn.parameter.UninitializedParameter()),
    "nothing": lambda y, weight: ((y @ weight).sum(), None),
}


@pytest.mark.parametrize("returns", NOT_KEPT)
def test_results_that_are_not_kept(returns):
    x, weight = normal(SHAPE), normal((SHAPE[1], 8), seed=1)
    first = lambda outputs: outputs[0] if isinstance(outputs, tuple) else outputs  # noqa: E731
    ends = lambda y: NOT_KEPT[returns](y, weight)  # noqa: E731
    expected = gradient(Model(torch.sigmoid, lambda y: (y @ weight).sum()), x, torch.clone)
    model, x = compressed("sigmoid", ends), x.requires_grad_()
    first(model(x)).backward()
    assert 0 < (x.grad - expected).norm() < expected.norm()


@pytest.mark.parametrize("function", ["sigmoid", "softmax", "exp"])
@pytest.mark.parametrize("bits", [2, fewbit.ErrorBound(0.5)], ids=repr)
def test_a_second_derivative_is_refused(function, bits):
    model, x = compressed(function, bits=bits), normal(SHAPE).requires_grad_()
    (grad,) = torch.autograd.grad(sum_of_squares(model(x)), x, create_graph=True)
    with pytest.raises(fewbit.GradientError):
        grad.square().sum().backward()


@pytest.mark.parametrize("function", ["sigmoid", "softmax", "exp"])
def test_a_second_backward_pass_needs_the_graph(function):
    model, x = compressed(function), normal(SHAPE).requires_grad_()
    loss = sum_of_squares(model(x))
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("function", ["sigmoid", "softmax", "exp"])
def test_hooks_for_saved_tensors_get_the_result(function):
    model, x, seen = compressed(function), normal(SHAPE, scale=4).requires_grad_(), []
    unpack = lambda packed: seen.append("unpacked") or packed.clone()  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda y: seen.append(y.shape) or y, unpack):
        y = model(x)
    assert torch.Size(SHAPE) in seen
    loss_of(y).backward()
    assert "unpacked" in seen
    expected = gradient(Model(FUNCTIONS[function](), torch.clone), x.detach())
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("function", ["sigmoid", "softmax"])
def test_saved_bytes_count_a_kept_result(function):
    x = normal(SHAPE).requires_grad_()
    returned = fewbit.saved_bytes(compressed(function), x).total
    copied = fewbit.saved_bytes(compressed(function, lambda y: y.sum()), x).total
    assert returned == copied + 4 * x.numel()


def test_a_result_is_freed_by_the_last_backward_pass():
    model, x = compressed("softmax", lambda y: y.log().mean()), normal(SHAPE).requires_grad_()
    loss = model(x)
    loss.backward(retain_graph=True)
    node = loss.grad_fn
    while not hasattr(node, "kept"):
        ((node, _),) = node.next_functions
    assert hasattr(node, "result")
    loss.backward()
    assert not hasattr(node, "result")


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
