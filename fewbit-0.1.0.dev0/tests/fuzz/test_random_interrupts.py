"""Random interrupts of forwards, backwards and measurements: nothing is left behind, and the next step is right."""

import asyncio
import copy
import random
from functools import cache

import pytest
import torch
from cases import CHUNKS, seeds
from interrupted import (
    Interrupt,
    check_nothing_is_left,
    exhaustively,
    gradients,
    places,
    state_of,
)
from samples import normal
from torch import nn
from torch.nn import functional as torch_f
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.planning.candidates import default_candidates

pytestmark = pytest.mark.slow
ERRORS = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
FEATURES = 32


class Attention(nn.Module):
    """A model with layers of one input, attention and activations as functions, and a product."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))

    def forward(self, x):
        y = self.norm(x)
        q, k, v, gate = (layer(y) for layer in self.layers)
        y = torch_f.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return torch_f.gelu(y) * gate


class Again(nn.Module):
    """A model with a region that the backward pass recomputes."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.reentrant = nn.Linear(FEATURES, FEATURES), reentrant
        self.block = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Dropout(0.5))

    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)


class Nested(nn.Module):
    """A compressed model that calls another one, which is not its part."""

    def __init__(self):
        super().__init__()
        self.linear, self.inner = nn.Linear(FEATURES, FEATURES), [quiet(Attention())]

    def forward(self, x):
        return torch_f.silu(self.inner[0](self.linear(x)))


def quiet(model, **options):
    fewbit.compress_(model, verbose=False, **{"bits": 2, **options})
    return model


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4, 4),
    )  # fmt: skip


MODELS = {
    "functions": lambda: quiet(Attention()),
    "convolutions": lambda: quiet(convolutions()),
    "again": lambda: quiet(Again(False)),
    "again, reentrant": lambda: quiet(Again(True)),
    "nested": lambda: quiet(Nested()),
    "samples": lambda: quiet(Attention(), bits=fewbit.SampleBits()),
    "observed": lambda: quiet(Attention(), bits=fewbit.AdaptiveBits(2.5, interval=1)),
    "bound": lambda: quiet(Attention(), bits=fewbit.ErrorBound(interval=1)),
    "offload": lambda: quiet(
        Attention(), bits=fewbit.AdaptiveBits(3.0), offload=fewbit.HostOffload()
    ),
    "excluded": lambda: quiet(
        nn.Sequential(Attention(), Attention()), exclude=["1.norm", "0.layers.2"]
    ),
    "fused": lambda: quiet(convolutions(), bits=fewbit.PreActivationBits()),
}
LEARNING = "observed", "bound", "offload"
"""Whose bits follow from the steps before."""
X = normal((4, FEATURES), scale=1.0)


def step(model):
    torch.manual_seed(0)
    x = X.clone().requires_grad_()
    return torch.autograd.backward(model(x).square().sum())


@cache
def made(name):
    """Return (model, its state, the number of events of each kind in a step, the gradients of its next step)."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # whose statistics a whole forward would change
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
            module.num_batches_tracked = None
    step(copy.deepcopy(model))
    counts = {
        opcodes: Interrupt.count(lambda: step(copy.deepcopy(model)), opcodes=opcodes)
        for opcodes in (False, True)
    }
    return model, state_of(model), counts, gradients(copy.deepcopy(model), X)


@cache
def plain():
    model = nn.Linear(FEATURES, 4)
    return model, gradients(model, X)


def check(name, model) -> None:
    _, before, _, gradients_before = made(name)
    check_nothing_is_left()
    model.zero_grad()
    exact, expected = plain()
    assert all(map(torch.equal, gradients(exact, X), expected))
    assert state_of(model) == before
    found = gradients(model, X)
    if name in LEARNING:
        assert all(bool(gradient.isfinite().all()) for gradient in found)
    else:
        assert all(map(torch.equal, found, gradients_before))
    check_nothing_is_left()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_interrupts(chunk):
    for seed in seeds(chunk):
        draw = random.Random(seed)
        name = draw.choice(list(MODELS))
        opcodes, error = draw.random() < 0.1, draw.choice(ERRORS)
        model, _, counts, _ = made(name)
        with Interrupt(draw.randrange(counts[opcodes]), error, opcodes):
            step(model)
        try:
            check(name, model)
        except AssertionError as failure:
            raise AssertionError(
                f"seed {seed}: {name}, {error.__name__}, opcodes={opcodes}"
            ) from failure


@pytest.mark.parametrize("opcodes", [False, True], ids=["lines", "opcodes"])
@pytest.mark.parametrize("name", ["functions", "again", "observed", "excluded"])
def test_an_interrupt_at_every_place(name, opcodes):
    """A step is interrupted the first two times that it reaches each line, and the first time it reaches each opcode."""
    model, before, _, _ = made(name)
    for _ in exhaustively(lambda: step(model), per_line=1 if opcodes else 2, opcodes=opcodes):
        check_nothing_is_left()
        model.zero_grad()
        assert state_of(model) == before
    check(name, model)


def loss(model, batch):
    return model(batch).square().sum()


def measurements(model):
    controller = quiet_controller(model)
    candidates = default_candidates(model)[:1]
    return {
        "plan": lambda: fewbit.plan(
            model, X, loss, candidates=candidates, chunks=4, progress=False
        ),
        "gradient_ratio": lambda: controller.gradient_ratio(X, loss, draws=2),
        "saved_bytes": lambda: fewbit.saved_bytes(model, X),
        "variance_profile": lambda: fewbit.variance_profile(
            model, X, loss, chunks=4, progress=False
        ),
        "compress_": lambda: fewbit.compress_(model, bits=4, sample=X, verbose=False),
    }


def quiet_controller(model):
    return fewbit.compress_(model, bits=2, verbose=False)


@pytest.mark.parametrize(
    "what", ["plan", "gradient_ratio", "saved_bytes", "variance_profile", "compress_"]
)
def test_an_interrupt_of_a_measurement(what):
    """The interrupt comes when each line is reached for the first time."""
    torch.manual_seed(0)
    model = Attention()
    run = measurements(model)[what]
    run()
    quiet_controller(model)
    before, random_state = state_of(model), torch.get_rng_state()
    numbers = [at[0] for at in places(run).values()]
    exact, expected = plain()
    torch.set_rng_state(random_state)
    if what == "compress_":
        quiet_controller(model)
    for number in sorted(numbers):
        with Interrupt(number) as interrupt:
            run()
        check_nothing_is_left()
        assert all(map(torch.equal, gradients(exact, X), expected))
        if interrupt.is_raised:
            assert state_of(model) == before, number
        torch.set_rng_state(random_state)
    assert gradients(model, X)
