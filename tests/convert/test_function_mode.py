"""The function mode of a converted model is on in users' code, and off while fewbit's own layers run."""

import pytest
from composed import names_of_nodes
from samples import normal
from torch import nn
from torch.nn import functional as TF

import fewbit
from fewbit.runtime.saved.sharing import SharedCopies


class ActivatedLinear(fewbit.nn.Linear):
    """A user's subclass of a layer, whose forward calls a function that the mode replaces."""

    def forward(self, x):
        return TF.gelu(super().forward(x))


class ActivatedWeight(nn.Module):
    """A parametrization that calls a function that the mode replaces."""

    def forward(self, weight):
        return TF.gelu(weight)


def gated_unit(activation="silu"):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    return llama.LlamaMLP(llama.LlamaConfig(**sizes, hidden_act=activation))


def parametrized_layer():
    layer = nn.Linear(8, 8)
    nn.utils.parametrize.register_parametrization(layer, "weight", ActivatedWeight())
    return layer


@pytest.mark.parametrize(
    "make, ours, theirs",
    [
        (lambda: ActivatedLinear(8, 8), "CopiedActivationBackward", "GeluBackward0"),
        (parametrized_layer, "ActivationBackward", "GeluBackward0"),
        (lambda: gated_unit("quick_gelu"), "_MulBackward", "MulBackward0"),
    ],
    ids=["a user's subclass", "a parametrization", "another activation in a gated unit"],
)
def test_functions_in_a_layer_are_replaced_if_they_are_the_users(make, ours, theirs):
    model = nn.Sequential(nn.Linear(8, 8), make())
    fewbit.compress_(model, bits=2, verbose=False)
    names = names_of_nodes(model(normal((2, 4, 8))))
    assert ours in names and theirs not in names


class Activated(nn.Module):
    def forward(self, x):
        return TF.gelu(x * 2)


def test_functions_of_a_module_in_evaluation_mode_stay_torchs():
    """Like its layers, the functions of a part that a user has frozen save what torch saves."""
    model = nn.Sequential(nn.Linear(8, 8), Activated())
    fewbit.compress_(model, bits=2, verbose=False)
    for training in (True, False):
        model[1].train(training)
        names = names_of_nodes(model(normal((2, 4, 64))[..., :8]))
        assert ("GeluBackward0" in names) is not training


def test_a_write_through_data_in_a_gated_unit_stops_sharing(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), gated_unit())
    fewbit.compress_(model, bits=2, verbose=False)
    exposed = []

    def negate(_, inputs):
        inputs[0].data.neg_()

    monkeypatch.setattr(SharedCopies, "stop_sharing", lambda copies, x: exposed.append(x))
    model[1].up_proj.register_forward_pre_hook(negate)
    model(normal((2, 4, 8)))
    assert len(exposed) == 1
