"""The controller: its report, its state, and the sample numbers that it accepts."""

import copy

import numpy as np
import pytest
import torch
from probed_models import MODELS
from samples import normal
from torch import nn
from training import build, step

import fewbit
from fewbit.convert.report import Report
from fewbit.errors import InputError
from fewbit.policies.allocation_report import Allocated, Allocation


@pytest.mark.parametrize("level", ["L2", "L2.5"])
def test_levels_without_bits_by_layer_say_so(level):
    model, controller, x = build(bits=fewbit.Level(level, 4))
    step(model, x)
    assert "reports no bits by layer" in str(controller.allocation)


def test_an_allocation_without_chosen_bits_has_no_average_of_them():
    assert Allocation().bits is None
    rows = [Allocated(name, 0, bits, True, 100, 4, 1.0) for name, bits in (("a", 4.0), ("b", 3.0))]
    fixed = Allocation(rows)
    assert fixed.bits == 3.5
    title = "all bits are fixed by the user: 3.5 bits on average for 2 tensors that layers save"
    assert fixed.title == title


def test_layers_with_names_cut_alike_are_different_rows():
    rows = [Allocated(f"{n}.{'x' * 60}", 0, 2.0, False, 100, 4, 1.0) for n in (1, 2)]
    lines = str(Allocation(rows)).splitlines()
    assert lines[4].startswith("1.xxx") and lines[5].startswith("2.xxx")
    assert all(len(line) <= 80 for line in lines)


def test_numbers_of_any_type():
    for bits in (4.0, np.int64(4), np.float32(4.0)):
        model = MODELS["convnet"][0]()
        assert fewbit.compress_(model, bits, verbose=False).config == fewbit.FixedBits(bits)
    controller = fewbit.compress_(MODELS["convnet"][0](), np.float32(1.75), verbose=False)
    assert controller.config == fewbit.AdaptiveBits(1.75) and controller.context.policy.bits == 1.75


def test_the_report_says_level_and_budget(capsys):
    model, sample = MODELS["convnet"][0](), normal(MODELS["convnet"][1], scale=1.0)
    fewbit.compress_(model, fewbit.Budget("1 GiB"), sample=sample)
    text = " ".join(capsys.readouterr().out.split())
    assert "8 bits on average, shared" in text
    assert "budget: 1.00 GiB for the sample; 8 bits an element, the most, need less" in text
    fewbit.compress_(model, 4)
    assert "fewbit.FixedBits(" in capsys.readouterr().out
    model.eval()
    with pytest.raises(InputError, match="budget: expected a model in training mode"):
        fewbit.compress_(model, fewbit.Budget("1 GiB"), sample=sample, verbose=False)


def test_the_report_says_which_tensors_the_kind_of_copies_does_not_concern():
    for codec, ending in (
        ("quant", ""),
        ("jpeg", "; no effect on tensors that the codec jpeg saves"),
    ):
        config, layers = fewbit.ErrorBound(codec=codec), {"quantizer": "uniform"}
        controller = fewbit.compress_(nn.Linear(32, 8), config, layers=layers, verbose=False)
        assert f"quantized copies: uniform{ending}" in controller.report.notes


def test_a_sample_that_is_part_of_a_larger_tensor_counts_for_itself(capsys):
    model, (n, *rest) = MODELS["convnet"][0](), MODELS["convnet"][1]
    data = normal((100 * n, *rest), scale=1.0)
    ours = fewbit.compress_(model, 4, sample=data[:n], verbose=False).report.saved
    alone = fewbit.compress_(model, 4, sample=data[:n].clone(), verbose=False).report.saved
    assert ours == alone


def test_bytes_by_op_in_order_without_rows_of_nothing():
    """Ops that save bytes now come first, then those that saved some before; rows of 0.00 twice are summed up."""
    mib = 2**20
    before = {"b": 2 * mib, "a": 3 * mib, "kept": mib, "d": mib} | dict.fromkeys("pqrs", 4000)
    after = {"kept": mib, "new": mib // 8, "u": 30}
    lines = str(Report((), (), (before, after))).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("───")) + 1
    rows = [line.split() for line in lines[start:]]
    assert rows == [
        ["kept", "1.00", "1.00"],
        ["new", "0.00", "0.12"],
        ["a", "3.00", "0.00"],
        ["b", "2.00", "0.00"],
        ["d", "1.00", "0.00"],
        ["others", "0.02", "0.00"],
        [],
        ["total", "(6.24x", "less)", "7.02", "1.13"],
    ]
    few = str(Report((), (), ({"a": 2 * mib, "p": 40}, {"kept": mib, "u": 30})))
    assert "others" not in few and "0.00     0.00" not in few
    # In bytes, a row says what it is.
    small = str(Report((), (), ({"a": 200, "b": 1}, {"a": 100})))
    assert small.splitlines()[-3].split() == ["b", "1", "0"]


