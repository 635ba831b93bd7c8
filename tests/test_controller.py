"""What a controller, its report and its state say, and which numbers it takes."""

import numpy as np
import pytest
from samples import normal
from test_adaptation import build, step
from test_observation import MODELS

import fewbit
from fewbit.compress.allocation_report import Allocated, Allocation
from fewbit.errors import InputError


@pytest.mark.parametrize("level", ["L2", "L2.5"])
def test_levels_that_choose_no_bits_by_layer_say_so(level):
    model, controller, x = build(bits=4, level=level)
    step(model, x)
    assert str(controller.allocation).startswith(f"at level {level} bits are not chosen by layer")


def test_a_state_goes_by_the_budget_of_the_controller_that_loads_it():
    sample = normal(MODELS["convnet"][1], scale=1.0)
    model, controller, x = build("convnet", budget="60 KiB", sample=sample)
    for _ in range(3):
        step(model, x)
    state = controller.state_dict()
    model, controller, x = build("convnet", budget="40 KiB", sample=sample)
    controller.load_state_dict(state)
    assert fewbit.saved_bytes(model, sample).total <= 40 * 1024
    model, controller, x = build("convnet", bits=3.5)
    controller.load_state_dict(state)
    assert controller.allocation.bits == pytest.approx(3.5, abs=0.05)


def test_layers_with_names_cut_alike_are_different_rows():
    rows = [Allocated(f"{n}.{'x' * 60}", 0, 2.0, False, 100, 4, 1.0) for n in (1, 2)]
    lines = str(Allocation(rows)).splitlines()
    assert lines[4].startswith("1.xxx") and lines[5].startswith("2.xxx")
    assert all(len(line) <= 80 for line in lines)


def test_numbers_of_any_type():
    for bits in (4.0, np.int64(4), np.float32(4.0)):
        model = MODELS["convnet"][0]()
        assert fewbit.compress_(model, bits, verbose=False).level == "L2"
    controller = fewbit.compress_(MODELS["convnet"][0](), np.float32(1.75), verbose=False)
    assert controller.level == "L3" and controller.session.variables.bits == 1.75


def test_the_report_says_level_and_budget(capsys):
    model, sample = MODELS["convnet"][0](), normal(MODELS["convnet"][1], scale=1.0)
    fewbit.compress_(model, budget="1 GiB", sample=sample)
    text = " ".join(capsys.readouterr().out.split())
    assert "level L3: 8 bits on average" in text
    assert "budget: 1.00 GiB for the sample, more than 8 bits an element" in text
    fewbit.compress_(model, 4)
    assert "level L2" in capsys.readouterr().out
    model.eval()
    with pytest.raises(InputError, match="budget: expected a model in training mode"):
        fewbit.compress_(model, budget="1 GiB", sample=sample, verbose=False)


def test_a_sample_that_is_part_of_a_larger_tensor_counts_for_itself(capsys):
    model, (n, *rest) = MODELS["convnet"][0](), MODELS["convnet"][1]
    data = normal((100 * n, *rest), scale=1.0)
    ours = fewbit.compress_(model, 4, sample=data[:n], verbose=False).report.kept
    alone = fewbit.compress_(model, 4, sample=data[:n].clone(), verbose=False).report.kept
    assert ours == alone
