"""The contents of `controller.bounds`: unobserved layers, codecs, given bits, and models that were restored."""

import math

import pytest
import torch
from composed import Composed
from probed_models import loss_of
from regions import Regions, block
from samples import normal
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import bounded, saved_rows

import fewbit
from fewbit.errors import InputError
from fewbit.policies.error_bound.bounds import Bounded, Bounds
from fewbit.policies.error_bound.choices import BoundedCodec, ExactCodec
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


IN_BLOCKS = tuple(f"blocks.{i}.{j}" for i in (0, 1) for j in (0, 1, 3))


@pytest.mark.parametrize("regions", ["modules", "functions"])
def test_layers_in_reentrant_checkpoints_are_named(regions):
    """The linear layer after a norm shares the norm's copy if both are in a module, and then has nothing to observe."""
    model = Regions(True, regions)
    controller = bounded(model)
    steps(model)
    bounds = controller.bounds
    assert {row.name for row in saved_rows(controller)} == {"first"}
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
    assert len(controller.bounds.unobserved) == 4
    model.reentrant = False
    steps(model)
    assert controller.bounds.unobserved == () and len(controller.bounds) > 3


def test_layers_that_are_not_met_any_more_are_forgotten():
    model = Regions(True)
    controller = bounded(model, interval=1)
    steps(model)
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


def test_layers_without_samples_are_not_named():
    """The second of two experts gets no samples."""
    model = Composed(
        lambda model, x: (
            checkpoint(model.a, x, use_reentrant=False).sum()
            + checkpoint(model.b, x[:0], use_reentrant=False).sum()
        ),
        a=nn.Linear(64, 64),
        b=nn.Linear(64, 64),
    )
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
    assert {row.name for row in saved_rows(controller)} == {"0.0", "0.3"}
    assert ALONE in plain(str(controller.bounds))
    model = nn.Sequential(block(), nn.Linear(64, 64))
    controller = bounded(model)
    steps(model)
    fewbit.saved_bytes(model[1], X)  # no step of a training
    assert controller.bounds.unobserved == ()


class Block(nn.Sequential):
    """A sequence with its own forward. Dynamo would compile the layers of a torch.nn.Sequential one by one."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


def blocks():
    """Return a model of two equal blocks, for which the compiler uses one piece of code."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), Block(*block()), Block(*block()))


COMPILED = tuple(f"{i}.{j}" for i in (1, 2) for j in (0, 1, 3))
COMPILER_WARNINGS = (
    "ignore::DeprecationWarning:torch.*",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)
COMPILER = {"backend": "aot_eager", "fullgraph": True}


def compiled(model, how):
    """Return the model, compiled as a whole or in its blocks."""
    if how == "function":
        return torch.compile(lambda x: model(x), **COMPILER)
    for part in model[1:] if how == "blocks" else [model]:
        part.compile(**COMPILER)
    return model


