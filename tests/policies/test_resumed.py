"""Training that is resumed goes on as if it had never stopped, bit for bit."""

import io
import json

import pytest
import torch
from test_variance_probe import MODELS
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.runtime.backends import reference


class Between(nn.Module):
    """A layer keeps something between an activation and the layer that keeps its result."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.act = (
            nn.Linear(8, 64),
            nn.Linear(8, 8),
            nn.Linear(64, 8),
            nn.GELU(),
        )

    def forward(self, x):
        h = self.act(self.a(x))
        g = self.b(x * 2)
        return self.c(h) + g


class TwoFollowers(nn.Module):
    """Layers that keep one result, in an order that depends on the data."""

    def __init__(self):
        super().__init__()
        self.up, self.act = nn.Linear(8, 64), nn.ReLU()
        self.a, self.b = (nn.Linear(64, 8) for _ in range(2))

    def forward(self, x):
        h = self.act(self.up(x))
        first, second = (self.a, self.b) if x.sum() > 0 else (self.b, self.a)
        return first(h) + 2 * second(h)


class Dropped(nn.Module):
    """Some layers are skipped in some forwards."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 8)) for _ in range(3)
        )

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            h = block[1](block[0](x))
            x = x + (block[2](h) if x[i].sum() > 0 else h[:, :8])
        return x


class KeepsNothing(nn.Module):
    """A model some of whose forwards save only the copy that an activation made for a layer that is not called."""

    def __init__(self):
        super().__init__()
        self.act, self.layer, self.scale = nn.ReLU(), nn.Linear(64, 8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        h = self.act((x * self.scale).repeat(1, 8))
        return self.layer(h) if x.sum() > 0 else h * 2


class Again(nn.Module):
    """One module called twice, with dropout and functions; two copies of what norms keep."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.block = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
        self.dropout, self.weight = nn.Dropout(0.2), nn.Parameter(torch.eye(8))

    def forward(self, x):
        for _ in range(2):
            x = self.norm(x + self.dropout(self.block(x)))
            x = x + F.linear(F.gelu(x), self.weight)
            q = x[:, None]
            x = x + F.scaled_dot_product_attention(q, q, q)[:, 0]
        return x


class Checkpointed(nn.Module):
    """Regions that are modules, layers and functions, one of them twice; reentrant or not."""

    def __init__(self, reentrant):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8), nn.Dropout(0.2))
        self.first, self.layer, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 8), reentrant

    def forward(self, x):
        x = self.layer(self.first(x))
        for region in (self.layer, self.block, self.block, lambda x: self.layer(x.relu())):
            x = x + checkpoint(region, x, use_reentrant=self.reentrant)
        return x


class WhollyCheckpointed(nn.Module):
    """The loop makes the whole forward again."""

    def __init__(self, reentrant):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
        self.reentrant = reentrant

    def forward(self, x):
        return self.layers(x)

    def parts(self, x):
        return checkpoint(self, x.requires_grad_(), use_reentrant=self.reentrant)


class ByItself(nn.Module):
    """The loop calls its parts, of which the first is a layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Linear(8, 8), nn.Sequential(nn.GELU(), nn.Linear(8, 8))

    def parts(self, x):
        return self.body(self.embed(x * torch.arange(1.0, len(x) + 1)[:, None]))


ODD = {
    "between": Between,
    "two followers": TwoFollowers,
    "two followers, of other bits": TwoFollowers,
    "dropped": Dropped,
    "keeps nothing": KeepsNothing,
    "again": Again,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "wholly": lambda: WhollyCheckpointed(False),
    "wholly, reentrant": lambda: WhollyCheckpointed(True),
    "by itself": ByItself,
}
OPTIONS = {
    "two followers, of other bits": {"overrides": {"*b": 3}},
    "dropped": {"layers": {"functional": False}},
    "keeps nothing": {"layers": {"functional": False}},
    "again": {"layers": {"copies": 2}},
}


CONFIGS = [
    fewbit.FixedBits(2),
    fewbit.SampleBits(2),
    fewbit.AdaptiveBits(2, interval=3),
    fewbit.ErrorBound(interval=3),
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


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("name", MODELS)
def test_resumed_training_is_the_same(config, name):
    make, shape = MODELS[name]
    check(lambda: nn.Sequential(make(), nn.Dropout(0.1)), shape, config, (1, 2, 5), 9)


@pytest.mark.parametrize(
    "config",
    [
        fewbit.ErrorBound(codec="quant+zvc", interval=3),
        fewbit.ErrorBound(by_channel=True, window="max", interval=3),
    ],
    ids=repr,
)
def test_also_with_codecs_and_channels(config):
    make, shape = MODELS["convnet"]
    check(make, shape, config, (1, 2, 5), 9)


@pytest.mark.fast(3)
@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_also_of_odd_models(config, name, kernels, choice, monkeypatch):
    """Whatever an activation quantized together with its result in which forward, and for whom."""
    stops, steps = (1, 2, 5), 7
    if kernels == "reference":  # which is slow
        monkeypatch.setitem(choice, torch.device("cpu"), reference)
        stops, steps = (2,), 4
    check(ODD[name], (6, 8), config, stops, steps, **OPTIONS.get(name, {}))
