"""The function mode of a converted model is on in users' code, and off while fewbit's own layers run."""

import pytest
import torch
from samples import normal
from torch import nn
from torch.nn import functional as TF

import fewbit
from fewbit.convert.functions import FunctionMode


class ActivatedLinear(fewbit.nn.Linear):
    """A user's subclass of a layer, whose forward calls a function that the mode replaces."""

    def forward(self, x):
        return TF.gelu(super().forward(x))


class ActivatedWeight(nn.Module):
    """A parametrization that calls a function that the mode replaces."""

    def forward(self, weight):
        return TF.gelu(weight)


def names_of_functions(model, x):
    """Return the names of the nodes of the autograd graph of model(x)."""
    names, waiting = set(), [model(x).grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            names.add(type(node).__name__)
            waiting += [following for following, _ in node.next_functions]
    return names


def test_functions_in_a_users_subclass_of_a_layer_are_replaced():
    model = nn.Sequential(nn.Linear(8, 8), ActivatedLinear(8, 8))
    fewbit.compress_(model, bits=2, verbose=False)
    names = names_of_functions(model, normal((4, 8)))
    assert "ActivationBackward" in names and "GeluBackward0" not in names


def test_functions_in_a_parametrization_of_a_layer_are_replaced():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fewbit.compress_(model, bits=2, verbose=False)
    nn.utils.parametrize.register_parametrization(model[1], "weight", ActivatedWeight())
    names = names_of_functions(model, normal((4, 8)))
    assert "ActivationBackward" in names and "GeluBackward0" not in names


def test_functions_in_a_gated_unit_with_another_activation_are_replaced():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=8, num_attention_heads=2, intermediate_size=16, hidden_act="quick_gelu"
    )
    model = nn.Sequential(nn.Linear(8, 8), llama.LlamaMLP(config))
    fewbit.compress_(model, bits=2, verbose=False)
    names = names_of_functions(model, normal((2, 4, 8)))
    assert "_MulBackward" in names and "MulBackward0" not in names


