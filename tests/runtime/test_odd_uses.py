"""Inputs and uses that torch's own modules accept, and that converted models must accept too."""

import pytest
import torch
from composed import Composed
from samples import normal
from torch import nn
from torch.nn import functional as torch_f

import fewbit
import fewbit.nn
from fewbit import functional as F

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*nested tensors",
    "ignore:Using padding='same'",
    "ignore::DeprecationWarning:torch.*",
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:.*torch.jit.script:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor:UserWarning",
)


def quiet(model, bits=8, **options):
    fewbit.compress_(model, bits=bits, verbose=False, **options)
    return model


# -- results that are changed in place -------------------------------------------------------------


def test_a_gradient_with_a_graph_may_be_written_to():
    module, x = fewbit.nn.Linear(4, 3), normal((5, 4)).requires_grad_()
    leaves = x, module.weight, module.bias
    for grad in torch.autograd.grad(module(x).square().sum(), leaves, create_graph=True):
        grad.mul_(0.5)
        with pytest.raises(fewbit.GradientError, match="no second derivative"):
            torch.autograd.grad(grad.sum(), x, allow_unused=True, retain_graph=True)


# -- tensors that are not plain --------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.GELU(), nn.Dropout(0.0)]
)
def test_nested_tensors_are_torchs(layer):
    def gradient(model):
        parts = [normal((n, 4), seed=n) for n in (2, 3)]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged).requires_grad_()
        y = model(x)
        y.values().square().sum().backward()
        return x.grad.values()

    expected = gradient(nn.Sequential(layer))
    assert torch.equal(gradient(quiet(nn.Sequential(layer))), expected)


def test_sparse_inputs_are_torchs():
    model = quiet(nn.Sequential(nn.Linear(4, 3)))
    model(torch.eye(4).to_sparse()).sum().backward()


def test_lazy_modules_are_made_by_the_first_forward():
    model = quiet(nn.Sequential(nn.LazyLinear(8), nn.GELU(), nn.Linear(8, 2)))
    model(normal((2, 4))).sum().backward()
    assert model[0].weight.grad.shape == (8, 4)
    quiet(model)
    assert isinstance(model[0], fewbit.nn.Linear)
    model(normal((2, 4))).sum().backward()


@pytest.mark.parametrize("access", [
    lambda x: x.data, lambda x: x.numpy(), lambda x: x.__array__(), lambda x: x.__dlpack__(),
], ids=["data", "numpy", "array", "dlpack"])  # fmt: skip
def test_what_torch_says_of_access_to_memory_comes_through(access):
    def message(model, x):
        with pytest.raises(Exception) as error:  # noqa: PT011 (whatever torch raises)
            model(x)
        return type(error.value), str(error.value)

    model = Composed(lambda model, x: (access(x), model.linear(x)), linear=nn.Linear(6, 6))
    x = normal((3, 6))
    expected = message(torch.func.vmap(model), x)
    quiet(model)
    assert message(torch.func.vmap(model), x) == expected
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Conv1d(4, 4, 1), nn.Dropout()]
)
def test_fx_records_layers_whose_input_is_a_keyword(layer):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = layer

        def forward(self, x):
            return self.a(input=x)

    model = Named()
    expected = torch.fx.symbolic_trace(model).code
    quiet(model)
    traced = torch.fx.symbolic_trace(model)
    assert traced.code == expected and traced.a is model.a
    traced(normal((3, 4, 4)).requires_grad_()).sum().backward()


def calling(function):
    """Return a model that calls one function on the result of a linear layer."""
    return Composed(lambda model, x: function(model.linear(x)), linear=nn.Linear(6, 6))


@pytest.mark.parametrize("function", [
    lambda x: torch.dropout(x, 0.5, train=True),
    lambda x: torch.dropout(x, p=0.5, train=False),
    lambda x: torch_f.celu(x, -1.0),
    lambda x: torch_f.softplus(x, -1.0),
    lambda x: torch_f.rrelu(x, training=True),
    lambda x: torch_f.relu(input=x),
], ids=["dropout", "no dropout", "celu", "softplus", "rrelu", "keyword"])  # fmt: skip
def test_functions_as_torch_lets_them_be_called(function):
    x, results = normal((4, 6), scale=1.0), []
    for convert in (lambda model: model, quiet):
        torch.manual_seed(0)
        model = convert(calling(function))
        y = model(x)
        y.sum().backward()
        results.append((y, model.linear.weight.grad))
    (expected, exact), (y, grad) = results
    assert torch.equal(y, expected)
    torch.testing.assert_close(grad, exact, rtol=0, atol=0.05 * exact.abs().max().item())


# -- modes -----------------------------------------------------------------------------------------


