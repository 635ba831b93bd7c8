"""The contents of `controller.bounds`: unobserved layers, codecs, given bits, and models that were restored."""

import copy
import math
import pickle
import re
import warnings

import pytest
import torch
from probed_models import loss_of
from regions import Regions, block
from samples import normal
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import bounded

import fewbit
from fewbit.errors import BoundWarning, InputError
from fewbit.policies.allocation_report import Allocation
from fewbit.policies.error_bound.bounds import Bounded, Bounds
from fewbit.policies.error_bound.codecs import BoundedCodec, ExactCodec
from fewbit.policies.unobserved import FORGOTTEN
from fewbit.render.terminal import plain as shown
from fewbit.runtime.codecs import codec as codec_of

X = normal((16, 64), scale=1.0)
IN_COMPILE = "(inside torch.compile)"
IN_CHECKPOINT = "(in a checkpoint with use_reentrant=True; use use_reentrant=False)"
ALONE = "(called by themselves, outside of a forward of the model)"


def steps(model, count=3, x=X):
    for _ in range(count):
        loss_of(model(x)).backward()


def plain(text):
    """Return the text without line breaks."""
    return " ".join(text.split())


# -- layers that are not observed --------------------------------------------------------------------------


IN_BLOCKS = tuple(f"blocks.{i}.{j}" for i in (0, 1) for j in (0, 1, 3))


@pytest.mark.parametrize("regions", ["modules", "functions"])
def test_layers_in_reentrant_checkpoints_are_named(regions):
    """The linear layer after a norm shares the norm's copy if both are in a module, and then has nothing to observe."""
    model = Regions(True, regions)
    controller = bounded(model)
    steps(model)
    bounds = controller.bounds
    assert {row.name for row in bounds if row.input is not None} == {"first"}
    named = IN_BLOCKS
    if regions == "modules":
        named = tuple(name for name in IN_BLOCKS if not name.endswith(".1"))
    assert bounds.unobserved == named
    text = plain(str(bounds))
    assert f"; {len(named)} layers not observed; " in text
    more = f" and {len(named) - 4} more" * (len(named) > 4)
    line = f"not observed, so that they have 8 bits: {', '.join(named[:4])}{more} {IN_CHECKPOINT}"
    assert line in text and line in bounds._repr_html_()


@pytest.mark.parametrize("regions", ["modules", "functions", None])
def test_what_is_observed_is_not_named(regions):
    """No layer is named from the first step on, when nothing has been learned yet."""
    model = Regions(False, regions)
    controller = bounded(model)
    for _ in range(4):
        steps(model, 1)
        assert controller.bounds.unobserved == ()
    assert "not observed" not in str(controller.bounds)


def test_layers_that_keep_nothing_or_are_not_called_are_not_named():
    model = Regions(True)
    model.blocks[1].requires_grad_(False)
    model.spare = nn.Linear(64, 64)
    controller = bounded(model, overrides={"blocks.0.3": 5})
    steps(model)
    # (Of the second block the norm needs what it keeps for its input's gradient.)
    assert controller.bounds.unobserved == ("blocks.0.0", "blocks.1.0")


def test_layers_that_are_observed_at_last_are_named_no_more():
    model = Regions(True)
    controller = bounded(model, interval=1)
    steps(model)
    assert controller.bounds.unobserved
    model.reentrant = False
    steps(model)
    assert controller.bounds.unobserved == () and len(controller.bounds) > 3
    model.regions = None
    steps(model)
    assert controller.bounds.unobserved == ()


def test_layers_that_are_not_met_any_more_are_forgotten():
    model = Regions(True)
    controller = bounded(model, interval=1)
    steps(model)
    assert len(controller.bounds.unobserved) == 4
    model.blocks = model.blocks[:1]
    steps(model, FORGOTTEN + 1)
    assert controller.bounds.unobserved == ("blocks.0.0", "blocks.0.3")


@pytest.mark.slow
def test_layers_of_modules_that_are_called_one_by_one_are_all_named():
    """All layers are named although a module is observed in its turn only."""
    models = nn.ModuleDict({str(i): Regions(True) for i in range(4)})
    controller = bounded(models, interval=1)
    for _ in range(12):
        for model in models.values():
            loss_of(model(X)).backward()
    assert len(controller.bounds.unobserved) == 4 * 4


