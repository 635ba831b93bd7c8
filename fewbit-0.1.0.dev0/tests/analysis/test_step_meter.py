"""The step meter counts what `fewbit.saved_bytes` counts, and does not change the step."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.analysis.step_meter import StepMeter

SETTINGS = {
    "exact": None,
    "fixed": {"bits": 2},
    "adaptive": {"bits": fewbit.AdaptiveBits(2, interval=1)},
    "everything": {"bits": 2, "layers": {"everything": True}},
    "offload": {"bits": 2, "offload": fewbit.HostOffload()},
}


class Block(nn.Module):
    """Layers, functions, an operation that only `everything` compresses, and dropout."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        y = nn.functional.gelu(self.up(self.norm(x)))
        return x + nn.functional.dropout(self.down(y * y.sigmoid()), 0.1, self.training)


def made(name):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(64, 10))
    if SETTINGS[name] is not None:
        fewbit.compress_(model, verbose=False, **SETTINGS[name])
    torch.manual_seed(1)
    return model, torch.randn(32, 64), torch.randint(10, (32,))


def steps(name, meter):
    """Run three training steps, each with the meter if there is one. Return all that could differ."""
    model, x, labels = made(name)
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        if meter is not None:
            meter.begin(model)
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        if meter is not None:
            meter.end()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, [parameter.tolist() for parameter in model.parameters()], torch.rand(()).item()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_stays_the_same(name):
    meter = StepMeter()
    assert steps(name, meter) == steps(name, None)
    assert meter.total > 0
    assert not torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.mark.parametrize("name", SETTINGS)
def test_counts_what_saved_bytes_counts(name):
    model, x, labels = made(name)
    meter = StepMeter()
    meter.begin(model)
    loss = nn.functional.cross_entropy(model(x), labels)
    loss.backward()
    meter.end()
    model, x, labels = made(name)
    expected = fewbit.saved_bytes(lambda: nn.functional.cross_entropy(model(x), labels))
    assert meter.total == expected.total


def test_counts_the_first_backward_of_a_step():
    model, x, labels = made("fixed")
    meter, totals = StepMeter(), []
    for batches in ([32], [32, 8], [8, 32]):
        meter.begin(model)
        for size in batches:
            nn.functional.cross_entropy(model(x[:size].clone()), labels[:size].clone()).backward()
        meter.end()
        totals.append(meter.total)
    assert totals[0] == totals[1] > 2 * totals[2]


def test_counts_regions_of_checkpoints_by_their_inputs():
    model, x, _ = made("fixed")
    x = x.requires_grad_() + 0  # a leaf would count as a parameter
    meter = StepMeter()
    meter.begin(model)
    checkpoint(lambda x: model(x).square(), x, use_reentrant=False).mean().backward()
    meter.end()
    assert x.nbytes <= meter.total < x.nbytes + 1000


def test_a_step_that_fails_leaves_no_hooks():
    """The next step, or `end`, takes off the hooks of a step that has raised an error."""
    model, x, labels = made("fixed")
    meter = StepMeter()
    meter.begin(model)
    with pytest.raises(RuntimeError):
        model(x[:, :3])
    meter.begin(model)
    with torch.autograd.graph.save_on_cpu():
        meter.end()  # its hooks are below others
        assert torch._C._autograd._top_saved_tensors_default_hooks(True)
    assert not torch._C._autograd._top_saved_tensors_default_hooks(True)
    assert meter.total is None
    meter.end()


@pytest.mark.slow
def test_another_meter_takes_off_the_hooks_of_a_step_that_failed():
    """A training that is started again has a new meter, and nobody ends the old one."""
    model, x, labels = made("fixed")
    StepMeter().begin(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    model, meter = made("fixed")[0], StepMeter()
    meter.begin(model)
    nn.functional.cross_entropy(model(x), labels).backward()
    meter.end()
    assert not torch._C._autograd._top_saved_tensors_default_hooks(True)


def test_copies_watch_nothing():
    """Lightning sends callbacks, which have a meter, to the processes that it starts."""
    model, meter = nn.Linear(2, 2), StepMeter()
    meter.begin(model)
    for copied in (copy.deepcopy(meter), pickle.loads(pickle.dumps(meter))):
        copied.end()
        assert copied.total is None
        assert torch._C._autograd._top_saved_tensors_default_hooks(True)
    meter.end()