# -- numbers of samples, and states ------------------------------------------------------------------------


def numbered(level, numbers):
    """Return a controller that saw a batch with these numbers once, and its model and batch."""
    model, controller, x = build(bits=fewbit.Level(level, 2))
    controller.number_samples(numbers)
    step(model, x)
    return model, controller, x


def assert_same_state(state, expected):
    assert state.keys() == expected.keys()
    assert all(state[key] == expected[key] for key in state.keys() - {"magnitudes", "numbers"})
    if "numbers" in expected:
        assert torch.equal(state["numbers"], expected["numbers"])
        for row, before in zip(state["magnitudes"], expected["magnitudes"], strict=True):
            assert row["name"] == before["name"] and row["input"] == before["input"]
            torch.testing.assert_close(row["squares"], before["squares"], equal_nan=True)


@pytest.mark.parametrize("level", ["L2.5", "L3"])
def test_numbers_are_copied(level):
    """A loader may overwrite the memory of its numbers before the forward."""
    model, controller, x = build(bits=fewbit.Level(level, 2))
    buffer = torch.arange(8)
    controller.number_samples(buffer)
    buffer += 100
    step(model, x)
    assert controller.state_dict()["numbers"].tolist() == list(range(8))


@pytest.mark.parametrize(
    "numbers", [list(range(8)), range(8), np.arange(8), np.arange(8, dtype=np.uint16)], ids=str
)
def test_numbers_under_another_default_device(numbers):
    model, controller, x = build(bits=fewbit.SampleBits(2))
    with torch.device("meta"):
        controller.number_samples(numbers)
    step(model, x)
    with torch.device("meta"):
        state = controller.state_dict()
    assert state["numbers"].device.type == "cpu" and state["numbers"].tolist() == list(range(8))
    with pytest.raises(InputError, match="expected samples' numbers on the CPU, got them on meta"):
        controller.number_samples(torch.arange(8, device="meta"))


def test_numbers_of_64_bits_without_a_sign():
    numbers = np.arange(8, dtype=np.uint64) + np.uint64(2**63 - 4)
    model, controller, _ = numbered("L2.5", numbers)
    state = controller.state_dict()["numbers"]
    assert len(state.unique()) == 8 and state.dtype == torch.int64
    np.testing.assert_array_equal(state.numpy().astype(np.uint64), numbers)


def row(**changes):
    """Return one row of magnitudes."""
    return {"name": "0", "input": 0, "squares": torch.ones(8), **changes}


@pytest.mark.parametrize("level", ["L2.5", "L3"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"magnitudes": 3}, "magnitudes: expected rows of name, input and squares"),
        ({"magnitudes": [{"nome": 1}]}, "got one of nome: int"),
        ({"magnitudes": ["ab"]}, "got str"),
        ({"magnitudes": torch.ones(2)}, r"got a tensor of shape \(2,\)"),
        ({"magnitudes": [row(squares=[1.0])]}, "squares: list"),
        ({"magnitudes": [row(squares=torch.ones(2, 2))]}, r"squares: a tensor of shape \(2, 2\)"),
        ({"magnitudes": [row(squares=torch.ones(2, dtype=torch.int64))]}, r"torch\.int64"),
        ({"magnitudes": [row(name=1)]}, "name: int"),
        ({"magnitudes": [row(input=True)]}, "input: bool"),
        ({"numbers": torch.zeros(2, dtype=torch.int64)}, "numbers: expected those of a controller's"),
        ({"numbers": [1, 2]}, "numbers: expected those of a controller's .*, got list"),
    ],
)  # fmt: skip
def test_states_with_other_magnitudes_change_nothing(level, change, message):
    model, controller, _ = numbered(level, range(8))
    before = controller.state_dict()
    with pytest.raises(InputError, match=message) as caught:
        controller.load_state_dict({**before, **change})
    assert "\n" not in str(caught.value)
    assert_same_state(controller.state_dict(), before)


LEARNING = {
    "fewbit.FixedBits(4)": fewbit.FixedBits(4),
    "SampleBits": fewbit.SampleBits(2),
    "AdaptiveBits": fewbit.AdaptiveBits(2),
    "ErrorBound": fewbit.ErrorBound(),
}


def learned(name):
    """Return a model and its controller after two steps; one that takes numbers of samples has them."""
    model, controller, x = build(bits=LEARNING[name])
    if name == "SampleBits":
        controller.number_samples(range(8))
    step(model, x), step(model, x)
    return model, controller


