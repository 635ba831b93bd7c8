"""compress_ and restore_: what they change in a model, what they preserve, and that the model trains."""

import copy
import dataclasses
import functools

import pytest
import torch
from composed import COPIES, Composed
from layers import relative, saved_by
from samples import normal
from torch import nn
from torch.nn import functional as TF
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import prune
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.convert import kinds
from fewbit.convert.kinds import OWN_FORWARD
from fewbit.demo.small_transformer import CharTransformer
from fewbit.errors import InputError
from fewbit.models.resnet import ResNet
from fewbit.render.terminal import plain
from fewbit.runtime.interop.module_calls import TrackedModule


def transformer():
    torch.manual_seed(0)
    return CharTransformer(30, 16, width=32, depth=2, heads=2)


class ConvNet(nn.Module):
    """A small network with tied, shared, in-place and functional parts."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.mix = nn.Conv2d(8, 8, 1)
        self.drop = nn.Dropout(0.1)
        self.head, self.tied = nn.Linear(8 * 16, 5), nn.Linear(8 * 16, 5)
        self.tied.weight = self.head.weight

    def forward(self, x):
        x = self.pool(self.act(self.norm(self.stem(x))))
        x = TF.gelu(self.mix(x) + self.mix(x * 2.0))
        x = self.drop(x.flatten(1))
        return self.head(x) + self.tied(x)


def convnet():
    torch.manual_seed(0)
    return ConvNet()


MODELS = {
    "transformer": (transformer, lambda: torch.arange(64).reshape(4, 16) % 30),
    "convnet": (convnet, lambda: normal((4, 3, 8, 8))),
}


@pytest.fixture(params=MODELS)
def case(request):
    make, inputs = MODELS[request.param]
    return make(), inputs()


def quiet(model, *arguments, **options):
    return fewbit.compress_(model, *arguments, **({"verbose": False} | options))


def gradients(model, x, seed=5):
    torch.manual_seed(seed)
    y = model(x)
    loss = (y * normal(y.shape, y.dtype, seed=9)).sum()
    return y, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def test_the_same_model(case):
    """Modules, parameters, buffers, keys, flags, hooks and outputs are as before."""
    model, x = case
    model.register_buffer("scratch", torch.arange(3.0), persistent=False)
    list(model.children())[-1].eval()
    exact = copy.deepcopy(model)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    buffers, keys = dict(model.named_buffers()), list(model.state_dict())
    seen = []
    leaf = next(module for module in model.modules() if isinstance(module, nn.Linear))
    leaf.register_forward_hook(lambda *_: seen.append(1))
    quiet(model, bits=8, layers={"activation_bits": 8})
    assert all(module is modules[name] for name, module in model.named_modules())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert list(model.state_dict()) == keys
    for module, before in zip(model.modules(), exact.modules(), strict=True):
        assert isinstance(module, type(before)) and module.training == before.training
    y, ours = gradients(model, x)
    expected, theirs = gradients(exact, x)
    assert seen
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    scale = max(float(gradient.norm()) for gradient in theirs)
    for a, b in zip(ours, theirs, strict=True):  # a bias before a norm has no gradient to compare
        assert float((a - b).norm()) < 0.05 * float(b.norm()) + 1e-3 * scale
    for a, b in zip(model.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_restored(case):
    """Every class and attribute is as before the conversion. state_dict loads in both directions."""
    model, x = case
    before = copy.deepcopy(model)
    controller = quiet(model, bits=2)
    assert controller.report.converted
    state = model.state_dict()
    fewbit.restore_(model)
    for module, other in zip(model.modules(), before.modules(), strict=True):
        assert type(module) is type(other) and vars(module).keys() == vars(other).keys()
        assert not isinstance(module, TrackedModule)
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert model.load_state_dict(state) and before.load_state_dict(model.state_dict())
    a, b = gradients(model, x), gradients(before, x)
    assert torch.equal(a[0], b[0])
    assert all(torch.equal(p, q) for p, q in zip(a[1], b[1], strict=True))
    fewbit.restore_(model)  # nothing to do


HOOKS = [
    *(("forward_pre", options) for options in ({}, {"with_kwargs": True})),
    *(("forward", options) for options in ({}, {"prepend": True})),
    *((f"full_backward{when}", {}) for when in ("_pre", "")),
    *((f"{kind}state_dict_{when}", {}) for kind in ("", "load_") for when in ("pre", "post")),
]


def hooked(model):
    """Register every kind of hook on the whole model, on a layer that is used twice, and on the head.

    Returns:
        The calls in order (module, number of the hook, shapes of tensors), and the handles.
    """
    calls, handles = [], []

    def called(name, number, *arguments):
        tensors = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)]
        calls.append((name, number, [tuple(x.shape) for x in tensors]))

    for module in (model, model.mix, model.head):
        for number, (kind, options) in enumerate(HOOKS):
            hook = functools.partial(called, type(module).__name__, number)
            handles.append(getattr(module, f"register_{kind}_hook")(hook, **options))
    handles.append(model.mix.weight.register_hook(lambda grad: called("weight", 0, grad)))
    return calls, handles


def test_hooks_of_others_are_called_as_before():
    """The same ones with the same shapes in the same order: converted, and undone; and they can be removed."""
    model, exact = convnet(), convnet()
    (ours, handles), (theirs, _) = hooked(model), hooked(exact)
    x = normal((4, 3, 8, 8))

    def step(model):
        model(x.clone().requires_grad_()).sum().backward()
        model.load_state_dict(model.state_dict())

    step(exact)
    quiet(model, bits=2)
    step(model)
    numbers = {number for name, number, *_ in theirs if name != "weight"}
    assert numbers == set(range(len(HOOKS))) and ("weight", 0, [(8, 8, 1, 1)]) in theirs
    assert ours == theirs
    fewbit.restore_(model)
    ours.clear()
    step(model)
    assert ours == theirs
    quiet(model, bits=2)
    ours.clear()
    for handle in handles:
        handle.remove()
    step(model)
    assert not ours


def test_a_hook_that_changes_what_passes_is_heeded():
    """A forward hook's result, a forward pre-hook's argument, and a backward hook's gradient."""
    model, exact = convnet(), convnet()
    for either in (model, exact):
        either.drop.p = 0.0
        either.mix.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3.0,))
        either.mix.register_forward_hook(lambda module, inputs, y: y * 0.5)
        either.head.register_full_backward_hook(lambda module, before, after: (before[0] * 2.0,))
    plain = convnet()
    plain.drop.p = 0.0
    quiet(model, bits=8, layers={"activation_bits": 8})
    x = normal((4, 3, 8, 8))
    (y, ours), (expected, theirs) = gradients(model, x), gradients(exact, x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    names = [name for name, _ in model.named_parameters()]
    for name, a, b, c in zip(names, ours, theirs, gradients(plain, x)[1], strict=True):
        if name == "stem.bias":  # zero: a norm follows
            continue
        assert relative(a, b) < 0.05
        assert name == "tied.bias" or name == "head.bias" or relative(c, b) > 0.1


def test_again_with_the_same_and_with_other_settings(case):
    model, x = case
    first = quiet(model, bits=4, layers={"group_size": 64}).report
    classes = [type(module) for module in model.modules()]
    again = quiet(model, bits=4, layers={"group_size": 64}).report
    assert "an earlier call of compress_ was undone" in again.notes[-1]
    assert dataclasses.replace(again, notes=again.notes[:-1]) == first
    assert [type(module) for module in model.modules()] == classes
    assert sum(isinstance(module, TrackedModule) for module in model.modules()) == sum(
        next(module.children(), None) is not None or module is model for module in model.modules()
    )
    kept = fewbit.saved_bytes(model, x).total
    quiet(model, bits=2)
    assert model.head.quantizer.group_size == 256
    assert fewbit.saved_bytes(model, x).total < kept
    fewbit.restore_(model)
    assert not any(kinds.is_fewbit(module) for module in model.modules())
    assert "was undone" not in str(quiet(model).report)


def test_evaluation_and_no_grad_compress_nothing(case):
    model, x = case
    exact = copy.deepcopy(model).eval()
    quiet(model, bits=1, layers={"activation_bits": 1})
    state = torch.get_rng_state()
    with torch.no_grad():
        _, saved = saved_by(model.train(), x)
    assert not saved
    torch.set_rng_state(state)
    model.eval()
    for module, other in zip(model.modules(), exact.modules(), strict=True):
        if isinstance(module, nn.BatchNorm2d):
            module.load_state_dict(other.state_dict())
    y, ours = gradients(model, x)
    expected, theirs = gradients(exact, x)
    assert torch.equal(y, expected)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("travel", COPIES)
def test_copies_and_pickles(case, travel):
    model, x = case
    quiet(model, bits=3)
    twin = COPIES[travel](model)
    a, b = gradients(model, x), gradients(twin, x)
    assert torch.equal(a[0], b[0])
    assert all(map(torch.equal, a[1], b[1]))
    assert fewbit.saved_bytes(twin, x).total == fewbit.saved_bytes(model, x).total
    fewbit.restore_(twin)
    assert any(kinds.is_fewbit(module) for module in model.modules())
    assert not any(kinds.is_fewbit(module) for module in twin.modules())


def test_levels():
    model = convnet()
    assert quiet(model, bits=fewbit.Level("L1")).report.converted[0].bits == 4
    assert type(model.stem) is fewbit.nn.Conv2d and type(model.norm) is nn.BatchNorm2d
    assert type(model.act) is nn.ReLU
    quiet(model, bits=fewbit.FixedBits())
    assert type(model.norm) is fewbit.nn.BatchNorm2d and model.norm.quantizer.bits == 4
    assert model.act.bits == 1
    report = quiet(model, bits=fewbit.Level("L0")).report
    assert not report.converted and type(model.stem) is nn.Conv2d


def test_settings_of_single_modules():
    model = transformer()
    overrides = {"blocks.0": 8, "blocks.0.mlp.*": {"bits": 3, "activation_bits": 1}, "head": None}
    report = quiet(
        model, bits=2, overrides=overrides, layers={"group_size": 64, "copies": 2}
    ).report
    bits = {row.path: row.bits for row in report.converted}
    assert bits["blocks.0.qkv"] == bits["blocks.0.norm1"] == 8
    assert bits["blocks.0.mlp.0"] == 3 and bits["blocks.0.mlp.1"] == 1
    assert bits["blocks.1.qkv"] == 2 and bits["blocks.1.mlp.1"] == 4
    assert "head" not in bits and type(model.head) is nn.Linear
    assert model.blocks[1].qkv.quantizer.group_size == 64 and model.blocks[1].norm1.copies == 2


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"include": "blocks.0"}, {"blocks.0.qkv", "blocks.0.proj"}),
        ({"include": "blocks", "exclude": ["*.proj", "blocks.1"]}, {"blocks.0.qkv"}),
        ({"include": lambda path, module: path.endswith("qkv")}, {"blocks.0.qkv", "blocks.1.qkv"}),
        ({"exclude": lambda path, module: isinstance(module, nn.Linear)}, set()),
    ],
)
def test_which_modules(options, expected):
    report = quiet(transformer(), **options).report
    names = {
        row.path for row in report.converted if row.before == "Linear" and "mlp" not in row.path
    }
    assert names - {"head"} == expected
    excluded = {row.path for row in report.left_alone if row.reason == "excluded"}
    assert excluded and not excluded & names


