"""The bit assignment that a tensor is saved with: that of its forward, also in a recomputed part of a checkpoint."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from samples import normal
from torch import nn
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec


class Regions(nn.Module):
    """A layer and a recomputed region, of modules or of a single layer."""

    def __init__(self, reentrant, is_layer=False):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.part = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        if is_layer:
            self.part = nn.Linear(64, 64)
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.part, self.first(x), use_reentrant=self.reentrant)


@pytest.fixture
def restored(monkeypatch):
    """Return (samples, bits of all samples) of the dequantized tensors."""
    seen, original = [], QuantizedTensorSpec.dequantize

    def values(self, tensors, *rest):
        total = int(tensors[2].sum()) if len(tensors) > 2 else None
        seen.append((self.samples, total))
        return original(self, tensors, *rest)

    monkeypatch.setattr(QuantizedTensorSpec, "dequantize", values)
    return seen


def compressed(model, bits=1.75, level="L2.5"):
    torch.manual_seed(0)
    layers = {"activation_bits": 3}  # so that each layer saves its own input
    return fewbit.compress_(model, fewbit.Level(level, bits), layers=layers, verbose=False)


def in_thread(function):
    """Run a function in a thread, as a backward pass on a GPU does."""
    with ThreadPoolExecutor() as pool:
        pool.submit(function).result()


def seen_samples(controller, name, count=16) -> list[int]:
    """Return the numbers of the samples whose gradient was seen."""
    table = controller.context.policy.magnitudes._tables.get((name, 0), torch.empty(0))
    return [number for number in range(count) if number < len(table) and not table[number].isnan()]


@pytest.mark.parametrize("run", [lambda function: function(), in_thread], ids=["same", "other"])
@pytest.mark.parametrize("is_layer", [False, True], ids=["modules", "layer"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_regions_share_bits_between_the_samples_of_their_forward(
    run, is_layer, reentrant, restored
):
    model = Regions(reentrant, is_layer)
    compressed(model)
    first, second = model(normal((16, 64))).sum(), model(normal((8, 64))).sum()
    run(first.backward)
    assert len(restored) == (2 if is_layer else 3)
    assert {*restored} == {(16, 28)}
    run(second.backward)
    assert {*restored[len(restored) // 2 :]} == {(8, 14)}


@pytest.mark.parametrize("run", [lambda function: function(), in_thread], ids=["same", "other"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_regions_go_by_the_numbers_of_their_forward(run, reentrant):
    model = Regions(reentrant)
    controller = compressed(model)
    results = []
    for numbers in (range(8), range(8, 16)):
        controller.number_samples(list(numbers))
        results.append(model(normal((8, 64))).square().sum())
    for name in ("first", "part.0", "part.2"):
        assert not seen_samples(controller, name)
    run(results[0].backward)
    for name in ("first", "part.0", "part.2"):
        assert seen_samples(controller, name) == list(range(8))
    run(results[1].backward)
    for name in ("first", "part.0", "part.2"):
        assert seen_samples(controller, name) == list(range(16))


def test_a_layer_in_a_region_of_its_own_writes_to_no_sample():
    """Nothing in a reentrant checkpoint tells whose samples they are."""
    model = Regions(True, is_layer=True)
    controller = compressed(model)
    controller.number_samples(list(range(8)))
    a = model(normal((8, 64))).square().sum()
    controller.number_samples(list(range(8, 16)))
    model(normal((8, 64)))
    a.backward()
    assert seen_samples(controller, "first") == list(range(8))
    assert not seen_samples(controller, "part")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_that_is_the_whole_model(reentrant, restored):
    model = Regions(None).part
    controller = compressed(model)
    controller.number_samples(list(range(16)))
    x = normal((16, 64)).requires_grad_()
    in_thread(checkpoint(model, x, use_reentrant=reentrant).square().sum().backward)
    assert restored == [(16, 28)] * 2
    assert seen_samples(controller, "2") == list(range(16))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def test_a_layer_that_is_called_by_itself_shares_bits_between_its_own_samples(restored):
    """The layer does so before the first forward, and after one with another batch size."""
    model = Two()
    compressed(model)
    for _ in range(2):
        model.a(normal((6, 64))).sum().backward()
        assert restored[-1] == (6, 10)
        model(normal((8, 64))).sum().backward()
        assert restored[-1] == (8, 14)


def test_a_layer_that_is_called_by_itself_is_not_among_the_samples_of_a_forward():
    model = Two()
    controller = compressed(model)
    controller.number_samples(list(range(16)))
    model(normal((16, 64))).sum().backward()
    before = controller.context.policy.magnitudes.state()
    (1e3 * model.a(normal((16, 64)))).square().sum().backward()
    after = controller.context.policy.magnitudes.state()
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one["squares"], other["squares"])


def test_a_layer_that_is_called_by_itself_is_no_part_of_a_measurement():
    rows = []
    for is_called in (False, True):
        model = Two()
        controller = compressed(model, 2.5, "L3")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(normal(parameter.shape, scale=0.1))
        x = normal((16, 64))
        y = model(x)
        if is_called:
            model.b(100 * normal((160, 64)))
        y.square().sum().backward()
        model(x)
        rows.append([(row.name, row.elements, row.samples) for row in controller.allocation])
    assert rows[0] == rows[1] == [("a", 1024, 16), ("b", 1024, 16)]