@pytest.mark.parametrize("name", LEARNING)
def test_states_of_something_else_change_nothing(name):
    model, controller = learned(name)
    before = controller.state_dict()
    others = [
        ({"garbage": 1}, "with 'garbage'"),
        ({"0.weight": torch.ones(2)}, "with '0.weight'"),
        ({"magnitudes": []}, "with 'magnitudes' alone"),
        ({"numbers": torch.arange(8)}, "with 'numbers' alone"),
        *((learned(other)[1].state_dict(), f"of {other}") for other in LEARNING if other != name),
    ]
    for state, found in others:
        if not state:
            if name == "SampleBits":  # has learned nothing from a state without anything
                continue
            found = "of a configuration that learns nothing"
        with pytest.raises(InputError) as caught:
            controller.load_state_dict(state)
        assert str(caught.value) == (
            f"expected the state of a controller of {name}, got one {found}"
        )
        assert_same_state(controller.state_dict(), before)


@pytest.mark.parametrize("level", ["L2", "L2.5"])
def test_a_state_without_anything_learned_is_one(level):
    model, controller, *_ = build(bits=fewbit.Level(level, 4))
    assert controller.state_dict() == {}
    controller.load_state_dict({})
    if level == "L2.5":
        model, controller, _ = numbered(level, range(8))
        controller.load_state_dict({})
        assert controller.state_dict() == {}


def edited(state, path, value):
    """Return a copy with another value at a path of keys."""
    state = copy.deepcopy(state)
    inside = state
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return state


DAMAGED = [
    (("e2",), float("nan"), "e2: expected a number from 0 to 1e+100, got nan"),
    (("window",), "best", "window: expected 'mean' or 'max', got 'best'"),
    (("by_channel",), True, "by_channel: expected False, got True"),
    (("next",), 2**60, "next: expected a whole number"),
    (("variables", 0, "spreads"), [[1.0, 2.0]], "entries in the last one, got 2"),
    (("variables", 0, "spreads"), [], "variables[0].spreads: expected a list of 1 to 10 entries, got 0"),
    (("variables", 0, "spreads"), [[1e300]], "variables[0].spreads[0][0]: expected a number from 0 to 1e+100"),
    (("variables", 0, "average"), -1, "average: expected a number from 0 to 64, got -1"),
    (("variables", 0, "elements"), 1.5, "got 1.5"),
    (("variables", 0, "demands"), [{}], "demands[0].label: expected a value, got none"),
    (("variables", 0, "demands", 0, "rows"), [[1, 2]], "rows[0]: expected a list of 3 entries, got [1, 2]"),
    (("variables", 0, "weighed"), 3, "weighed: expected 0 without weights, and more with them, got 3"),
    (("variables", 0, "samples"), 10**400, "variables[0].samples: expected a whole number from 0 to"),
    (("variables", 0, "demands", 0, "rows"), [], "demands[0].rows: expected a list of 1 to 10 entries, got 0"),
    (("variables", 0, "demands", 0, "kind"), "guess", "demands[0].kind: expected 'in expectation' or 'measured'"),
    (("variables", 0, "name"), "\x1b[2J", r"a layer '\x1b[2J', which it lacks"),
    (("activations", 0, "function"), "sys:exit", "expected the name of a function that fewbit has, got 'sys:exit'"),
    (("activations", 0, "function"), "elu", "parameters: expected 1 of elu, got []"),
    (("activations", 0, "parameters"), [1.0], "parameters: expected 0 of gelu, got [1.0]"),
    (("activations", 0, "rows"), [], "activations[0].rows: expected a list of 1 to 10 entries, got 0"),
]  # fmt: skip


def test_damaged_states_of_the_error_bound_policy_change_nothing():
    """They must raise a clear error now, not OverflowError, IndexError or an error in a later step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    controller = fewbit.compress_(model, fewbit.ErrorBound(interval=2), verbose=False)
    x = torch.randn(8, 16)
    for _ in range(4):
        model(x).square().sum().backward()
    before = controller.state_dict()
    for path, value, message in DAMAGED:
        with pytest.raises(InputError) as caught:
            controller.load_state_dict(edited(before, path, value))
        assert message in str(caught.value) and str(caught.value).isprintable()
        assert controller.state_dict() == before
    controller.load_state_dict(before)
    assert controller.state_dict() == before


def test_average_bits():
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
    found = [
        fewbit.compress_(model, bits, verbose=False).average_bits
        for bits in (2, fewbit.AdaptiveBits(1.75), fewbit.Level("L2", 3), fewbit.Level("L0"))
    ]
    assert found == [2, 1.75, 3, None]
