"""Level L3 in a training loop: it stays within budgets, lowers the variance, resumes bit for bit, and takes odd loops."""

import copy
import json
import pickle
from dataclasses import replace

import pytest
import torch
from composed import Composed
from probed_models import MODELS, loss_of
from regions import Regions
from samples import normal
from torch import nn
from training import build, least_budget, step

import fewbit
from fewbit.errors import InputError
from fewbit.policies.adaptive import AdaptivePolicy, SlotVariance
from fewbit.runtime.format.distortion import relative_distortion
from fewbit.runtime.probes.variance_probe import VarianceProbe


def mean_bits(controller):
    rows = [row for row in controller.allocation if not row.is_fixed]
    return sum(row.bits * row.elements for row in rows) / sum(row.elements for row in rows)


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bits", [1, 1.25, 2.5, 8])
def test_bits_keep_to_the_average(name, bits):
    model, controller, x = build(name, bits=bits)
    uniform = fewbit.saved_bytes(model, x).total
    for _ in range(4):
        step(model, x)
        step(model, x)
        assert mean_bits(controller) <= bits + 1e-9
    assert mean_bits(controller) > bits - 0.15
    assert fewbit.saved_bytes(model, x).total <= uniform
    assert all(1 <= row.bits <= 8 for row in controller.allocation)
    if bits not in (1, 8):
        assert len({row.bits for row in controller.allocation}) > 1


@pytest.mark.parametrize("options", [{}, {"layers": {"attention_bits": 4}}], ids=["free", "given"])
def test_attention_takes_part_unless_given(options):
    model, controller, x = build("transformer", bits=2, **options)
    step(model, x), step(model, x)
    own = [row for row in controller.allocation if "scaled_dot_product" in row.name]
    assert len(own) >= 2
    assert all(row.is_fixed == bool(options) for row in own)
    assert not options or all(row.bits == 4 for row in own)


def test_a_layer_without_gradient_gets_least():
    model = Composed(
        lambda model, x: model.used(x) + 0 * model.unused(2 * x),
        used=nn.Linear(64, 64),
        unused=nn.Linear(64, 64),
    )
    controller = fewbit.compress_(model, fewbit.AdaptiveBits(3), verbose=False)
    for _ in range(4):
        step(model, normal((8, 64), scale=1.0))
    assert {row.name: row.bits for row in controller.allocation} == {"used": 5, "unused": 1}


@pytest.mark.parametrize("samples", [1, 3, 5, 12])
def test_batches_of_any_size(samples):
    """Averages are fractions that are possible for that number of samples."""
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    )
    controller = fewbit.compress_(model, 2.5, verbose=False)
    for _ in range(5):
        step(model, normal((samples, 64), scale=1.0))
    parts = min(samples, 16)
    for row in controller.allocation:
        assert row.bits * parts == pytest.approx(round(row.bits * parts))
    assert mean_bits(controller) > 2.5 - 1 / parts


def test_allocation_shows_itself():
    model, controller, x = build(bits=2, overrides={"9": 3.5})
    assert str(controller.allocation).startswith("no bits chosen yet")
    step(model, x), step(model, x)
    found = controller.allocation
    text = str(found)
    chosen = [row for row in found if not row.is_fixed]
    average = sum(row.bits * row.elements for row in chosen) / sum(row.elements for row in chosen)
    assert text.splitlines()[0] == (
        f"{average:.4g} bits on average for {len(chosen)} tensors that layers save; "
        f"{found.bits:.4g} with {len(found) - len(chosen)} of fixed bits"
    )
    assert len(chosen) > len(found) - len(chosen) == 1
    assert [line.split()[0] for line in text.splitlines()[4 : 4 + len(found)]] == [
        row.name for row in found
    ]
    assert "3.5 fixed" in text
    records = found.records()
    share = relative_distortion("rotated", found[3].bits)
    assert records[3]["variance"] == found[3].sensitivity * share
    assert {record["quantizer"] for record in records} == {"rotated", "masked"}
    shares = [float(line.split()[-1].rstrip("%")) for line in text.splitlines()[4 : 4 + len(found)]]
    assert sum(shares) == pytest.approx(100, abs=1)