class Experts(nn.ModuleList):
    """A model of two experts, of which the second gets no samples."""

    def forward(self, x):
        parts = zip(self, (x, x[:0]), strict=True)
        return torch.cat([checkpoint(item, part, use_reentrant=False) for item, part in parts])


def test_layers_without_samples_are_not_named():
    model = Experts([nn.Linear(64, 64), nn.Linear(64, 64)])
    controller = bounded(model)
    steps(model, 4)
    assert controller.bounds.unobserved == ()


def test_layers_that_are_called_by_themselves_are_named():
    torch.manual_seed(0)
    model = nn.Sequential(block(), nn.Linear(64, 64))
    controller = bounded(model)
    for _ in range(3):
        loss_of(model[1](model[0](X))).backward()
    assert controller.bounds.unobserved == ("1",)
    assert {row.name for row in controller.bounds if row.input is not None} == {"0.0", "0.3"}
    assert ALONE in plain(str(controller.bounds))
    model = nn.Sequential(block(), nn.Linear(64, 64))
    controller = bounded(model)
    steps(model)
    fewbit.saved_bytes(model[1], X)  # no step of a training
    assert controller.bounds.unobserved == ()


class Block(nn.Sequential):
    """A sequence with its own forward. Dynamo skips frames of torch.nn, and would compile those of the layers instead."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


class Blocks(nn.Sequential):
    """A model of two equal blocks, for which the compiler uses one piece of code."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(64, 64), Block(*block()), Block(*block()))


COMPILED = tuple(f"{i}.{j}" for i in (1, 2) for j in (0, 1, 3))


COMPILER = {"backend": "aot_eager", "fullgraph": True}


def compiled(model, how):
    """Return the model, compiled as a whole or in its blocks."""
    if how == "whole":
        return torch.compile(model, **COMPILER)
    if how == "function":
        return torch.compile(lambda x: model(x), **COMPILER)
    for place in (1, 2) if "block" in how else ():
        if how == "wrapped blocks":
            model[place] = torch.compile(model[place], **COMPILER)
        else:
            model[place].compile(**COMPILER)
    if how == "in place":
        model.compile(**COMPILER)
    return model


