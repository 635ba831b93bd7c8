"""Resumed training continues as if it had never stopped, bit for bit."""

import io
import json

import pytest
import torch
from odd_models import ODD, OPTIONS
from probed_models import MODELS
from torch import nn

import fewbit

CONFIGS = [
    fewbit.FixedBits(2),
    fewbit.SampleBits(2),
    fewbit.AdaptiveBits(2, interval=3),
    fewbit.ErrorBound(interval=3),
    fewbit.ErrorBound(codec="quant+zvc", interval=3),
    fewbit.ErrorBound(by_channel=True, window="max", interval=3),
]


def check(make, shape, config, stops, steps, **options):
    """Check that runs which resume at each of the stops have the same steps as one run without a stop."""

    def start():
        torch.manual_seed(0)
        model = make()
        controller = fewbit.compress_(model, config, verbose=False, **options)
        return model, controller, torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

    def step(model, controller, optimizer):
        """Run a step, and return everything that could differ after it."""
        optimizer.zero_grad()
        loss = getattr(model, "parts", model)(torch.randn(shape)).square().mean()
        loss.backward()
        optimizer.step()
        parameters = [parameter.tolist() for parameter in model.parameters()]
        return loss.item(), parameters, controller.allocation, controller.bounds

    running, states, expected = start(), {}, []
    for done in range(steps):
        if done in stops:
            states[done] = saved(*running)
        expected.append(step(*running))
    for stop, state in states.items():
        model, controller, optimizer = start()
        state = torch.load(io.BytesIO(state), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        controller.load_state_dict(state["controller"])
        torch.set_rng_state(state["random"])
        found = [step(model, controller, optimizer) for _ in range(stop, steps)]
        assert found == expected[stop:], f"stopped after {stop}"


def saved(model, controller, optimizer) -> bytes:
    file, state = io.BytesIO(), controller.state_dict()
    json.dumps(state)
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "controller": state,
            "random": torch.get_rng_state(),
        },
        file,
    )
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("name", MODELS)
def test_resumed_training_is_the_same(config, name):
    make, shape = MODELS[name]
    check(lambda: nn.Sequential(make(), nn.Dropout(0.1)), shape, config, (1, 2, 5), 7)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS[:4], ids=repr)
@pytest.mark.parametrize("name", ODD)
def test_also_of_odd_models(config, name):
    """It does not matter which results an activation quantized too, in which forward and for which layer."""
    check(ODD[name], (6, 8), config, (1, 2, 5), 7, **OPTIONS.get(name, {}))


def test_a_state_fits_only_controllers_that_bound_alike():
    models, states, controllers = [], {}, {}
    for by_channel in (False, True):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        config = fewbit.ErrorBound(by_channel=by_channel)
        controllers[by_channel] = fewbit.compress_(model, config, verbose=False)
        models.append(model)
        states[by_channel] = controllers[by_channel].state_dict()
    for by_channel, controller in controllers.items():
        controller.load_state_dict(states[by_channel])
        with pytest.raises(fewbit.InputError, match=f"by_channel={by_channel}, got another one"):
            controller.load_state_dict(states[not by_channel])