class Scaled(nn.Module):
    """A module with a parameter of its own and a child."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) * self.scale


class EinsumAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = torch.einsum("bid,bjd->bij", q, k).softmax(-1)
        return torch.einsum("bij,bjd->bid", weights, v)


def test_what_is_left_alone_and_why():
    class Own(nn.Linear):
        pass

    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    replaced, patched = nn.Linear(3, 3), nn.Conv2d(1, 1, 1)
    replaced.forward = lambda x: x
    patched._conv_forward = patched._conv_forward
    around = [Scaled(), EinsumAttention(), nn.Identity()]
    model = nn.ModuleList([Own(3, 3), Raw(), nn.LSTM(3, 3), replaced, *around, patched])
    functions = "; functions that it calls are compressed"
    own = "no few-bit version of what it computes with parameters of its own"
    einsum = "it calls einsum, which stays exact and saves its inputs in full"
    subclass = "a subclass of Linear, which may compute something else"
    reasons = {row.path: row.reason for row in quiet(model).report.left_alone}
    assert reasons == {
        "0": subclass + functions,
        "1": "no few-bit version" + functions,
        "2": "one op over all steps, which saves tensors of its own; on a CPU, layers={'everything': True} compresses them",
        "3": "its forward was replaced on the instance, so its class does not say what it computes",
        "4": own + functions,
        "7": OWN_FORWARD,
    }
    off = quiet(model, layers={"functional": False}).report.left_alone
    reasons = {row.path: row.reason for row in off}
    assert (reasons["4"], reasons["5"]) == (own, einsum)


@pytest.mark.parametrize("bits, of_layer", [(6, 0), (5, 0), (4, 0), (2, 4)])
def test_a_layer_uses_a_copy_of_a_norm_that_has_more_bits(bits, of_layer):
    """An override of the norm alone adds a copy only if the norm has fewer bits than the layer after it."""
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 8))
    quiet(model, 4, overrides={"0": {"bits": bits}})
    saved = fewbit.saved_bytes(model, torch.randn(32, 64, requires_grad=True)).by_kind()["packed"]
    assert saved == 32 * 64 * (bits + of_layer) // 8


def test_the_report_says_that_results_are_computed_again():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    note = "results of linear layers are computed again"
    assert note not in str(quiet(model).report)
    layers = {"recompute_linear": True}
    assert note in str(quiet(model, layers=layers).report)
    report = str(quiet(model, fewbit.ErrorBound(e2=0.1), layers=layers).report)
    assert "recompute_linear has no effect with ErrorBound" in report


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated", "ignore:`torch.jit.script_method`"
)
def test_a_converted_model_is_not_scripted():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    quiet(model)
    for layer in (model, model[0], model[1]):
        with pytest.raises(InputError, match="torch.jit.script: expected .* call fewbit.restore_"):
            torch.jit.script(layer)
    fewbit.restore_(model)
    torch.jit.script(model)


def test_a_printed_model_has_the_bits_of_the_report():
    block = nn.TransformerEncoderLayer(32, 2, 64, activation="gelu", batch_first=True)
    model = nn.Sequential(block, nn.Softmax(-1), nn.ReLU())
    shown = {}
    for row in quiet(model, bits=4).report.converted:
        text = model.get_submodule(row.path).extra_repr()
        if row.bits is not None:
            assert f"bits={row.bits}" in text
            shown[row.after] = row.bits
        assert (row.attention is None) or f"attention_bits={row.attention}" in text
    assert shown["fewbit.nn.LayerNorm"] == 5 and shown["fewbit.GELU"] == 6
    assert shown["fewbit.nn.Linear"] == 4 and shown["fewbit.ReLU"] == 1


def test_the_report_says_that_all_parameters_are_frozen():
    model, note = nn.Linear(8, 8), "no parameter of the model requires a gradient"
    assert note not in str(quiet(model, sample=torch.ones(2, 8)).report)
    report = quiet(model.requires_grad_(False), sample=torch.ones(2, 8)).report
    assert note in str(report) and report.saved == ({}, {})


def test_the_report_says_what_exact_layers_save():
    layers = nn.Dropout(), nn.Dropout2d(), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Upsample(8)
    rows = quiet(nn.Sequential(*layers), 2).report.converted
    found = ["1-bit mask", "1-bit mask", "places of maxima", "nothing", "nothing"]
    assert [row.saves for row in rows] == found


def test_a_long_report_has_one_row_for_modules_with_the_same_last_name():
    """Adapters give every linear layer three parts."""
    parts = ("query", "key", "value", "out", "gate", "up", "down")
    block = nn.ModuleDict(
        {name: nn.ModuleDict({"base": nn.Linear(8, 8), "A": nn.Linear(8, 2)}) for name in parts}
    )
    few = quiet(nn.ModuleList([copy.deepcopy(block) for _ in range(3)]), 2).report.view()
    assert len(few.rows) == 14
    norms = {f"norm_{name}": nn.LayerNorm(8) for name in parts}
    block.update(norms)
    many = quiet(nn.ModuleList([block, copy.deepcopy(block)]), 2).report.view()
    assert [(row[0][0], row[1]) for row in many.rows] == [
        ("*.base", 14),
        ("*.A", 14),
        *((f"*.{name}", 2) for name in norms),
    ]


def test_the_report_says_which_modules_save_nothing_few_bit_now():
    model = nn.Sequential(
        nn.Embedding(9, 8), nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8)
    )
    controller = quiet(model, 2)

    def saves():
        return [row.saves for row in controller.report.converted]

    usual = ["indices", "2 bits", "4 bits", "3 bits", "2 bits"]
    assert saves() == usual
    model[:2].requires_grad_(False)
    for module in model[2:4]:
        module.eval()
    evaluated = "as torch, in eval()"
    assert saves() == ["no input", "no input", evaluated, evaluated, "2 bits"]
    assert "nothing is compressed: 2 modules; call train()" in str(controller.report)
    ids = torch.arange(9)
    found = fewbit.saved_bytes(model, ids).entries
    assert {entry.module for entry in found if entry.kind == "packed"} == {"4"}
    model.eval()  # nothing is compressed; the report says so in a line of its own if compress_ is called now
    model.requires_grad_(True)
    assert saves() == usual
    fewbit.restore_(model)
    assert "in evaluation mode, in which nothing is compressed" in str(quiet(model, 2).report)
    fewbit.restore_(model)
    model.train()
    assert saves() == usual


def test_modules_made_by_hand_keep_their_settings():
    """They keep all settings of their quantizers, also one that a later version adds."""
    layer = fewbit.nn.Linear(96, 96, bits=5, group_size=64)
    layer.quantizer.extra_bits, layer.quantizer.added = (1,), "a setting"
    model = nn.Sequential(layer, nn.Linear(96, 96))
    controller = quiet(model, bits=2)
    found, report = layer.quantizer, controller.report
    assert (found.bits, found.average, found.is_fixed, found.group_size) == (5, 5, True, 64)
    assert (found.extra_bits, found.added, found.fuse) == ((1,), "a setting", False)
    assert found.name == "0" and found.context is controller.context
    assert model[1].quantizer.bits == 2 and model[1].quantizer.context is controller.context
    assert [row.path for row in report.converted] == ["1"]
    assert report.left_alone[0].reason.startswith("few-bit already: Linear(")
    fewbit.restore_(model)
    assert type(model[0]) is fewbit.nn.Linear and type(model[1]) is nn.Linear


def test_the_report(capsys):
    model = convnet()
    controller = fewbit.compress_(model, bits=2, sample=normal((4, 3, 8, 8)))
    out = capsys.readouterr().out
    printed = "\n".join(line.rstrip() for line in out.splitlines())
    assert plain(controller.report, 80) in printed
    lines = [line.split() for line in out.splitlines()]
    assert ["stem", "Conv2d", "fewbit's", "2", "bits", "1"] in lines
    assert ["act", "ReLU", "fewbit's", "1", "bit", "1"] in lines
    assert ["8", "modules", "converted"] in lines
    before, after = controller.report.saved
    assert sum(after.values()) == fewbit.saved_bytes(model, normal((4, 3, 8, 8))).total
    assert sum(before.values()) > 5 * sum(after.values())
    assert "Controller(ConvNet, 8 modules converted)" == repr(controller)
    assert controller.model is model


@pytest.mark.parametrize(
    "bits, expected",
    [
        (1, 3),
        (4, 3),
        (5, 5),
        (8, 8),
        (fewbit.SampleBits(4.5), 3),
        (fewbit.AdaptiveBits(6.5), 6),
        (fewbit.Level("L3", 7), 7),
        (fewbit.PreActivationBits(2), 3),
    ],
    ids=str,
)
def test_the_usual_bits_of_activations(bits, expected):
    """They are 3, and those of inputs from 5 bits on (docs/decisions/0017)."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    quiet(model, bits=bits)
    assert model[1].bits == expected
    fewbit.restore_(model)
    quiet(model, bits=bits, layers={"activation_bits": 2})
    assert model[1].bits == 2