@pytest.fixture
def dynamo():
    """Yield the counters of the compiler, without those of other tests."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", ["whole", "in place", "function", "blocks", "wrapped blocks"])
def test_compiled_layers_are_named(how, dynamo):
    """One piece of code may serve several equal layers. Naming them makes no break in a graph."""
    model = Blocks()
    controller = bounded(model)
    assert controller.bounds.unobserved == ()
    steps(compiled(model, how))
    bounds = controller.bounds
    is_whole = "block" not in how
    assert bounds.unobserved == ("0",) * is_whole + COMPILED
    assert len([row for row in bounds if row.input is not None]) == (not is_whole)
    named = f"not observed, so that they have 8 bits: {', '.join(bounds.unobserved[:4])} and "
    assert f"{named}{len(bounds.unobserved) - 4} more {IN_COMPILE}" in plain(str(bounds))
    if is_whole:
        assert str(bounds).startswith("no bounds found; not observed")
    assert not dynamo["graph_break"]
    assert how == "in place" or dynamo["stats"]["unique_graphs"] == 1


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_that_do_not_run_or_have_given_bits_are_not_named(dynamo):
    model = Blocks()
    controller = bounded(model, overrides={"2.1": 5})
    compiled(model, "blocks")
    loss_of(model[0](X)).backward()
    model.eval()
    model(X)
    assert controller.bounds.unobserved == ("0",)
    steps(model.train())
    assert set(COMPILED) - set(controller.bounds.unobserved) == {"2.1"}


def test_nothing_of_it_is_in_the_state_or_lost_in_copies():
    model = Regions(True)
    controller = bounded(model)
    steps(model)
    assert "unobserved" not in str(controller.state_dict()).lower()
    assert "blocks.0.3" not in str(controller.state_dict())
    steps(pickle.loads(pickle.dumps(model)))
    steps(copy.deepcopy(model))
    assert len(controller.bounds.unobserved) == 4


def test_steps_go_on_as_they_would():
    """Reports of unobserved layers change no number."""
    found = []
    for tells in (True, False):
        model = Regions(True)
        controller = bounded(model, interval=1)
        if not tells:
            controller.context.policy.report_unobserved = lambda layer, reason: None
        torch.manual_seed(1)
        steps(model, 4)
        found.append(
            (controller.state_dict(), [parameter.grad for parameter in model.parameters()])
        )
    assert found[0][0] == found[1][0]
    assert all(torch.equal(*pair) for pair in zip(found[0][1], found[1][1], strict=True))


def test_many_reasons_and_names():
    why = dict.fromkeys("abcdef", "here") | {"": "there"}
    text = plain(str(Bounds(empty="nothing", unobserved=why)))
    assert text == (
        "no bounds found; not observed, so that they have 8 bits: a, b, c, d and 2 more (here); "
        "not observed, so that they have 8 bits: the model (there)"
    )
    assert Bounds(unobserved=why).unobserved == (*"abcdef", "")


# -- codecs ------------------------------------------------------------------------------------------------


def images(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *layers, nn.Flatten(), nn.LazyLinear(10))


@pytest.mark.parametrize("name", ["quant+zvc", "jpeg", "error-bounded"])
def test_rows_say_what_codecs_made_of_them(name, monkeypatch):
    if name == "error-bounded":
        pytest.importorskip("imagecodecs")
    kept = {}
    quantize = BoundedCodec.quantize

    def noted(self, x, seed):
        payload = quantize(self, x, seed)
        kept[tuple(x.shape)] = payload.nbytes, x.numel()
        return payload

    monkeypatch.setattr(BoundedCodec, "quantize", noted)
    x = normal((8, 3, 18, 18), scale=1.0)
    model = images(nn.Conv2d(8, 8, 3))
    model(x)
    controller = bounded(model, codec=name, e2=0.5)
    steps(model, 3, x)
    rows = [row for row in controller.bounds if row.input is not None]
    sizes = {"0": (8, 3, 18, 18), "2": (8, 8, 16, 16), "4": (8, 8 * 14 * 14)}
    assert {row.name for row in rows} == set(sizes)
    for row in rows:
        nbytes, elements = kept[sizes[row.name]]
        if row.kept == "exact":
            assert row.bits is None
        else:
            assert row.bits == 8 * nbytes / elements
            assert f"{row.bits:.3g} {row.kept}" in str(controller.bounds)
    if name == "jpeg":
        assert {row.name: row.kept for row in rows}["4"] == "quant"
    by_bits = [row for row in rows if row.bits]
    total = sum(row.bits * row.elements for row in by_bits)
    assert controller.bounds.bits == total / sum(row.elements for row in by_bits)
    assert "the latest payload in this process" in plain(str(controller.bounds))


def test_of_a_state_nothing_has_been_kept_yet():
    x = normal((8, 3, 18, 18), scale=1.0)
    model = images()
    model(x)
    controller = bounded(model, codec="quant+zvc")
    steps(model, 3, x)
    state = controller.state_dict()
    assert "payload" not in str(state) and "latest" not in str(state)
    controller = bounded(model, codec="quant+zvc")
    controller.load_state_dict(state)
    rows = [row for row in controller.bounds if row.input is not None]
    assert {(row.kept, row.bits) for row in rows} == {("quant+zvc", None)}
    assert controller.bounds.bits is None
    steps(model, 1, x)
    assert controller.bounds.bits > 0


@pytest.mark.parametrize(
    ("name", "x", "kept"),
    [
        ("quant+zvc", normal((8, 64), scale=1.0), "quant"),
        ("quant+zvc", normal((8, 64), scale=1.0).relu() * (torch.arange(64) < 8), "quant+zvc"),
        ("jpeg", normal((8, 64), scale=1.0), "quant"),
        ("quant", torch.full((8, 64), math.nan), "exact"),
    ],
)
def test_the_codec_that_really_kept_it(name, x, kept):
    saver = BoundedCodec(name, 1e-2)
    payload = saver.quantize(x, torch.zeros(1, dtype=torch.int64))
    assert saver.stats.codec == kept and saver.stats.bits == 8 * payload.nbytes / x.numel()
    seed = torch.zeros(1, dtype=torch.int64)
    again = codec_of(kept if kept != "exact" else name).compress(x, 1e-2, seed)
    assert payload.nbytes == again.nbytes
    assert saver == BoundedCodec(name, 1e-2) != ExactCodec()


# -- kinds, given bits, width ------------------------------------------------------------------------------


class Called(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.act, self.b, self.last = (
            nn.Linear(64, 64),
            nn.GELU(),
            nn.Linear(64, 64),
            nn.Linear(64, 64),
        )

    def forward(self, x):
        return self.last(F.relu(F.silu(self.b(self.act(self.a(x))))))


def test_given_bits_of_activations_are_rows():
    model = Called()
    controller = bounded(model, overrides={"act": {"activation_bits": 3}}, interval=1)
    steps(model, 4)
    rows = {row.name: row for row in controller.bounds if row.input is None}
    assert {name: row.is_fixed for name, row in rows.items()} == {
        "act": True,
        ":silu": False,
        ":relu": False,
    }
    row = rows["act"]
    assert (row.bits, row.kept, row.kind, row.demand) == (3.0, "bits", "worst case", "input")
    assert re.search(r"act f' +input +worst case +\S+ +3 given", str(controller.bounds))
    free = Called()
    other = bounded(free, interval=1)
    steps(free, 1)
    assert "act" not in other.bounds
    assert controller.context.policy.activations.keys() == {":silu", ":relu"}


def test_given_bits_change_no_others():
    """Bits of layers are those of a policy that knows nothing of given activations."""
    found = []
    for forgets in (False, True):
        model = Called()
        controller = bounded(model, layers={"activation_bits": 4}, interval=1)
        policy = controller.context.policy
        if forgets:
            policy._bounded_activations = frozenset()
        torch.manual_seed(3)
        steps(model, 5)
        found.append((policy.averages, policy.ratio, policy.knowledge.has_warned))
    assert found[0] == found[1] and found[0][0]


def test_a_state_goes_on_where_bits_are_not_given_any_more():
    model = Called()
    controller = bounded(model, layers={"activation_bits": 4})
    steps(model)
    state = controller.state_dict()
    controller = bounded(model)
    controller.load_state_dict(state)
    rows = {row.name: row.is_fixed for row in controller.bounds if row.input is None}
    assert rows == {"act": False, ":silu": False, ":relu": False}


KINDS = ("in expectation", "measured", "worst case")


def row(name="encoder.layers.11.mlp", kind=KINDS[0], **facts):
    given = {"demand": "weight", "dx": 0.0123, "kept": "bits", "bits": 4.125, "elements": 64}
    return Bounded(name, 0, kind=kind, **{**given, **facts})


def test_kinds_are_named_alike_and_the_table_is_narrow():
    rows = [row(kind=kind, ratio=1.234) for kind in KINDS]
    rows += [row(dx=1.234e-05), row(bits=3.0, is_fixed=True), row(kept="exact", bits=None)]
    rows += [row(name="h.0", kept="quant+zvc", bits=5.3125), row(name="h.1", dx=math.inf)]
    found = Bounds(rows, 0.5, 1.2)
    lines = shown(found, 80).splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    for kind in KINDS:
        assert sum(kind in line for line in lines[2:]) >= 1
        assert kind in found._repr_html_()
    assert {record["kind"] for record in found.records()} == set(KINDS)
    assert all(text in str(found) for text in ("5.31 quant+zvc", "3 given", "1.2e-5"))


def test_an_empty_table_is_its_text_in_html():
    for found in (Bounds(empty="nothing <yet>"), Allocation(empty="nothing <yet>")):
        assert found._repr_html_().endswith("><b>nothing &lt;yet&gt;</b></div>")
    controller = bounded(Called())
    assert "no bounds found yet" in controller.bounds._repr_html_()


def test_steps_that_a_warning_takes(monkeypatch):
    """The documentation promises it: the three measurements with something to compare are those of steps 2, 4 and 8."""
    from fewbit.policies.error_bound.choices import BitChoice

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 24))
    x = normal((32, 96), scale=1.0)
    controller = bounded(model, e2=0.05)
    one_bit = "fewbit.policies.error_bound.choices.choose_bits"
    monkeypatch.setattr(one_bit, lambda slot, bound: BitChoice(1.0, 1.0, None))
    with warnings.catch_warnings():
        warnings.simplefilter("error", BoundWarning)
        steps(model, 8, x)
    assert controller.bounds.ratio > 1.05 and "more than 1.05" in plain(controller.bounds.title)
    with pytest.warns(BoundWarning):
        steps(model, 1, x)


# -- the report of the conversion --------------------------------------------------------------------------


def test_the_report_says_that_its_bits_are_those_of_the_first_steps():
    text = plain(str(bounded(Called(), sample=X).report))
    assert "8 bits before the first, as this report shows" in text
    assert "controller.bounds shows later ones" in text
    fixed = fewbit.compress_(Called(), 8, sample=X, verbose=False).report
    assert "before the first" not in str(fixed)


# -- models that are restored ------------------------------------------------------------------------------


def restored(model):
    fewbit.restore_(model)
    return "of a model that was restored or compressed anew since"


def again(model):
    fewbit.compress_(model, 4, verbose=False)
    return "of a model that was restored or compressed anew since"


@pytest.mark.parametrize("end", [restored, again])
@pytest.mark.parametrize("bits", [fewbit.ErrorBound(), 2.5], ids=repr)
def test_a_restored_model_is_not_shown_as_live(end, bits):
    model = Called()
    controller = fewbit.compress_(model, bits, verbose=False)
    steps(model)

    def found():
        return controller.allocation if bits == 2.5 else controller.bounds

    assert found() and "restored" not in found().title
    rows, state = list(found()), controller.state_dict()
    controller.load_state_dict(state)
    told = end(model)
    assert found().title.startswith(f"{told}: ") and list(found()) == rows
    assert told in plain(str(found())) and told in found()._repr_html_()
    with pytest.raises(InputError, match=f"as it is compressed now, got one {told}"):
        controller.load_state_dict(state)


@pytest.mark.parametrize("bits", [fewbit.ErrorBound(), 2.5, 4], ids=repr)
def test_a_model_that_is_gone(bits):
    model = Called()
    controller = fewbit.compress_(model, bits, verbose=False)
    state = controller.state_dict()
    del model
    with pytest.raises(InputError, match="got one of a model that is gone"):
        controller.load_state_dict(state)
    if isinstance(bits, fewbit.ErrorBound):
        assert str(controller.bounds).startswith("of a model that is gone: no bounds found yet")


def test_what_was_never_converted_is_not_restored():
    model = Called()
    controller = fewbit.compress_(model, fewbit.Level("L0"), verbose=False)
    controller.load_state_dict(controller.state_dict())


# -- states of others --------------------------------------------------------------------------------------


class Parts(nn.Module):
    """A model whose parts are called one by one."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            setattr(self, name, block())


@pytest.mark.parametrize("bits", [fewbit.ErrorBound(), 2.5], ids=repr)
def test_an_empty_state_of_another_model_is_refused_by_its_modules(bits):
    """A state from before the first measurement has the called modules and nothing else."""
    states = {}
    for names in (("encoder", "head"), ("encoder", "tail")):
        model = Parts(*names)
        controller = fewbit.compress_(model, bits, verbose=False)
        getattr(model, names[0])(X), getattr(model, names[1])(X)
        states[names] = controller.state_dict()
        assert not states[names]["variables"]
    controller.load_state_dict(states[names])
    before = controller.state_dict()
    with pytest.raises(InputError, match="got one with a module 'head', which it lacks"):
        controller.load_state_dict(states[("encoder", "head")])
    assert controller.state_dict() == before


def test_a_state_from_before_the_first_step_is_one():
    model = Called()
    controller = bounded(model)
    state = controller.state_dict()
    controller.load_state_dict(state)
    steps(model)
    assert controller.bounds
    controller.load_state_dict(state)
    assert not controller.bounds
