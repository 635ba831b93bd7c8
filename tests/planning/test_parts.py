"""The parts of `fewbit.fit_`: blocks of a model, settings and their calls, bytes from a timeline by hand, costs, documents."""

import json
import math

import pytest
import torch
from torch import nn

import fewbit
from fewbit.errors import InputError
from fewbit.planning import costs
from fewbit.planning.block_settings import EXACT, OPTIONS, RECOMPUTED, Option, Settings, everywhere
from fewbit.planning.blocks import find_blocks
from fewbit.planning.choose import Part
from fewbit.planning.fastest_fit import FastestFit, FrontPoint, rows_of
from fewbit.planning.timeline import BEGIN, END, ENTER, LEAVE, LOSS, Event, Mark, Timeline

WIDTH = 64


def block():
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())


def net(count=3):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(*[block() for _ in range(count)]),
        nn.Linear(WIDTH, 4),
    )


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(block(), block())


def twice():
    """Blocks that have two paths."""
    model = nn.Module()
    model.net = nn.Module()
    model.layers = model.net.layers = nn.ModuleList([block(), block()])
    return model


def nested():
    """Two stages of blocks in a list, and a block with a list of its own."""
    model = nn.Module()
    model.stages = nn.ModuleList([Stage(), Stage()])
    experts = [nn.Sequential(nn.ModuleList([block(), block()])) for _ in range(2)]
    model.layers = nn.ModuleList(
        [nn.TransformerDecoderLayer(8, 1, 8), nn.TransformerDecoderLayer(8, 1, 8)]
    )
    model.rest = nn.ModuleDict({"a": experts[0]})
    return model


class NumberedStage(nn.Module):
    def __init__(self, count):
        super().__init__()
        for number in range(count):
            self.add_module(f"b{number + 1}", Pair())