A_FILTER = "expected a glob, a list of globs or a function (path, module) -> bool, got "


AVERAGES = "; averages need a configuration such as fewbit.SampleBits or fewbit.AdaptiveBits, which divides them among samples"
FIELDS = "activation_bits, attention_bits, group_size, copies, functional, everything, quantizer, autograd_functions, gate_bits, recompute_linear"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bits": "2"}, "bits: expected a number from 1 to 8, or a configuration such as fewbit.AdaptiveBits(2.5), got '2'"),
        ({"layers": {"attention_bits": 3.5}}, f"layers: attention_bits: expected a whole number from 1 to 8, got 3.5{AVERAGES}"),
        ({"layers": 4}, "layers: expected fewbit.LayerSettings, or a mapping of its fields, got 4"),
        ({"layers": {"bits": 2}}, "layers: expected no bits, because the argument bits gives them, here fewbit.FixedBits(4); got bits=2"),
        ({"layers": {"quantiser": "uniform"}}, f"layers: expected {FIELDS}, got 'quantiser'; did you mean 'quantizer'?"),
        ({"verbose": "no"}, "verbose: expected True or False, got 'no'"),
        ({"sample": torch.ones(2, 5)}, "sample: expected inputs of the model's forward, got shape (2, 5), for which it raises RuntimeError: "),
        ({"sample": [1]}, "sample: expected a tensor, a tuple of positional inputs or a mapping of keyword inputs, got list"),
        ({"offload": True}, "offload: expected fewbit.HostOffload, got True"),
        ({"bits": fewbit.Level("L4"), "offload": fewbit.HostOffload()},
         "offload: expected none with fewbit.Level('L4'), which has its own, got fewbit.HostOffload(False)"),
        ({"bits": fewbit.Level("L0"), "offload": fewbit.HostOffload()},
         "offload: expected none with fewbit.Level('L0'), which compresses nothing, got fewbit.HostOffload(False)"),
        ({"offload": {"x": 1}}, "expected expandable_segments for HostOffload, got 'x'"),
        ({"bits": fewbit.Level("L0"), "layers": {"copies": 3}}, "layers: copies: expected 1 or 2, got 3"),
        ({"activation_bits": 2, "copies": 2},
         "expected settings of layers in the argument layers, as layers={'activation_bits': 2, 'copies': 2}, "
         "got activation_bits= as an argument of its own"),
        ({"quantiser": "uniform"}, "compress_() got an unexpected keyword argument 'quantiser'"),
        ({"include": "decoder"}, "include: expected a glob that matches a module, got 'decoder'; the outermost modules are stem, norm, act, pool, mix, drop"),
        ({"include": nn.Linear}, f"include: {A_FILTER}{nn.Linear}"),
        ({"include": ["stem", 3]}, "include: expected a glob over dotted module paths, got 3"),
        ({"exclude": 5}, f"exclude: {A_FILTER}5"),
        ({"overrides": ["stem"]}, "overrides: expected a mapping of globs to settings, got ['stem']"),
        ({"include": "ool"}, "include: expected a glob that matches a module, got 'ool'; did you mean '*ool'?"),
        ({"overrides": {3: 2}}, "overrides: expected a glob over dotted module paths, got 3"),
        ({"overrides": {"nobody": 2}}, "overrides: expected a glob that matches a module, got 'nobody'; the outermost modules are stem, norm, act, pool, mix, drop"),
        ({"overrides": {"stem": 9}}, "overrides['stem']: bits: expected a number from 1 to 8, got 9"),
        ({"overrides": {"stem": 2.5}}, f"overrides['stem']: bits: expected a whole number from 1 to 8, got 2.5{AVERAGES}"),
        ({"overrides": {"stem": {"bit": 2}}}, f"overrides['stem']: expected bits, {FIELDS} for LayerSettings, got 'bit'; did you mean 'bits'?"),
        ({"overrides": {"stem": "2"}},
         f"overrides['stem']: expected bits, fewbit.LayerSettings, a mapping of bits, {FIELDS}, or None, got '2'"),
    ],
)  # fmt: skip
def test_refused_with_nothing_changed(options, message):
    model = convnet()
    with pytest.raises(TypeError if "unexpected" in message else InputError) as caught:
        quiet(model, **options)
    # The text of torch's own errors depends on the version of torch.
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    assert str(caught.value) == message or isinstance(caught.value.__cause__, RuntimeError)
    assert not any(
        kinds.is_fewbit(module) or isinstance(module, TrackedModule) for module in model.modules()
    )


