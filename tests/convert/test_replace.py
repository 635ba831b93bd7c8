"""replace_activations_: the modules that change, their new classes, and everything that stays."""

import copy
from functools import partial

import pytest
import torch
from composed import Composed
from layers import gradients, relative
from samples import normal
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2CLS

import fewbit
from fewbit import replace_activations_
from fewbit.convert import kinds
from fewbit.runtime.interop.module_calls import TrackedModule

TORCH = [
    nn.ReLU(True), nn.ReLU6(), nn.LeakyReLU(0.2), nn.RReLU(0.1, 0.2), nn.Threshold(0.5, 0.25), nn.Hardtanh(-2.0, 3.0),
    nn.Hardsigmoid(), nn.Hardshrink(0.75), nn.Softshrink(0.25), nn.ELU(2.0), nn.CELU(1.5), nn.SELU(), nn.GELU("tanh"),
    nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.Sigmoid(), nn.LogSigmoid(), nn.Tanh(), nn.Tanhshrink(), nn.Softsign(),
    nn.Softplus(2.0, 5.0),
]  # fmt: skip
OF_TRANSFORMERS = {
    name: made[0](**made[1]) if isinstance(made, tuple) else made()
    for name, made in sorted(ACT2CLS.items())
    if name not in ("linear", "prelu", "xielu")
}
quiet = partial(replace_activations_, verbose=False)


def converted(module):
    """Convert a copy of a module, check its values and gradients, and return it and its row in the report."""
    module, before = copy.deepcopy(module), copy.deepcopy(module)
    (row,) = quiet(module, 8).converted
    x = normal((500,), torch.float64, scale=2.0)
    (y, (grad,)), (expected, (exact,)) = (
        gradients(Composed(lambda model, x: model.part(x * 1.0), part=part.eval()), x)
        for part in (module, before)
    )
    torch.testing.assert_close(y, expected)
    assert relative(grad, exact) < 0.05
    return module, row


@pytest.mark.parametrize("before", TORCH, ids=lambda module: type(module).__name__)
def test_torch_modules(before):
    module, row = converted(before)
    assert row.before == type(before).__name__ and row.after == f"fewbit.{row.before}"
    assert type(module) is getattr(fewbit, row.before) and isinstance(module, type(before))
    assert row.bits == module.bits == (1 if kinds.ACTIVATIONS[type(before)].one_bit else 8)


def test_every_torch_kind_is_tested():
    assert {type(module) for module in TORCH} == set(kinds.ACTIVATIONS)


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_transformers_modules(name):
    module, _ = converted(OF_TRANSFORMERS[name])
    assert type(module).__module__ == "fewbit.nn.activations"


def test_beside_compress_():
    """Only activations change: layers that compress_ converted stay as they are."""
    model = nn.Sequential(nn.Linear(96, 96), nn.GELU())
    fewbit.compress_(model, bits=2, verbose=False)
    context = model[0].quantizer.context
    assert [row.path for row in quiet(model, 4).converted] == ["1"]
    assert model[0].quantizer.bits == 2 and model[0].quantizer.context is context
    assert isinstance(model, TrackedModule) and model[1].bits == 4
    assert [(row.path, row.bits) for row in quiet(model, 2).converted] == [("1", 2)]
    assert model[1].bits == 2


@pytest.mark.parametrize(
    "function, name", [("gelu", "GELU"), (F.relu, "ReLU"), (torch.relu, "ReLU")]
)
def test_functions_held_by_transformer_layers(function, name):
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation=function, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, keys = torch.randn(2, 3, 8), list(model.state_dict())
    before = model(x)
    report = quiet(model)
    assert [row.path for row in report.converted] == ["layers.0.activation", "layers.1.activation"]
    assert type(model.layers[0].activation) is getattr(fewbit, name)
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(model(x), before)


def test_every_path_of_a_shared_module_counts():
    shared = nn.GELU()
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    assert quiet(model, exclude="b.*").converted == ()
    assert [row.path for row in quiet(model, include="b.*").converted] == ["a.0"]


def test_what_is_left_alone_is_said(capsys):
    class Own(nn.GELU):
        """A subclass, which may compute anything."""

    model = nn.Sequential(nn.Linear(3, 3), Own(), nn.Identity())
    report = replace_activations_(model)
    assert "left alone: 1 (Own)" in capsys.readouterr().out
    assert not report.converted
    assert [row.kind for row in report.left_alone] == ["Own"]
    assert type(model[1]) is Own
    assert "no module converted" in str(report)
    assert "left alone: 1 (Own): a subclass of GELU, which may compute something else" in str(
        report
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"bits": 9}, "^bits: expected a whole number from 1 to 8, got 9"),
        ({"bits": True}, "^bits: expected a whole number from 1 to 8, got True"),
        ({"include": "decoder"}, "^include: expected a glob that matches a module, got 'decoder'"),
    ],
)
def test_refused_with_nothing_changed(arguments, message):
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    with pytest.raises(fewbit.FewbitError, match=message):
        quiet(model, **arguments)
    assert type(model[1]) is nn.GELU


def test_a_model_without_known_activations_is_told_what_to_do():
    text = " ".join(str(replace_activations_(nn.Linear(3, 3), verbose=False)).split())
    assert "no module converted" in text and "fewbit.Pointwise applies one of your own" in text