def test_a_budget_that_is_too_small():
    make, shape = MODELS["convnet"]
    model, x = make(), normal(shape)
    with pytest.raises(
        InputError,
        match="^budget: expected sample= too, an example input, as the saved bytes depend on",
    ):
        fewbit.compress_(model, fewbit.Budget("1 KB"), verbose=False)
    with pytest.raises(InputError, match="^budget: expected .*got 1,024"):
        fewbit.compress_(model, fewbit.Budget("1 KB"), sample=x, verbose=False)
    assert not any("fewbit" in type(module).__module__ for module in model.modules())
    least = least_budget(model, x)
    fewbit.compress_(model, fewbit.Budget(least), sample=x, verbose=False)
    assert fewbit.saved_bytes(model, x).total <= least


def test_forwards_that_change_shape_or_skip_layers():
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(x, used):
        for number in used:
            x = torch.relu(model[number](x))
        return x

    model.forward = forward
    controller = fewbit.compress_(model, fewbit.AdaptiveBits(2.25, interval=3), verbose=False)
    for i in range(24):
        x = normal((3 + i % 5, 4 + i % 3, 64), scale=1.0)
        model.zero_grad()
        model(x, range(i % 2, 4, 1 + i % 3)).square().sum().backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert all(grad.isfinite().all() for grad in grads)
    assert len(controller.allocation) == 4 and mean_bits(controller) <= 2.25


def test_training_with_scaled_half_precision_losses():
    model, controller, x = build("transformer", bits=3)
    for scale in (2.0**40, 2.0**8, 2.0**8):  # the first overflows
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = model(x)
        (loss_of(y) * scale).backward()
    model(x)
    assert controller.allocation
    assert all(row.sensitivity < float("inf") for row in controller.allocation)


def test_graph_that_is_never_used():
    model, controller, x = build(bits=2)
    for _ in range(5):
        model(x)
    assert not controller.allocation
    step(model, x)  # the sixth is not observed
    for _ in range(4):
        step(model, x)
    assert controller.allocation


@pytest.fixture(scope="module")
def after_two_steps():
    """Return a model after two steps, and its controller."""
    model, controller, x = build(bits=2)
    step(model, x), step(model, x)
    return model, controller


def edited(state, path, value):
    """Return a copy of the state with another value at a path of keys; without the entry if the value is `edited`."""
    state = copy.deepcopy(state)
    inside = state
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    if value is edited:
        del inside[path[-1]]
    return state


SLOT = "knowledge", "slots", 0


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), None, "expected version 2 of a controller's state, as its state_dict() gave it, got None"),
        (("schedule",), edited, "expected the entries policy, version, settings, schedule, knowledge, pending"),
        (("extra",), 1, "expected the entries policy, version"),
        (("schedule", "step"), 1.5, "schedule.step: expected a whole number, got 1.5"),
        (("schedule", "is_due"), edited, "schedule: expected the entries step, is_due, turns, got"),
        (("schedule", "turns"), [["", 9]], "schedule.turns[0]: expected a list of 3 entries, got ['', 9]"),
        (("knowledge", "bits"), float("nan"), "knowledge.bits: expected a finite number, got nan"),
        (("knowledge", "slots"), 3, "knowledge.slots: expected a list, got 3"),
        (SLOT, {}, "knowledge.slots[0]: expected the entries name, input, bits"),
        ((*SLOT, "name"), "99", "got one with a layer '99', which it lacks"),
        ((*SLOT, "name"), 1, "knowledge.slots[0].name: expected a string, got 1"),
        ((*SLOT, "sensitivity"), "big", "knowledge.slots[0].sensitivity: expected a finite number, got 'big'"),
        ((*SLOT, "is_fixed"), 1, "knowledge.slots[0].is_fixed: expected true or false, got 1"),
        ((*SLOT, "spread"), [None], "knowledge.slots[0].spread[0]: expected a finite number, got None"),
        (("pending",), {"path": ""}, "pending.since: expected a whole number, got None"),
    ],
)  # fmt: skip
def test_states_that_are_refused(path, value, message, after_two_steps):
    _, controller = after_two_steps
    before = controller.state_dict()
    with pytest.raises(InputError) as caught:
        controller.load_state_dict(edited(before, path, value))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert controller.state_dict() == before


def slot(name, number, elements, sensitivity, at_one, spread=None):
    facts = 2.5, False, True, elements, 8
    return SlotVariance(name, number, *facts, sensitivity, at_one, 1.0, spread, quantizer="rotated")