def test_a_model_is_a_module():
    for function in (quiet, fewbit.restore_):
        with pytest.raises(InputError, match="^model: expected a torch.nn.Module, got str$"):
            function("model")


class Squared(nn.Module):
    def forward(self, x):
        return x.square()


CHANGES = {
    "weight norm": nn.utils.parametrizations.weight_norm,
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "own": lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Squared()),
    "earlier weight norm": nn.utils.weight_norm,
    "earlier spectral norm": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_that_are_computed(change, when):
    """Parametrizations, norms of weights and pruning are set before or after the conversion."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    exact = copy.deepcopy(model)
    x = normal((8, 4), scale=1.0)
    for changed in (model, exact):
        torch.manual_seed(1)
        if changed is model and when == "after":
            quiet(model, bits=8)
        CHANGES[change](changed[0])
    if when == "before":
        quiet(model, bits=8)

    def assert_close(within):
        results = []
        for either in (model, exact):
            y = either(x)
            results.append((y, torch.autograd.grad(y.square().sum(), list(either.parameters()))))
        (ours, found), (theirs, expected) = results
        torch.testing.assert_close(ours, theirs)
        for one, other in zip(found, expected, strict=True):
            assert (one - other).norm() <= within * other.norm()

    assert_close(0.02)
    fewbit.restore_(model)
    names = [[type(module).__name__ for module in either.modules()] for either in (model, exact)]
    assert names[0] == names[1]
    assert not any("fewbit" in str(type(module).__mro__) for module in model.modules())
    assert_close(1e-5)
    if nn.utils.parametrize.is_parametrized(model[0]):
        nn.utils.parametrize.remove_parametrizations(model[0], "weight")
        assert type(model[0]) is nn.Linear and "weight" in dict(model[0].named_parameters())


@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
@pytest.mark.parametrize("training", [False, True])
def test_modules_that_a_conversion_makes_train_as_those_around(layer, training):
    torch.manual_seed(0)
    model = layer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True).train(training)
    exact = copy.deepcopy(model)
    quiet(model)
    assert {module.training for module in model.modules()} == {training}
    x = normal((2, 3, 8), scale=1.0)
    inputs = (x, x) if layer is nn.TransformerDecoderLayer else (x,)
    grads = [
        torch.autograd.grad(either(*inputs).square().sum(), either.linear1.weight)[0]
        for either in (model, exact)
    ]
    assert torch.equal(*grads) != training
    fewbit.restore_(model)
    assert {module.training for module in model.modules()} == {training}


def test_a_block_of_modules_in_evaluation_mode():
    block = fewbit.nn.PreActivation(nn.BatchNorm1d(4).eval(), nn.Linear(4, 4))
    assert not block.activation.training


REPLACED = "so the class does not say what it computes"


def twice(theirs):
    @functools.wraps(theirs)
    def replaced(*args, **kwargs):
        return 2 * theirs(*args, **kwargs)

    return replaced


class Doubled:
    """A callable that is not a function."""

    def __init__(self, theirs):
        self.theirs = theirs

    def __call__(self, *args, **kwargs):
        return 2 * self.theirs(*args, **kwargs)


MADE = {
    "function": twice,
    "object": Doubled,
    "partial": lambda theirs: functools.partial(Doubled(theirs)),
    "function of torch": lambda theirs: TF.bilinear,
    "builtin": lambda theirs: torch.matmul,
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize(
    ("layer", "owner", "name", "reason"),
    [
        (nn.Linear(4, 4), nn.Linear, "forward", f"Linear.forward was replaced, {REPLACED}"),
        (nn.GELU(), nn.GELU, "forward", f"GELU.forward was replaced, {REPLACED}"),
        (nn.Conv2d(1, 1, 1), nn.Conv2d, "_conv_forward", f"Conv2d._conv_forward was replaced, {REPLACED}"),
        (nn.BatchNorm2d(1), _BatchNorm, "forward", f"_BatchNorm.forward was replaced, {REPLACED}"),
        (nn.Linear(4, 4), TF, "linear", "torch.nn.functional.linear, which it calls, was replaced"),
        (nn.Softmax(-1), TF, "softmax", "torch.nn.functional.softmax, which it calls, was replaced"),
        (nn.Dropout(), TF, "dropout", "torch.nn.functional.dropout, which it calls, was replaced"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)  # fmt: skip
def test_what_was_replaced_is_left_alone(monkeypatch, layer, owner, name, reason, made):
    monkeypatch.setattr(owner, name, MADE[made](getattr(owner, name)))
    (left,) = quiet(nn.Sequential(layer)).report.left_alone
    assert left.reason == reason
    assert not kinds.is_fewbit(layer)


def test_a_function_that_was_replaced_before_the_import(monkeypatch):
    made = Doubled(TF.linear)
    monkeypatch.setattr(TF, "linear", made)
    monkeypatch.setitem(kinds._IN_FUNCTIONAL, "linear", made)
    (left,) = quiet(nn.Sequential(nn.Linear(4, 4))).report.left_alone
    assert left.reason == "torch.nn.functional.linear, which it calls, was replaced"


@pytest.mark.parametrize("cls", [*kinds.TORCH, *kinds.LEFT_ALONE], ids=lambda cls: cls.__name__)
def test_nothing_of_torch_is_taken_for_replaced(cls):
    assert kinds.replaced(cls.__new__(cls)) is None


@pytest.mark.parametrize("functional", [False, True])
def test_a_function_that_was_replaced_is_called_once(monkeypatch, functional):
    """Forward and backward are those of the replacement of torch's function."""
    torch.manual_seed(0)
    theirs, layer = TF.linear, nn.Linear(8, 8)
    x = normal((16, 8), scale=1.0)
    monkeypatch.setattr(TF, "linear", lambda x, weight, bias=None: theirs(x, 3 * weight, bias))

    results = []
    for convert in (
        lambda model: None,
        lambda model: quiet(model, bits=8, layers={"functional": functional}),
    ):
        model = copy.deepcopy(
            Composed(
                lambda model, x: model.layer(x) + TF.linear(x, model.layer.weight), layer=layer
            )
        )
        convert(model)
        y = model(x)
        results.append((y, torch.autograd.grad(y.square().sum(), model.layer.weight)[0]))
    (theirs_y, expected), (ours_y, found) = results
    torch.testing.assert_close(ours_y, theirs_y)
    assert relative(found, expected) < 0.02


