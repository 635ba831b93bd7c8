"""The controller: its report, its state, and the sample numbers that it accepts."""

import numpy as np
import pytest
import torch
from probed_models import MODELS
from samples import normal
from torch import nn
from training import build, step

import fewbit
from fewbit.convert.conversion_report import Report
from fewbit.errors import InputError
from fewbit.policies.allocation_report import Allocated, Allocation


@pytest.mark.parametrize("level", ["L2", "L2.5"])
def test_levels_without_bits_by_layer(level):
    """They say so, and a state in which nothing was learned is one."""
    model, controller, x = build(bits=fewbit.Level(level, 4))
    assert controller.state_dict() == {}
    controller.load_state_dict({})
    step(model, x)
    assert "reports no bits by layer" in str(controller.allocation)
    if level == "L2.5":
        model, controller, _ = numbered(level, range(8))
        controller.load_state_dict({})
        assert controller.state_dict() == {}


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


def test_a_sample_that_is_part_of_a_larger_tensor_counts_for_itself():
    model, (n, *rest) = MODELS["convnet"][0](), MODELS["convnet"][1]
    data = normal((100 * n, *rest), scale=1.0)
    ours, alone = (
        fewbit.compress_(model, 4, sample=sample, verbose=False).report.saved
        for sample in (data[:n], data[:n].clone())
    )
    assert ours == alone


def test_a_mapping_in_a_tuple_is_one_input():
    class Model(nn.Linear):
        def forward(self, input):
            return super().forward(input["input"])

    sample = ({"input": normal((4, 8))},)
    saved = fewbit.compress_(Model(8, 8), 4, sample=sample, verbose=False).report.saved
    assert saved == ({"Model": 128}, {"Model": 32})


def test_bytes_by_class_in_order_without_rows_of_nothing():
    """Classes that save bytes now come first, then those that saved some before; rows of 0.00 twice are summed up."""
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


def test_bytes_before_and_now_are_in_one_row():
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.Sequential(layer, fewbit.nn.GELU(), nn.GELU())
    saved = fewbit.compress_(model, 4, sample=normal((8, 16, 32)), verbose=False).report.saved
    classes = "TransformerEncoderLayer MultiheadAttention LayerNorm Linear Dropout GELU".split()
    assert [before.keys() for before in saved] == [set(classes)] * 2


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(64, 64), function

    def forward(self, x):
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    "model, has_sample, is_shown",
    [
        (nn.TransformerEncoderLayer(64, 2, 64), False, False),
        (nn.TransformerEncoderLayer(64, 2, 64, activation=torch.square), True, True),
        (Calls(torch.relu), False, True),
        (Calls(torch.relu), True, False),
        (Calls(torch.square), True, True),
        (Calls(torch.relu).eval(), True, True),
    ],
)
def test_the_bits_of_attention_are_shown_if_a_forward_pass_may_call_it(model, has_sample, is_shown):
    sample = normal((32, 64)) if has_sample else None
    report = fewbit.compress_(model, 4, sample=sample, verbose=False).report
    assert ("the model calls attention" in " ".join(str(report).split())) is is_shown


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


@pytest.mark.parametrize(
    "numbers", [range(8), torch.arange(8), np.arange(8, dtype=np.uint16)], ids=str
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


@pytest.mark.parametrize("level", ["L2.5", "L3"])
def test_numbers_of_64_bits_without_a_sign(level):
    """Numbers are copied: a loader may overwrite their memory before the forward."""
    model, controller, x = build(bits=fewbit.Level(level, 2))
    numbers = np.arange(8, dtype=np.uint64) + np.uint64(2**63 - 4)
    given = numbers.copy()
    controller.number_samples(given)
    given += 1
    step(model, x)
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
        ({"0.weight": torch.ones(2)}, "with '0.weight'"),
        ({"magnitudes": []}, "with 'magnitudes' alone"),
        ({"numbers": torch.arange(8)}, "with 'numbers' alone"),
    ]
    for other in LEARNING.keys() - {name}:
        state = learned(other)[1].state_dict()
        others.append((state, f"of {other}" if state else "of a configuration that learns nothing"))
    if name == "SampleBits":  # has learned nothing from a state without anything
        others = [(state, found) for state, found in others if state]
    for state, found in others:
        with pytest.raises(InputError) as caught:
            controller.load_state_dict(state)
        assert str(caught.value) == (
            f"expected the state of a controller of {name}, got one {found}"
        )
        assert_same_state(controller.state_dict(), before)