def test_a_frozen_norm_in_evaluation_mode_can_be_differentiated_twice():
    def penalty(model):
        model.eval().requires_grad_(False)
        x = normal((2, 3, 5, 5), scale=1.0).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 2, 3))

    torch.testing.assert_close(penalty(quiet(build())), penalty(build()))


class Recursive(nn.Module):
    """A module that calls itself once, between two parts that draw random numbers."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x, again=True):
        x = self.drop(torch_f.gelu(self.linear(x)))
        if again:
            x = self(x, again=False)
        self.last = torch_f.gelu(x)
        return self.drop(self.last)


def test_a_model_that_calls_itself():
    x, results = normal((4, 6), scale=1.0), []
    for convert in (lambda model: model, quiet):
        torch.manual_seed(0)
        model = convert(Recursive())
        torch.manual_seed(1)
        results.append(model(x))
        name = model.last.grad_fn.name()
    torch.testing.assert_close(*results)
    assert name.endswith("ActivationBackward")  # after the inner call too
    assert not torch.overrides._get_current_function_mode_stack()


def test_models_that_call_each_other():
    """Neither call is treated as an interrupted one."""
    inner = quiet(nn.Sequential(nn.Linear(6, 6)))
    outer = quiet(calling(lambda x: torch_f.gelu(inner(x))))
    assert outer(normal((4, 6))).grad_fn.name().endswith("ActivationBackward")
    assert not torch.overrides._get_current_function_mode_stack()


def test_rounding_changes_from_step_to_step_whatever_the_default_device():
    model = quiet(nn.Sequential(nn.Linear(64, 4)), bits=2)
    x, grads = normal((3, 64), scale=1.0), []
    torch.manual_seed(0)
    torch.set_default_device("meta")
    try:
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
            grads.append(model[0].weight.grad)
    finally:
        torch.set_default_device(None)
    assert not torch.equal(*grads)


# -- gradients as torch passes them ----------------------------------------------------------------


def test_rrelu_of_a_leaf_in_place_changes_nothing():
    x = normal((4, 6)).requires_grad_()
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        F.rrelu(x, training=True, inplace=True)
    assert torch.equal(x.detach(), before)


def test_a_sparse_embedding_with_a_graph_of_its_gradient():
    module = fewbit.nn.Embedding(9, 4, sparse=True)
    (grad,) = torch.autograd.grad(module(torch.arange(3)).sum(), module.weight, create_graph=True)
    assert grad.is_sparse and grad.to_dense().sum() == 12


# -- compiled parts --------------------------------------------------------------------------------


def mixed():
    """Return a model of functions that the table has, and of other functions."""

    def forward(model, x):
        t = model.a(x)
        t = torch_f.relu(t) + torch.tanh(t) * 2 - t * t.cos() + t.roll(1) * t.sin()
        return model.a(t) * 0.1 + model.b(x)

    return Composed(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16))


@pytest.mark.inductor
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "order", ["parts, then converted", "converted, then parts", "whole, then converted"]
)
def test_what_is_compiled_in_a_converted_model(order, backend, full):
    """torch.compile must not use the code of one function for another."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(mixed(), nn.ReLU(), mixed()), normal((8, 16), scale=1.0)
    expected = model(x)
    expected.square().sum().backward()
    exact = model[0].a.weight.grad.clone()
    model.zero_grad()

    def compile_parts():
        for part in (model[0], model[2]):
            part.compile(backend=backend, fullgraph=full)

    outer = model
    if order == "whole, then converted":
        outer = torch.compile(model, backend=backend, fullgraph=full)
    if order == "parts, then converted":
        compile_parts()
    quiet(outer, layers=fewbit.LayerSettings(activation_bits=8))
    if order == "converted, then parts":
        compile_parts()
    y = outer(x)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    assert (model[0].a.weight.grad - exact).norm() < 0.03 * exact.norm()
    assert not torch.overrides._get_current_function_mode_stack()


# -- settings of parts -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_a_scripted_part_is_left_alone():
    model = nn.Sequential(nn.Linear(6, 6), torch.jit.script(nn.Linear(6, 6)), nn.GELU())
    y = model(normal((3, 6)))
    quiet(model)
    torch.testing.assert_close(model(normal((3, 6))), y)
    assert isinstance(model[0], fewbit.nn.Linear) and isinstance(model[2], fewbit.GELU)


def test_samples_of_keyword_inputs():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 8)

        def forward(self, *, x):
            return self.linear(x)

    model, sample = Named(), {"x": normal((8, 64)).requires_grad_()}
    first, second = (
        fewbit.compress_(model, bits, sample=sample, verbose=False).report.saved for bits in (4, 2)
    )
    # What the exact model keeps, not what the first conversion did.
    assert first[0] == second[0] and sum(second[1].values()) < sum(first[1].values())