@pytest.mark.parametrize("parametrized_first", [True, False])
def test_a_parametrized_module_with_layers_inside(parametrized_first):
    """torch goes back to the class below its own, which must be fewbit's or the module's."""
    model = Scaled()
    if not parametrized_first:
        quiet(model)
    nn.utils.parametrize.register_parametrization(model, "scale", nn.Softplus())
    if parametrized_first:
        quiet(model)
    context, seen = model.linear.quantizer.context, []
    model.linear.register_forward_hook(
        lambda *_: seen.append(context.innermost_forward() is not None)
    )
    model(torch.ones(2, 8)).sum().backward()
    nn.utils.parametrize.remove_parametrizations(model, "scale")
    model(torch.ones(2, 8)).sum().backward()
    assert seen == [True, True]
    fewbit.restore_(model)
    assert type(model) is Scaled


def test_a_class_that_was_put_in_the_place_of_a_converted_one_is_refused():
    class Own(fewbit.nn.Linear):
        def forward(self, input):
            return super().forward(input)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    quiet(model)
    model[0].__class__ = Own
    for call in (fewbit.restore_, quiet):
        with pytest.raises(
            InputError, match="^0: expected the class that compress_ gave it, got Own"
        ):
            call(model)
    assert type(model[1]) is fewbit.nn.Linear
    model(torch.ones(2, 4)).sum().backward()