def test_results_of_processes_are_merged():
    """A slot that one process has not seen comes from the other."""
    a = slot("a", 0, 100, 3.0, 4.0, (1.0,) * 16)
    b = slot("b", 2, 200, 6.0, 8.0, (2.0,) * 16)
    c = replace(slot("c", 1, 300, 9.0, 12.0), is_fixed=True, is_known=False, samples=0)
    first, second = {("a", 0): a, ("b", 2): b}, {("a", 0): a, ("c", 1): c}
    assert AdaptivePolicy(2, "abc", 200).merge([first, second]) == {
        ("a", 0): slot("a", 0, 200, 6.0, 8.0, (2.0,) * 16),
        ("b", 2): b,
        ("c", 1): c,
    }


@pytest.mark.parametrize(
    "bits", [fewbit.SampleBits(3), fewbit.AdaptiveBits(3, interval=10**6)], ids=repr
)
def test_samples_whose_gradients_were_large_get_bits(bits):
    """Bits of the second epoch follow the first, in any order; samples not seen count as the mean of the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8))
    controller = fewbit.compress_(model, bits, verbose=False)
    data = normal((24, 256), scale=1.0)
    weight = torch.ones(24)
    weight[[3, 7, 20]] = 1000.0
    kept = {}

    def epoch(numbers):
        controller.number_samples(numbers)
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
            seen = []
            y = model(data[numbers])
        (y.square().sum(1) * weight[numbers]).sum().backward()
        kept.update(
            zip(numbers.tolist(), next(x for x in seen if x.dtype == torch.uint8), strict=True)
        )

    epoch(torch.arange(10)), epoch(torch.arange(10, 20))
    assert len({int(item) for item in kept.values()}) <= 2
    kept.clear()
    epoch(torch.tensor([20, 3, 1, 23, 7, 9]))
    kept = {number: int(bits) for number, bits in kept.items()}
    assert kept[1] == kept[9] == 1
    assert min(kept[3], kept[7]) >= 4 and min(kept[20], kept[23]) >= 2


def test_magnitudes_are_squared_norms_of_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64), nn.Flatten(0, 1), nn.Linear(64, 8))
    controller = fewbit.compress_(model, fewbit.SampleBits(3), verbose=False)
    x = normal((5, 3, 256), scale=1.0)
    controller.number_samples([4, 0, 9, 2, 3])
    y = model(x)
    grad = torch.randn(y.shape)
    y.backward(grad)
    (first, second) = (controller.context.policy.magnitudes._tables[name, 0] for name in ("0", "2"))
    expected = grad.view(5, -1).square().sum(1)
    torch.testing.assert_close(second[:5], expected)
    below = (grad @ model[2].weight).view(5, -1).square().sum(1)
    torch.testing.assert_close(first[:5], below)
    assert first[5:].isnan().all()
    # Whatever tells samples apart takes no more room than other numbers.
    controller.number_samples([10**12, -9, 2])
    model(x[:3]).backward(grad[:9])
    assert controller.state_dict()["numbers"].tolist() == [4, 0, 9, 2, 3, 10**12, -9]
    (table, _) = controller.context.policy.magnitudes._tables.values()
    assert len(table) <= 10 and table[3].item() != pytest.approx(below[3].item())


def test_numbers_are_for_one_forward_and_resumed():
    model, controller, x = build(bits=2)
    numbers = torch.arange(len(x))
    controller.number_samples(numbers)
    step(model, x)
    step(model, 100 * x)  # not numbered: leaves no trace
    state = controller.state_dict()
    before = copy.deepcopy(controller.context.policy.magnitudes._tables)
    model, controller, x = build(bits=2)
    controller.load_state_dict(state)
    after = controller.context.policy.magnitudes._tables
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    fewbit.saved_bytes(model, x)
    controller.number_samples(numbers + 5)
    fewbit.saved_bytes(model, x)  # no step, whose numbers these would be
    step(model, x)
    assert all(len(item) >= 13 for item in after.values())


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([1, 2], "expected the numbers of 8 samples, as many as this forward has, got 2"),
        ([[1]], "expected a whole number for each sample of the next forward, in one dimension, got list"),
        ("ab", "expected a whole number for each sample of the next forward, in one dimension, got str"),
        (torch.ones(8), "in one dimension, got a tensor of shape (8,) and torch.float32"),
    ],
)  # fmt: skip
def test_numbers_that_are_refused(numbers, message):
    model, controller, x = build(bits=2)
    with pytest.raises(InputError) as caught:
        controller.number_samples(numbers)
        model(x)
    assert message in str(caught.value)
    step(model, x)
    for bits in (fewbit.FixedBits(2), fewbit.ErrorBound()):
        other = fewbit.compress_(model, bits, verbose=False)
        with pytest.raises(InputError, match="SampleBits or AdaptiveBits|numbers of samples"):
            other.number_samples([1])


def test_numbers_on_their_way_are_part_of_a_state(monkeypatch):
    monkeypatch.setattr(VarianceProbe, "is_there", lambda self: False)
    model, controller, x = build(bits=2)
    step(model, x), step(model, x)
    state = json.loads(json.dumps(controller.state_dict()))
    assert state["pending"] and not controller.allocation
    monkeypatch.undo()
    step(model, x)
    model, other, x = build(bits=2)
    other.load_state_dict(state)
    step(model, x)
    assert other.allocation == controller.allocation


@pytest.mark.slow
def test_a_budget_resumes_with_the_bits_that_it_came_to():
    """Weights that are loaded after the conversion would lead to other bits, and so would another budget."""
    sample = normal(MODELS["convnet"][1], scale=1.0)
    model, controller, x = build(bits=fewbit.Budget("60 KiB"), sample=sample)
    for _ in range(3):
        step(model, x)
    state = controller.state_dict()
    state["knowledge"]["bits"] *= 0.9
    for budget in (60, 40):
        model, other, x = build(bits=fewbit.Budget(f"{budget} KiB"), sample=sample)
        other.load_state_dict(state)
        assert (other.context.policy.bits == state["knowledge"]["bits"]) == (budget == 60)
        assert fewbit.saved_bytes(model, sample).total <= budget * 1024
    model, other, x = build(bits=3.5)
    other.load_state_dict(state)
    assert other.allocation.bits == pytest.approx(3.5, abs=0.05)


def test_what_was_known_is_taken_at_the_scale_of_what_is_seen():
    """Only ratios count, because losses may be scaled by changing factors."""
    policy = AdaptivePolicy(2, "abc", 200)
    first = {(name, 0): slot(name, 0, 1024, 2.0**i, 2.0**i) for i, name in enumerate("abc")}
    policy.take_in(first)
    before = policy.averages
    scaled = {
        name: replace(
            item,
            sensitivity=2**16 * item.sensitivity,
            at_one=2**16 * item.at_one,
            weight=2**-16 * item.weight,
        )
        for name, item in first.items()
        if name[0] != "c"
    }
    policy.take_in(scaled)
    assert policy.averages == before
    assert policy.knowledge.slots["c", 0].sensitivity == 2**18


def test_a_model_that_processes_trained_together_goes_on_alone():
    model, controller, x = build(bits=2)
    controller.context.policy._is_joint = True  # as after steps of several processes
    other = pickle.loads(pickle.dumps(model))
    step(other, x), step(other, x)
    step(model, x), step(model, x)  # there are no such processes any more
    assert controller.context.policy.step == 2
    (context,) = {module.quantizer.context for module in other.modules() if hasattr(module, "quantizer")}  # fmt: skip
    assert context.policy.step == 2 and context.policy.averages


def test_tiny_tensors_keep_to_the_average():
    """Parts have unequal sizes, and each counts with its size."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(5)))
    controller = fewbit.compress_(model, 2.5, verbose=False)
    for _ in range(3):
        model(normal((31, 1), scale=1.0)).square().sum().backward()
    assert controller.allocation and controller.allocation.bits <= 2.5


def test_layers_that_are_not_observed_are_named():
    """Such layers save other bits than the average or a budget says, so the allocation has to say that."""
    model = Regions(True)
    controller = fewbit.compress_(model, fewbit.AdaptiveBits(1.75, interval=1), verbose=False)
    for _ in range(4):
        step(model, normal((8, 64), scale=1.0))
    assert "blocks.0.0" in controller.allocation.unobserved
    text = str(controller.allocation)
    assert "not observed" in text and "use_reentrant=True" in text