class Pair(nn.Module):
    """A block with numbered parts, which are no blocks."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = block(), block()


def numbered():
    """A model without lists, inside of another one."""
    model = nn.Module()
    model.stem, model.s1, model.s2 = Pair(), NumberedStage(1), NumberedStage(2)
    outer = nn.Module()
    outer.backbone, outer.head = model, nn.Linear(2, 2)
    return outer


def numbered_lists():
    """Lists whose names end in numbers; their modules are the blocks, and one list has none."""
    model = nn.Module()
    model.list1, model.list2 = (nn.ModuleList([block() for _ in range(n)]) for n in (2, 3))
    model.list3 = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    return model


FOUND = [
    (numbered, None, ["backbone.s1", "backbone.s2.b1", "backbone.s2.b2"]),
    (
        lambda: nn.Sequential(*[nn.ModuleDict({"a": block(), "b": block()}) for _ in range(2)]),
        None,
        ["0.a", "0.b", "1.a", "1.b"],
    ),
    (net, None, ["1.0", "1.1", "1.2"]),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), None, []),
    (lambda: nn.Linear(2, 2), None, []),
    (
        nested,
        None,
        [*(f"stages.{i}.blocks.{j}" for i in range(2) for j in range(2)), "layers.0", "layers.1", "rest.a.0.0", "rest.a.0.1"],
    ),
    (numbered_lists, None, ["list1.0", "list1.1", "list2.0", "list2.1", "list2.2"]),
    (twice, None, ["net.layers.0", "net.layers.1"]),
    (net, "1.[02]", ["1.0", "1.2"]),
    (net, ["1", "1.0"], ["1"]),
]  # fmt: skip


@pytest.mark.parametrize("make, which, paths", FOUND)
def test_blocks(make, which, paths):
    model = make()
    found = find_blocks(model, which)
    assert list(found) == paths
    assert all(model.get_submodule(path) is module for path, module in found.items())


@pytest.mark.parametrize("which", ["nope", [3]])
def test_blocks_that_are_not_there(which):
    with pytest.raises(InputError, match="blocks: expected"):
        find_blocks(net(), which)


MIXED = Settings({"1.0": EXACT, "1.1": Option(4), "1.2": Option(2, True, 8)}, None)


@pytest.mark.parametrize(
    "settings",
    [
        MIXED,
        Settings({"1.0": RECOMPUTED, "1.1": Option(3), "1.2": EXACT}, 4),
        Settings({}, 2),
        everywhere(["1.0"], EXACT),
    ],
)
def test_settings_their_code_and_their_document(settings):
    """The code, the document and `apply` make models that save the same bytes, and the model can be as it was."""
    x = torch.randn(256, WIDTH)
    models = [net() for _ in range(3)]
    exact = fewbit.saved_bytes(models[0], x).total
    settings.apply(models[0])
    exec(settings.code, {"fewbit": fewbit, "model": models[1]})
    Settings.from_dict(json.loads(json.dumps(settings.to_dict()))).apply(models[2])
    totals = [fewbit.saved_bytes(model, x).total for model in models]
    assert totals[0] == totals[1] == totals[2]
    changes = settings.rest is not None or any(
        option != EXACT for option in settings.blocks.values()
    )
    assert (totals[0] < exact) == changes
    everywhere([], EXACT).apply(models[0])
    assert fewbit.saved_bytes(models[0], x).total == exact


def test_the_code_is_the_same_in_all_mixtures():
    """A block has the bits of its option whatever the rest has, and a comment explains the path ''."""
    blocks = {"1.0": Option(4), "1.1": EXACT, "1.2": Option(2)}
    assert Settings(blocks).code == (
        "# '': the whole model, which stays exact but for the paths after it\n"
        "fewbit.compress_(model, fewbit.FixedBits(4), overrides={'': None, '1.0': 4, '1.2': 2})"
    )
    lines = Settings(blocks, None, "head").code.splitlines()
    assert lines[0] == "fewbit.chunk_loss_(model, 'head')" and lines[1].startswith("# ''")
    quantizers = []
    for rest in (None, 4, 2):
        model = net()
        for each in model[1]:
            each.append(nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, 0.0))
        Settings(blocks, rest).apply(model)
        assert "#" not in Settings(blocks, 4).code
        quantizers.append([repr(getattr(one, "quantizer", None)) for one in model[1].modules()])
    assert quantizers[0] == quantizers[1] == quantizers[2]


def test_names_of_options():
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)
    assert Option(4, True, 8, True).name == "recompute, input 8 bits on host, 4 bits"


def test_bytes_by_hand():
    """Two blocks. Letters are storages; block 0 gets x from gap 0, and gets it counted; the last gap frees its result."""
    steps = [
        Event("x", 10), Mark(ENTER, 7, ("x",)), Event("a", 5), Event("t", 100), Event("t", -100), Event("y", 3), Mark(LEAVE, 7),
        Mark(ENTER, 2, ("y",)), Event("b", 7), Event("z", 4), Mark(LEAVE, 2), Event("l", 2), Mark(LOSS), Event("g", 50),
        Mark(BEGIN, 2), Event("g", -50), Event("z", -4), Event("b", -7), Event("w", 30), Mark(END, 2), Mark(BEGIN, 7),
        Event("y", -3), Event("v", 20), Mark(END, 7), Event("x", -10),
    ]  # fmt: skip
    timeline = Timeline({"weights": 1000}, steps)
    assert timeline.calls() == [7, 2]
    found = timeline.bytes_of([7, 2])
    assert found.saved.tolist() == [0, 15, 0, 14, 2]
    assert found.peak.tolist() == [1067, 1115, 1050, 1081, 1081]
    assert found.alone.tolist() == [1067, 1115, 1035, 1066, 1052]
    one = timeline.bytes_of([2])
    assert one.saved.tolist() == [15, 14, 2]


def test_costs_are_cached(monkeypatch, tmp_path):
    """The second call reads the file; a damaged file, and one of another version, are measured again."""
    monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "SHORTEST", 0.0)
    monkeypatch.setattr(costs, "SIZE", 2**14)
    device, calls, calibrate = torch.device("cpu"), [], costs.calibrate

    def counted(device):
        calls.append(device)
        return calibrate(device)

    monkeypatch.setattr(costs, "calibrate", counted)
    found = costs.costs_of(device)
    assert costs.costs_of(device) == found and len(calls) == 1
    assert (
        found.per_flop > 0
        and found.per_byte > 0
        and all(value > 0 for value in found.per_element.values())
    )
    (path,) = tmp_path.iterdir()
    for text in ("{", path.read_text().replace('"version": "', '"version": "other ')):
        path.write_text(text)
        costs.costs_of(device)
    assert len(calls) == 3


def result(**changes):
    values = dict(
        model="Net", optimizer="AdamW", batch=4, memory=2**30, peak=2**29, seconds=1.1, bound=1.09, error=0.01, limit=0.1,
        exact_peak=2**31, exact_seconds=1.0, settings=MIXED, front=(FrontPoint(2**28, 1.5, 0.1), FrontPoint(2**30, 1.0, 0.0)),
        rows=rows_of(MIXED, [Part(*torch.ones(4, 10).numpy()) for _ in range(7)], [0] * 7), notes=("a note",),
    )  # fmt: skip
    return FastestFit(**(values | changes))


def test_the_result_is_saved_and_loaded(tmp_path):
    for number, one in enumerate([result(parameters=9), result(error=math.nan, limit=math.inf)]):
        path = tmp_path / f"{number}.json"
        one.save(path)
        loaded = FastestFit.load(path)
        assert str(loaded) == str(one) and loaded.to_dict() == one.to_dict()
        assert loaded.settings == MIXED
    text = str(one)
    for part in (
        "1.0",
        "4 bits",
        "recompute, input 8 bits, 2 bits",
        "rest",
        "the next faster choice: 1.00 GiB",
        "the next smaller choice: 256.00 MiB",
    ):
        assert part in text
    assert one.better.seconds == 1.0 and one.smaller.peak == 2**28
    document = json.loads(result().to_json())
    document["settings"]["rest"] = 9
    with pytest.raises(InputError, match="settings.rest"):
        FastestFit.from_json(json.dumps(document))


def test_a_result_applies_to_a_model_with_these_blocks_only():
    model = net()
    one = result()
    one.apply(model)
    other = nn.Sequential(nn.Linear(2, 2))
    message = "expected one with the blocks of Net, for which .*, got a Sequential without '1.0'"
    with pytest.raises(InputError, match=message) as error:
        one.apply(other)
    assert "\n" not in str(error.value) and type(other[0]) is nn.Linear
    with pytest.raises(InputError, match="expected a torch.nn.Module, got int"):
        one.apply(3)
    headed = result(settings=Settings(MIXED.blocks, None, "head"))
    with pytest.raises(InputError, match="a Sequential without 'head'"):
        headed.apply(model)
    narrow = result(parameters=10)
    with pytest.raises(InputError, match="with the 10 parameters of Net, .*, got [0-9,]+; call"):
        narrow.apply(model)