def test_a_forward_that_was_wrapped_since():
    """The wrapped forward still calls the layer's own, which is torch's once the model is restored."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    exact = copy.deepcopy(model)
    quiet(model)
    for layer in model:
        layer.forward = lambda x, inner=layer.forward: 2 * inner(x)
    x = torch.ones(2, 4)
    fewbit.restore_(model)
    for again in (False, True):
        if again:
            compressed = quiet(model, layers={"functional": False})
            assert {row.reason for row in compressed.report.left_alone} == {OWN_FORWARD}
        y = model(x)
        torch.testing.assert_close(y, 2 * exact[1](2 * exact[0](x)))
        assert "Backward0" in y.grad_fn.next_functions[0][0].name()
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_draws_what_it_would_draw(reentrant):
    """Masks are those of the exact model from the same seed, also if a checkpoint recomputes the whole model."""
    exact = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))
    model = copy.deepcopy(exact)
    quiet(model, bits=8)
    x = normal((8, 64)).requires_grad_()

    def run(model):
        torch.manual_seed(3)
        y = checkpoint(model, x, use_reentrant=reentrant)
        y.sum().backward()
        return y, model[2].bias.grad

    (y, bias), (expected, exact_bias) = run(model), run(exact)
    assert torch.equal(y, expected) and torch.equal(bias, exact_bias)


def test_a_seed_reproduces_a_step_and_exact_passes_draw_nothing():
    model = nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 8))
    quiet(model, bits=1)
    x = normal((5, 96))
    first, second = gradients(model, x, 0)[1][0], gradients(model, x, 1)[1][0]
    assert torch.equal(gradients(model, x, 0)[1][0], first) and not torch.equal(first, second)
    state = torch.get_rng_state()
    model.eval()(x).sum().backward()
    with torch.no_grad():
        model.train()(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_layers_do_not_take_is_torchs_own():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.w = nn.Linear(16, 16), nn.Parameter(normal((16,)))

        def forward(self, x):
            y = self.a(x)
            spectrum = torch.fft.rfft(y) * torch.fft.rfft(y * 2.0)
            z = torch.softmax(y, -1, torch.float64)
            assert z.dtype == torch.float64 and y.softmax(-1, torch.float64).dtype == torch.float64
            return spectrum.abs().sum() + TF.linear(y, self.w).sum() + z.square().sum()

    model = Odd()
    exact, x = copy.deepcopy(model), normal((8, 16))
    quiet(model, bits=8)
    for either in (model, exact):
        either(x).backward()
    for a, b in zip(model.parameters(), exact.parameters(), strict=True):
        assert relative(a.grad, b.grad) < 0.05
    complex_layer = nn.Sequential(nn.Linear(8, 8, dtype=torch.complex64))
    quiet(complex_layer)
    complex_layer(torch.ones(2, 8, dtype=torch.complex64)).abs().sum().backward()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_features_of_zero(sizes):
    model = nn.Sequential(nn.Linear(*sizes))
    quiet(model)
    x = torch.ones(4, sizes[0], requires_grad=True)
    model(x).sum().backward()
    assert x.grad.shape == x.shape and model[0].bias.grad.shape == sizes[1:]


# -- functions that a forward calls ---------------------------------------------------------------------------


def calls(x, w):
    """A model of functions and not modules: a linear map, attention, a gate, a softmax."""
    h = TF.linear(x, w)
    q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in h.chunk(3, -1))
    a = TF.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    g = TF.silu(a) * torch.sigmoid(x)
    return TF.dropout(torch.softmax(g @ g.transpose(1, 2), -1), 0.1, True) @ TF.relu(g)


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(normal((96, 32), scale=0.2))
        self.inner = nn.Linear(32, 32)

    def forward(self, x):
        return calls(self.inner(x), self.w)


def test_functions_are_compressed_too():
    model = Functional()
    exact = copy.deepcopy(model)
    x = normal((3, 20, 32))
    quiet(model, bits=8, layers={"activation_bits": 8})
    y, ours = gradients(model, x)
    expected, theirs = gradients(exact, x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a, b) < 0.1
    before = fewbit.saved_bytes(exact, x)
    quiet(model, bits=2)
    after = fewbit.saved_bytes(model, x)
    assert before.total > 8 * after.total
    assert "activation" not in {entry.kind for entry in after.kept if entry.bytes > 500}
    quiet(model, bits=2, layers={"functional": False})
    assert fewbit.saved_bytes(model, x).total > 3 * after.total


def test_functions_of_excluded_modules_stay_exact():
    """Functions of modules within an excluded module stay exact too, unless those modules are included."""

    def packed(**options):
        model = Composed(
            lambda model, x: TF.gelu(model.b(TF.gelu(model.a(x)))),
            a=nn.Linear(96, 96),
            b=Functional(),
        )
        model.b.inner = nn.Linear(96, 32)
        quiet(model, bits=2, **options)
        kept = fewbit.saved_bytes(model, normal((3, 20, 96)))
        return {entry.module for entry in kept.kept if entry.kind == "packed" and entry.bytes}

    on, off = {"functional": True}, {"functional": False}
    everywhere = packed(layers=on)
    assert everywhere >= {"", "a", "b"}
    assert packed(overrides={"b": off}) == everywhere - {"b"}
    # A layer saves its own input if the activation before it has no copy.
    assert packed(layers=off) == everywhere - {"", "b"} | {"b.inner"}
    assert packed(layers=off, overrides={"b": on}) == everywhere - {""} | {"b.inner"}
    assert "a" not in packed(exclude="a") and "b" in packed(exclude="a")
    assert packed(exclude=lambda path, module: path.startswith("b")) <= {"", "a"}
    assert packed(include="b") <= {"b", "b.inner"} and "b" in packed(include="b")
    model = nn.Sequential(nn.Linear(96, 96))
    quiet(model, bits=2, overrides={"0": None})
    assert saved_by(model, normal((4, 96)))[1][0].shape == (4, 96)
    assert not torch.overrides._get_current_function_mode_stack()


def test_attention_has_its_own_bits():
    model = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
    quiet(model, bits=2)
    own, attention = model.self_attn.quantizer, model.self_attn.attention_quantizer
    assert own.bits_of(0) == 2 and [attention.bits_of(slot) for slot in range(3)] == [4, 5, 3]
    quiet(model, bits=6)
    attention = model.self_attn.attention_quantizer
    assert [attention.bits_of(slot) for slot in range(3)] == [8, 8, 7]
    quiet(model, bits=2, layers={"attention_bits": 3})
    attention = model.self_attn.attention_quantizer
    assert [attention.bits_of(slot) for slot in range(3)] == [3, 3, 3]
    fewbit.restore_(model)
    assert "attention_quantizer" not in vars(model.self_attn)


# -- training ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resnet_trains_and_keeps_a_twelfth():
    torch.manual_seed(0)
    model = ResNet("resnet18", nn.ReLU, classes=4)
    x, labels = normal((8, 3, 32, 32), scale=1.0), torch.arange(8) % 4
    exact = fewbit.saved_bytes(model, x).total
    quiet(model, bits=2)
    assert exact > 12 * fewbit.saved_bytes(model, x).total
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    losses = []
    for _ in range(12):
        loss = TF.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_gradient_accumulation_and_several_forwards_before_a_backward():
    model = transformer()
    exact = copy.deepcopy(model)
    quiet(model, bits=8, layers={"activation_bits": 8})
    x = torch.arange(64).reshape(4, 16) % 30
    for either in (model, exact):
        first, second = either(x[:2]), either(x[2:])
        (second.square().sum() + first.square().sum()).backward()
        either(x).square().sum().backward()
    for a, b in zip(model.parameters(), exact.parameters(), strict=True):
        assert relative(a.grad, b.grad) < 0.05


def test_the_report_names_a_parent_of_all_modules_once():
    model = nn.Module()
    model.base_model_of_all = nn.Module()
    model.base_model_of_all.stem, model.base_model_of_all.head = nn.Linear(64, 64), nn.Linear(64, 8)
    text = str(quiet(model).report)
    assert text.startswith("2 modules converted in base_model_of_all\n")
    assert "\nstem " in text and "\nhead " in text
    model.other = nn.Linear(8, 8)
    text = str(quiet(model).report)
    assert text.startswith("3 modules converted\n") and "\nbase_model_of_all.stem " in text
