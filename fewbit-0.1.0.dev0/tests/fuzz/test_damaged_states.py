"""States of controllers with random damage: refused in one line without any change, or usable for training."""

import copy
import random
import time
import warnings

import pytest
import torch
from cases import CHUNKS, seeds
from mutations import mutate
from torch import nn

import fewbit
from fewbit.errors import InputError

SECONDS = 30.0
"""The longest that a case may take, on a busy machine. Most cases take a hundredth of a second."""

pytestmark = pytest.mark.slow

ODD = [
    torch.ones(8), torch.ones(2, 2), torch.full((8,), torch.nan), torch.full((8,), -1.0), torch.full((8,), torch.inf),
    torch.arange(8), torch.zeros(0), torch.ones(8, device="meta"), torch.ones(8).to_sparse(), (1, 2), {1, 2}, b"x", 1j,
    torch.ones(8, requires_grad=True), torch.arange(8, device="meta"), range(3), object,
]  # fmt: skip


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x):
        return self.head(nn.functional.elu(self.norm(self.conv(x))))


KINDS = {
    "L3": fewbit.AdaptiveBits(1.75, interval=2),
    "L3 numbered": fewbit.AdaptiveBits(2.5, interval=2),
    "L3 budget": fewbit.Budget(30_000, interval=2),
    "L2.5 numbered": fewbit.SampleBits(2),
    "error-bound": fewbit.ErrorBound(interval=2),
    "error-bound by channel": fewbit.ErrorBound(by_channel=True, interval=2),
}


class Trained:
    """A compressed model, and a state from the middle of its training."""

    def __init__(self, kind):
        torch.manual_seed(0)
        self.is_numbered = "numbered" in kind
        self.model = Model()
        sample = torch.ones(8, 2, 4, 4) if "budget" in kind else None
        self.controller = fewbit.compress_(self.model, KINDS[kind], sample=sample, verbose=False)
        self.x = torch.randn(8, 2, 4, 4)
        self.train(6)
        self.states = [self.controller.state_dict()]
        # With what was seen and has not been learned from.
        for _ in range(4):
            self.train(1)
            self.states.append(self.controller.state_dict())
        self.parameters = copy.deepcopy(self.model.state_dict())

    def train(self, steps):
        for _ in range(steps):
            if self.is_numbered:
                self.controller.number_samples(torch.arange(8))
            self.model.zero_grad()
            loss = self.model(self.x).square().mean()
            loss.backward()
            assert torch.isfinite(loss)
            assert all(
                torch.isfinite(parameter.grad).all() for parameter in self.model.parameters()
            )


def same(a, b):
    """Return whether two states are equal. They may have tensors with NaN."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def check(trained, seed):
    """Run one case, and return whether the state was accepted."""
    rng = random.Random(seed)
    base = rng.choice(trained.states)
    state = mutate(base, rng, ODD)
    before = trained.controller.state_dict()
    try:
        trained.controller.load_state_dict(state)
    except InputError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 500
        assert same(trained.controller.state_dict(), before), "a refused state changed something"
        return False
    repr(trained.controller.allocation), repr(trained.controller.bounds)
    trained.train(3)
    after = trained.controller.state_dict()
    trained.controller.load_state_dict(after)
    assert same(trained.controller.state_dict(), after)
    trained.controller.load_state_dict(trained.states[0])
    return True


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_damaged_states(chunk):
    kinds = list(KINDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gradients that exceed a bound that was damaged
        trained = {}
        for seed in seeds(chunk):
            kind = kinds[seed // CHUNKS % len(kinds)]
            if kind not in trained:
                trained[kind] = Trained(kind)
            started = time.perf_counter()
            try:
                check(trained[kind], seed)
            except BaseException as error:
                error.add_note(f"case: check(Trained({kind!r}), seed={seed})")
                raise
            assert time.perf_counter() - started < SECONDS, (kind, seed)