def test_a_write_through_data_in_a_gated_unit_stops_sharing(monkeypatch):
    """On a GPU no checksum would detect the write, so the mode has to."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=8, num_attention_heads=2, intermediate_size=16)
    model = nn.Sequential(nn.Linear(8, 8), llama.LlamaMLP(config))
    fewbit.compress_(model, bits=2, verbose=False)
    exposed = []
    cache = model[1].gate_proj.quantizer.context.cache
    monkeypatch.setattr(cache, "stop_sharing", exposed.append)

    def negate(_, inputs):
        inputs[0].data.neg_()

    model[1].up_proj.register_forward_pre_hook(negate)
    model(normal((2, 4, 8)))
    assert len(exposed) == 1


def test_no_function_of_a_layer_passes_through_the_mode(monkeypatch):
    calls = []
    own = FunctionMode.__torch_function__

    def counted(self, function, types, args=(), kwargs=None):
        calls.append(function)
        return own(self, function, types, args, kwargs)

    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    fewbit.compress_(model, bits=2, verbose=False)
    monkeypatch.setattr(FunctionMode, "__torch_function__", counted)
    model(normal((2, 4, 8, 8)))
    assert not calls


class Calls(nn.Module):
    """A model that calls one function."""

    def __init__(self, function):
        super().__init__()
        self.scale, self.function = nn.Parameter(normal((24,), seed=1)), function

    def forward(self, x):
        return self.function(x * self.scale)


INDEX = torch.arange(4 * 16 * 24).view(4, 16, 24) % 16
# Arguments that torch's functions take, and fewbit's do not.
TORCHS_ARGUMENTS = {
    # torch.norm passes out=None on.
    "norm": lambda x: torch.norm(x, dim=1),
    "norm of another kind": lambda x: torch.norm(x, p=1, dim=1),
    "exp": lambda x: torch.exp(-x.abs(), out=None),
    "clamp": lambda x: torch.clamp(x, -1, 1, out=None),
    "maximum": lambda x: torch.maximum(x, x.flip(0), out=None),
    "tanh": lambda x: torch.tanh(x, out=None),
    # NumPy's names of arguments
    "softmax over an axis": lambda x: torch.softmax(x, axis=-1),
    "gather along an axis": lambda x: torch.gather(x, axis=1, index=INDEX),
    "vector norm over an axis": lambda x: torch.linalg.vector_norm(x, axis=1, keepdims=True),
    "vector norm of x": lambda x: torch.linalg.vector_norm(x=x, dim=1),
    "vector norm of the input": lambda x: torch.linalg.vector_norm(input=x, dim=1),
    "maximum with x2": lambda x: torch.maximum(x, x2=x.flip(0)),
}


@pytest.mark.parametrize("name", TORCHS_ARGUMENTS)
def test_arguments_are_those_of_torch(name):
    model = Calls(TORCHS_ARGUMENTS[name])
    x = normal((4, 16, 24))
    exact = model(x)
    (wanted,) = torch.autograd.grad(exact.square().sum(), model.scale)
    fewbit.compress_(model, bits=8, layers={"activation_bits": 8}, verbose=False)
    found = model(x)
    torch.testing.assert_close(found, exact)
    (grad,) = torch.autograd.grad(found.square().sum(), model.scale)
    assert (grad - wanted).norm() < 0.02 * wanted.norm()


NAMED = {
    "square": lambda x, y: torch.square(input=x),
    "pow": lambda x, y: torch.pow(input=x, exponent=2),
    "erf": lambda x, y: torch.erf(input=x),
    "clamp": lambda x, y: torch.clamp(input=x, min=-1, max=1),
    "maximum": lambda x, y: torch.maximum(other=y, input=x),
    "mul": lambda x, y: torch.mul(input=x, other=y),
    "matmul": lambda x, y: torch.matmul(x, other=y),
    "bmm": lambda x, y: torch.bmm(x[None], mat2=y[None]),
    "vector_norm": lambda x, y: torch.linalg.vector_norm(x=x, dim=1),
    "addcmul": lambda x, y: torch.addcmul(input=x, tensor1=x, tensor2=y, value=0.5),
    "baddbmm": lambda x, y: torch.baddbmm(input=x[None], batch1=x[None], batch2=y[None], beta=0.5),
    "gather": lambda x, y: torch.gather(
        input=x, dim=1, index=torch.zeros(64, 64, dtype=torch.int64)
    ),
}
"""Calls of torch's functions with the names of their arguments."""


class Calling(nn.Module):
    """Calls a function of two results that are not in memory otherwise."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x + 1, x - 1)


@pytest.mark.parametrize("name", NAMED)
def test_tensors_that_are_passed_by_name_are_compressed(name):
    model, x = Calling(NAMED[name]), normal((64, 64)).requires_grad_()
    wanted = model(x).detach()
    before = fewbit.saved_bytes(model, x).total
    fewbit.compress_(model, bits=2, verbose=False)
    torch.testing.assert_close(model(x).detach(), wanted)
    assert fewbit.saved_bytes(model, x).total < before / 4


MIXED = {
    "pow of a number": lambda x, y: torch.pow(2.0, exponent=x),
    "addcmul with the number second": lambda x, y: torch.addcmul(x, 0.5, tensor1=x, tensor2=y),
    "baddbmm with the number first": lambda x, y: torch.baddbmm(0.5, x[None], batch1=x[None], batch2=y[None]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:This overload of")
@pytest.mark.parametrize("name", MIXED)
def test_older_overloads_of_torch_get_their_own_arguments(name):
    model, x = Calling(MIXED[name]), normal((64, 64)).requires_grad_()
    wanted = model(x).detach()
    fewbit.compress_(model, bits=2, verbose=False)
    assert torch.equal(model(x).detach(), wanted)