@pytest.fixture
def dynamo():
    """Yield the counters of the compiler, without those of other tests."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters


@pytest.mark.inductor
@pytest.mark.filterwarnings(*COMPILER_WARNINGS)
@pytest.mark.parametrize("how", ["in place", "function", "blocks"])
def test_compiled_layers_are_named(how, dynamo):
    """One piece of code may serve several equal layers. Naming them makes no break in a graph."""
    model = blocks()
    controller = bounded(model)
    assert controller.bounds.unobserved == ()
    steps(compiled(model, how))
    bounds = controller.bounds
    is_whole = how != "blocks"
    assert bounds.unobserved == ("0",) * is_whole + COMPILED
    assert len(saved_rows(controller)) == (not is_whole)
    named = f"not observed, so that they have 8 bits: {', '.join(bounds.unobserved[:4])} and "
    assert f"{named}{len(bounds.unobserved) - 4} more {IN_COMPILE}" in plain(str(bounds))
    if is_whole:
        assert str(bounds).startswith("no bounds found; not observed")
    assert not dynamo["graph_break"]
    assert how == "in place" or dynamo["stats"]["unique_graphs"] == 1


@pytest.mark.inductor
@pytest.mark.filterwarnings(*COMPILER_WARNINGS)
def test_compiled_layers_that_do_not_run_or_have_given_bits_are_not_named(dynamo):
    model = blocks()
    controller = bounded(model, overrides={"2.1": 5})
    compiled(model, "blocks")
    loss_of(model[0](X)).backward()
    model.eval()
    model(X)
    assert controller.bounds.unobserved == ("0",)
    steps(model.train())
    assert set(COMPILED) - set(controller.bounds.unobserved) == {"2.1"}


def test_many_reasons_and_names():
    why = dict.fromkeys("abcdef", "here") | {"": "there"}
    text = plain(str(Bounds(empty="nothing", unobserved=why)))
    assert text == (
        "no bounds found; not observed, so that they have 8 bits: a, b, c, d and 2 more (here); "
        "not observed, so that they have 8 bits: the model (there)"
    )
    assert Bounds(unobserved=why).unobserved == (*"abcdef", "")


def images(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *layers, nn.Flatten(), nn.LazyLinear(10))


@pytest.mark.parametrize("name", ["quant+zvc", "jpeg", "error-bounded"])
def test_rows_say_what_codecs_made_of_them(name, monkeypatch):
    if name == "error-bounded":
        pytest.importorskip("imagecodecs")
    kept, quantize = {}, BoundedCodec.quantize

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
    rows = {row.name: row for row in saved_rows(controller)}
    sizes = {"0": (8, 3, 18, 18), "2": (8, 8, 16, 16), "4": (8, 8 * 14 * 14)}
    assert rows.keys() == sizes.keys()
    for path, row in rows.items():
        nbytes, elements = kept[sizes[path]]
        assert row.bits == (None if row.kept == "exact" else 8 * nbytes / elements)
        assert row.kept == "exact" or f"{row.bits:.3g} {row.kept}" in str(controller.bounds)
    assert name != "jpeg" or rows["4"].kept == "quant"
    by_bits = [row for row in rows.values() if row.bits]
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
    rows = saved_rows(controller)
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


def called():
    torch.manual_seed(0)
    return Composed(
        lambda model, x: model.last(F.relu(F.silu(model.b(model.act(model.a(x)))))),
        a=nn.Linear(64, 64),
        act=nn.GELU(),
        b=nn.Linear(64, 64),
        last=nn.Linear(64, 64),
    )


def test_a_state_goes_on_where_bits_are_not_given_any_more():
    model = called()
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
    assert found.title.startswith("e2 = 0.5: 8 tensors that layers save, ")
    lines = shown(found, 80).splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    for kind in KINDS:
        assert sum(kind in line for line in lines[2:]) >= 1
        assert kind in found._repr_html_()
    assert {record["kind"] for record in found.records()} == set(KINDS)
    assert all(text in str(found) for text in ("5.31 quant+zvc", "3 given", "1.2e-5"))


@pytest.mark.parametrize(
    "end",
    [fewbit.restore_, lambda model: fewbit.compress_(model, 4, verbose=False)],
    ids=["restored", "again"],
)
@pytest.mark.parametrize("bits", [fewbit.ErrorBound(), 2.5], ids=repr)
def test_a_restored_model_is_not_shown_as_live(end, bits):
    model = called()
    controller = fewbit.compress_(model, bits, verbose=False)
    steps(model)

    def found():
        return controller.allocation if bits == 2.5 else controller.bounds

    assert found() and "restored" not in found().title
    rows, state = list(found()), controller.state_dict()
    controller.load_state_dict(state)
    end(model)
    told = "of a model that was restored or compressed anew since"
    assert found().title.startswith(f"{told}: ") and list(found()) == rows
    assert told in plain(str(found())) and told in found()._repr_html_()
    with pytest.raises(InputError, match=f"as it is compressed now, got one {told}"):
        controller.load_state_dict(state)


@pytest.mark.parametrize("bits", [fewbit.ErrorBound(), 2.5, 4], ids=repr)
def test_a_model_that_is_gone(bits):
    model = called()
    controller = fewbit.compress_(model, bits, verbose=False)
    state = controller.state_dict()
    del model
    with pytest.raises(InputError, match="got one of a model that is gone"):
        controller.load_state_dict(state)
    if isinstance(bits, fewbit.ErrorBound):
        assert str(controller.bounds).startswith("of a model that is gone: no bounds found yet")


@pytest.mark.parametrize("bits", [fewbit.ErrorBound(), 2.5], ids=repr)
def test_an_empty_state_of_another_model_is_refused_by_its_modules(bits):
    """A state from before the first measurement has the called modules and nothing else."""
    states = {}
    for names in (("encoder", "head"), ("encoder", "tail")):
        model = Composed(None, **{name: block() for name in names})
        controller = fewbit.compress_(model, bits, verbose=False)
        getattr(model, names[0])(X), getattr(model, names[1])(X)
        states[names] = controller.state_dict()
        assert not states[names]["knowledge"]["slots"]
    controller.load_state_dict(states[names])
    before = controller.state_dict()
    with pytest.raises(InputError, match="got one with a module 'head', which it lacks"):
        controller.load_state_dict(states[("encoder", "head")])
    assert controller.state_dict() == before


@pytest.mark.parametrize("bits", [fewbit.ErrorBound(), fewbit.Level("L0")], ids=repr)
def test_a_state_from_before_the_first_step_is_one(bits):
    model = called()
    controller = fewbit.compress_(model, bits, verbose=False)
    state = controller.state_dict()
    controller.load_state_dict(state)
    steps(model)
    assert bool(controller.bounds) == isinstance(bits, fewbit.ErrorBound)
    controller.load_state_dict(state)
    assert not controller.bounds


@pytest.mark.parametrize("bits", [fewbit.ErrorBound(), fewbit.AdaptiveBits(2)], ids=repr)
def test_a_state_after_a_step_that_overflowed_can_be_loaded(bits):
    model = called()
    controller = fewbit.compress_(model, bits, verbose=False)
    (model(X).sum() * math.inf).backward()
    state = controller.state_dict()
    controller.load_state_dict(state)
    assert controller.state_dict() == state
