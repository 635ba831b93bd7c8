"""Properties of training that hold for every policy that learns: steps, checkpoints, copies, and going back."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from probed_models import loss_of
from regions import Regions
from samples import normal
from training import build, step

import fewbit

POLICIES = {"adaptive bits": fewbit.AdaptiveBits(2), "error bound": fewbit.ErrorBound()}


def found_by(controller):
    """Return the rows that the policy shows."""
    return [*controller.allocation, *controller.bounds]


@pytest.mark.parametrize("policy", POLICIES)
def test_bits_that_are_given_stay(policy):
    overrides = {"0": 5.5, "9": {"bits": 3}}
    model, controller, x = build(bits=POLICIES[policy], overrides=overrides)
    for _ in range(5):
        step(model, x)
    rows = {row.name: row for row in found_by(controller) if row.input is not None}
    assert rows["0"].bits == 5.5 and rows["0"].is_fixed
    assert rows["9"].bits == 3 and rows["9"].is_fixed
    assert not rows["3.body.1"].is_fixed


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_steps_that_are_measured(policy):
    model, controller, x = build(bits=replace(POLICIES[policy], interval=10))
    measured = []
    for number in range(1, 31):
        y = model(x)
        if controller.context.policy._run is not None:
            measured.append(number)
        loss_of(y).backward()
    assert measured == [1, 2, 4, 8, 10, 20, 30]


@pytest.mark.parametrize("policy", POLICIES)
def test_evaluation_and_the_meter_are_no_steps(policy):
    model, controller, x = build(bits=POLICIES[policy])
    step(model, x)
    fewbit.saved_bytes(model, x)
    model.eval()
    model(x)
    model.train()
    with torch.no_grad():
        model(x)
    assert controller.context.policy.step == 1 and not found_by(controller)
    step(model, x)
    assert controller.context.policy.step == 2 and found_by(controller)


@pytest.mark.fast(3)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        fewbit.AdaptiveBits(2.5, interval=1),
        fewbit.AdaptiveBits(2.5, interval=4),
        fewbit.ErrorBound(2.0, interval=1),
        fewbit.ErrorBound(2.0, interval=1, codec="quant+zvc"),
    ],
    ids=repr,
)
def test_checkpointed_regions_are_recomputed_as_they_were(config, reentrant):
    """A measurement or another batch size may come between a forward pass and its backward pass."""
    model = Regions(reentrant, "both", 32)
    controller = fewbit.compress_(model, config, verbose=False)
    for i in range(6):
        first, second = (normal((size, 6, 32), scale=1.0) for size in (4 + i, 6))
        a, b = loss_of(model(first)), loss_of(model(second))
        a.backward()
        c = loss_of(model(normal((3, 6, 32), scale=1.0)))
        b.backward()
        c.backward()
    if not reentrant:
        rows = [row for row in found_by(controller) if row.input is not None]
        assert len(rows) >= 5
        activations = [row.bits for row in controller.bounds if row.input is None]
        assert len({row.bits for row in rows}) > 1 or set(activations) != {8.0}


@pytest.mark.slow
@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("policy", POLICIES)
def test_copies_go_on_by_themselves(policy, again):
    model, controller, x = build("transformer", POLICIES[policy])
    for _ in range(3):
        step(model, x)
    other = again(model)
    before = [row.bits for row in found_by(controller)]
    for _ in range(7):
        step(other, 5 * x)
    step(model, x)
    assert [row.bits for row in found_by(controller)] == before
    layers = (module for module in other.modules() if hasattr(module, "quantizer"))
    context = next(layers).quantizer.context
    assert context is not controller.context
    assert context.policy.step == 10 and context.policy.averages


@pytest.mark.parametrize("policy", POLICIES)
def test_restored(policy):
    model, _, x = build("transformer", POLICIES[policy])
    step(model, x), step(model, x)
    fewbit.restore_(model)
    step(model, x)
    assert not model._forward_pre_hooks and not model._forward_pre_hooks_with_kwargs
    for module in model.modules():
        assert not any(key.startswith("_fewbit") for key in vars(module))
