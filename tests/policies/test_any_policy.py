"""Properties of training that hold for every policy that learns: steps, checkpoints, copies, and going back."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from probed_models import MODELS, loss_of
from samples import normal
from torch import nn
from torch.utils.checkpoint import checkpoint

import fewbit

POLICIES = {"adaptive bits": fewbit.AdaptiveBits(2), "error bound": fewbit.ErrorBound()}


def build(policy, name="convnet", **changes):
    """Return a model, its controller and a batch. changes: of the configuration."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    controller = fewbit.compress_(model, replace(POLICIES[policy], **changes), verbose=False)
    return model, controller, normal(shape, scale=1.0)


def step(model, x):
    model.zero_grad()
    loss_of(model(x)).backward()


def found_by(controller):
    """Return the rows that the policy shows."""
    return [*controller.allocation, *controller.bounds]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_steps_that_are_measured(policy):
    model, controller, x = build(policy, interval=10)
    measured = []
    for number in range(1, 31):
        y = model(x)
        if controller.context.policy._run is not None:
            measured.append(number)
        loss_of(y).backward()
    assert measured == [1, 2, 4, 8, 10, 20, 30]


@pytest.mark.parametrize("policy", POLICIES)
def test_evaluation_and_the_meter_are_no_steps(policy):
    model, controller, x = build(policy)
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


class Regions(nn.Module):
    """Blocks in checkpoints, of which the first is called by a function."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.parts = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            for _ in range(3)
        )

    def forward(self, x):
        first = self.parts[0]
        for region in (lambda x: first[3](first[2](first[1](first[0](x)))), *self.parts[1:]):
            rows = x.flatten(0, 1).requires_grad_()
            x = x + checkpoint(region, rows, use_reentrant=self.reentrant).view_as(x)
        return x


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
    """Also if a measurement or another batch size comes between a forward pass and its backward pass."""
    torch.manual_seed(0)
    model = Regions(reentrant)
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
        assert len(rows) >= 6
        activations = [row.bits for row in controller.bounds if row.input is None]
        assert len({row.bits for row in rows}) > 1 or set(activations) != {8.0}


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("policy", POLICIES)
def test_copies_go_on_by_themselves(policy, again):
    model, controller, x = build(policy, "transformer")
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
    model, _, x = build(policy, "transformer")
    step(model, x), step(model, x)
    fewbit.restore_(model)
    step(model, x)
    assert not model._forward_pre_hooks and not model._forward_pre_hooks_with_kwargs
    for module in model.modules():
        assert not any(key.startswith("_fewbit") for key in vars(module))
