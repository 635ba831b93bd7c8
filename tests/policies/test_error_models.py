"""V^2 and D of each kind of layer, against torch's gradients and against the errors that rounding makes."""

import copy
import math

import pytest
import torch
from composed import Composed
from layers import LAYERS, LINEAR, ids
from probed_models import Fixed, converted, loss_of
from samples import normal, same_sums
from torch import nn
from torch.nn import functional as F

import fewbit
from fewbit.functional.products import gated as fewbit_gated
from fewbit.policies.error_bound.probe import ErrorBoundProbe

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def gradients(model, x, seed=0):
    """Return {label: gradient} of the input and of the model's only weight, if it has one."""
    torch.manual_seed(seed)
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    model.zero_grad()
    loss_of(model(x)).backward()
    found = {name.split(".")[-1]: parameter.grad for name, parameter in model.named_parameters()}
    return {"input": x.grad, **found}


def observed(model, controller, x, seed=0, averages=None, run=gradients, monitored=frozenset()):
    probe = ErrorBoundProbe(seed, monitored)
    controller.context.policy = Fixed(averages, probe)
    run(model, x, seed)
    probe.send()
    controller.context.policy = Fixed(averages)
    return probe.results()


def monitored_of(result):
    """Return the norms from exact values for each slot: {(layer, number): (label, |g^|^2, |g|^2) of each gradient}."""
    return {name: slot.monitored for name, slot in result.slots.items() if slot.monitored}


def d_of(demand, error2):
    return (demand.first * error2**0.5 + demand.second * error2) ** 2


def squared_error(model, x, exact, draws, run=gradients):
    """Return {label: mean of |g^ - g|^2 over draws of rounding}."""
    sums = dict.fromkeys(exact, 0.0)
    for seed in range(draws):
        for label, item in run(model, x, 100 + seed).items():
            sums[label] += float((item - exact[label]).double().square().sum()) / draws
    return sums


def pair(layer, device):
    """Return a model to convert, torch's own with the same parameters, and an input that requires no gradient."""
    _, theirs = layer.pair(4, device)
    return nn.Sequential(copy.deepcopy(theirs)), theirs, layer.input(device)


@pytest.mark.parametrize("layer", **ids(LAYERS))
def test_squares_of_gradients(device, layer):
    """V^2 at 8 bits is that of torch's own layer, and the step is that without a probe, also if exact values are saved."""
    model, theirs, x = pair(layer, device)
    exact, steps = gradients(theirs, x), []

    def run(*arguments):
        steps.append((gradients(*arguments), torch.get_rng_state()))

    controller = converted(model, 8)
    controller.context.policy = Fixed()
    run(model, x)
    found = observed(model, controller, x, run=run, monitored={("0", 0)})
    (plain, state), (probed, state_after) = steps
    assert torch.equal(state_after, state)
    assert all(same_sums(probed[label], grad) for label, grad in plain.items())
    ((name, seen),) = found.slots.items()
    assert name == ("0", 0) and seen.is_known and seen.dtype_bytes == 4 and seen.monitored
    assert {constraint.kind for constraint in seen.constraints} == {"in expectation"}
    expected = {"weight"} if layer in LINEAR else {"input", "weight"}
    assert {constraint.label for constraint in seen.constraints} == expected & exact.keys()
    for constraint in seen.constraints:
        true = float(exact[constraint.label].double().square().sum())
        # Of one draw: what g^ - g has along g is of mean 0 and of this size.
        size = exact[constraint.label].numel()
        along = 2 * math.sqrt(d_of(constraint, seen.error2) * true / size)
        assert constraint.v2 == pytest.approx(true, rel=0.01, abs=3 * along), constraint.label


@pytest.mark.slow
@pytest.mark.parametrize("layer", **ids(LAYERS))
def test_d_against_rounding(device, layer):
    """Errors at 3 bits are not above D, and less far below it if gradients are not along the layer's input.

    D is computed from the rounding errors of one step, so it is the mean over steps that counts.
    """
    model, theirs, x = pair(layer, device)
    exact = gradients(theirs, x)
    controller = converted(model, 3)
    found = {}
    for seed in range(16):
        ((_, seen),) = observed(model, controller, x, seed).slots.items()
        for constraint in seen.constraints:
            found.setdefault(constraint.label, []).append(d_of(constraint, seen.error2))
    errors = squared_error(model, x, exact, 80)
    for label, steps in found.items():
        d = float(sum(steps)) / len(steps)
        assert errors[label] < 1.25 * d, label
        is_equal = layer in LINEAR and "Transpose" not in layer.name and layer.name != "Conv3d"
        is_padded = bool(layer.options.get("padding"))
        assert errors[label] > (0.4 if is_equal and not is_padded else 0.05) * d


DIFFERENT = {
    "linear": (lambda: nn.Linear(256, 16), (16, 256)),
    "convolution": (lambda: nn.Conv2d(4, 8, 3, groups=2), (16, 4, 8, 8)),
    "layer norm": (lambda: nn.LayerNorm(256), (16, 256)),
    "batch norm": (lambda: nn.BatchNorm2d(4), (16, 4, 8, 8)),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), (16, 4, 8, 8)),
}


@pytest.mark.parametrize("quantizer, decades", [("uniform", 2), ("rotated", 1)])
@pytest.mark.parametrize("kind", DIFFERENT)
def test_samples_of_very_different_size(device, kind, quantizer, decades):
    """D takes into account that samples share bits and that rows with large gradients have large errors.

    Gradients along the input would have smaller errors than D: the ends of a group's range are not rounded.
    """
    torch.manual_seed(0)
    make, shape = DIFFERENT[kind]
    theirs = make().to(device)
    scale = torch.logspace(-decades / 2, decades / 2, 16).view(-1, *[1] * (len(shape) - 1))
    x = (normal(shape, scale=1.0) * scale).to(device)
    weights = normal((16, 1), scale=1.0).to(device).abs().view_as(scale)

    def run(model, x, seed=0):
        torch.manual_seed(seed)
        model.zero_grad()
        y = model(x)
        (y * weights * normal(y.shape, scale=1.0, seed=1).to(device)).sum().backward()
        return {"weight": next(model.parameters()).grad}

    model = nn.Sequential(copy.deepcopy(theirs))
    controller = converted(model, 3, layers=fewbit.LayerSettings(quantizer=quantizer))
    ((_, seen),) = observed(model, controller, x, run=run).slots.items()
    assert seen.samples == 16 and len(seen.squares) == 16
    (demand,) = (constraint for constraint in seen.constraints if constraint.label == "weight")
    errors = squared_error(model, x, run(theirs, x), 60, run)
    assert errors["weight"] == pytest.approx(d_of(demand, seen.error2), rel=0.2)


@pytest.mark.parametrize("bits", [1, 2])
def test_errors_are_taken_off_the_squares(bits):
    """V^2 is that of exact gradients, although the computed gradients are much longer."""
    torch.manual_seed(0)
    theirs = nn.Linear(64, 32)
    x = normal((16, 64), scale=1.0)
    true = float(gradients(theirs, x)["weight"].square().sum())
    model = nn.Sequential(copy.deepcopy(theirs))
    controller = converted(model, bits)
    found, raw = [], []
    for seed in range(40):
        ((_, seen),) = observed(model, controller, x, seed).slots.items()
        found.append(seen.constraints[0].v2)
        raw.append(float(model[0].weight.grad.square().sum()))
    assert sum(raw) / 40 > 1.1 * true
    assert sum(found) / 40 == pytest.approx(true, rel=0.05)


def gemma():
    """Return a norm that is known by its source, which adds 1 to the weight, and a layer."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    return GemmaRMSNorm(64), nn.Linear(64, 8)


SHARED = {
    "layer norm": (lambda: (nn.LayerNorm(64), nn.Linear(64, 8), nn.Linear(64, 12)), (16, 64)),
    "batch norm": (
        lambda: (nn.BatchNorm2d(8), nn.Conv2d(8, 6, 2), nn.Conv2d(8, 4, 2, groups=2)),
        (8, 8, 6, 6),
    ),
    "gemma": (gemma, (4, 4, 64)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_layers_that_share_the_copy_of_a_norm(name):
    """Each layer has a constraint on the norm's slot under its own name. The norm's weight scales errors."""
    make, shape = SHARED[name]
    torch.manual_seed(0)
    norm, *layers = make()

    def forward(model, x):
        x = model.norm(x)
        return torch.cat([layer(x).flatten(1) for layer in model.layers], 1)

    theirs = Composed(forward, norm=norm, layers=nn.ModuleList(layers))
    with torch.no_grad():
        theirs.norm.weight.copy_(torch.rand_like(theirs.norm.weight) * 3)
    x = normal(shape, scale=1.0)

    def run(model, x, seed=0):
        torch.manual_seed(seed)
        x = nn.Parameter(x.clone())
        model.zero_grad()
        loss_of(model(x)).backward()
        weights = enumerate(layer.weight.grad for layer in model.layers)
        of_layers = {f"layers.{i}: weight": grad for i, grad in weights}
        return {"input": x.grad, "weight": model.norm.weight.grad, **of_layers}

    exact = run(theirs, x)
    model = copy.deepcopy(theirs)
    controller = converted(model, 4)
    runs = [observed(model, controller, x, seed, run=run).slots for seed in range(20)]
    ((found, seen),) = runs[0].items()
    assert found == ("norm", 0)
    assert {constraint.label for constraint in seen.constraints} == exact.keys()
    errors = squared_error(model, x, exact, 60, run)
    for number, constraint in enumerate(seen.constraints):
        assert constraint.kind == "in expectation"
        v2 = sum(of["norm", 0].constraints[number].v2 for of in runs) / len(runs)
        assert v2 == pytest.approx(float(exact[constraint.label].square().sum()), rel=0.05)
        d = d_of(constraint, seen.error2)
        assert errors[constraint.label] < 1.2 * d, constraint.label
        assert errors[constraint.label] > (0.05 if constraint.label == "input" else 0.8) * d


def test_channels_of_a_convolution():
    """1 / dx*^2 of a channel is proportional to |g|^2 of its group. Without groups all channels are equal."""
    torch.manual_seed(0)
    x = normal((4, 6, 8, 8), scale=1.0)
    grad = normal((4, 6, 6, 6), scale=1.0) * torch.tensor([1.0, 1, 1, 1, 5, 5])[:, None, None]
    seen = observed_with(grad, nn.Conv2d(6, 6, 3, groups=3), x)
    squares = grad.square().sum((0, 2, 3)).view(3, 2).sum(1).repeat_interleave(2)
    assert seen.channel_weights == pytest.approx((squares / squares.mean()).tolist(), rel=0.1)
    assert observed_with(grad, nn.Conv2d(6, 6, 3), x).channel_weights is None


def test_channels_of_a_batch_norm():
    torch.manual_seed(0)
    x = normal((8, 6, 8, 8), scale=1.0)
    grad = normal(x.shape, scale=1.0) * torch.tensor([0.1, 1, 1, 2, 3, 5])[:, None, None]
    seen = observed_with(grad, nn.BatchNorm2d(6), x)
    # Of the weight, whose gradients of random signs are small: |g_c|^2.
    squares = grad.square().sum((0, 2, 3))
    assert seen.channel_weights == pytest.approx((squares / squares.mean()).tolist(), rel=0.05)
    assert sum(seen.channel_weights) == pytest.approx(6)


def observed_with(grad, layer, x):
    """Return the result for a layer whose output has the gradient."""
    model = nn.Sequential(layer)
    run = lambda model, x, seed: model(x).backward(grad)  # noqa: E731
    (seen,) = observed(model, converted(model, 8), x, run=run).slots.values()
    return seen


class Of(nn.Module):
    """A model that applies a function to tensors that are results, whose gradients stay. module: the function's owner."""

    def __init__(self, count, function, module=None):
        super().__init__()
        self.count, self.function, self.module, self.inputs = count, function, module, ()

    def forward(self, x):
        self.inputs = [item * 1.0 for item in x.unbind(0)]
        for input in self.inputs:
            input.retain_grad()
        if self.module is None:
            return self.function(*self.inputs)
        return self.function(self.module, *self.inputs)


def gated(activation):
    def function(linear, gate, up):
        if not hasattr(linear, "quantizer"):
            return getattr(F, activation)(gate) * up
        quantizer = linear.quantizer.copy_for("gated")
        return fewbit_gated(gate, up, activation, quantizer=quantizer)

    return function


def called(module, *inputs):
    return module(*inputs)


ATTENTION = ("query", "key", "value"), (4, 2, 10, 16)
FUNCTIONS = {  # {name: (function, labels of its inputs, shape, module)}
    "attention": (F.scaled_dot_product_attention, *ATTENTION, None),
    "matmul": (lambda a, b: torch.matmul(a, b.mT), ("input", "other"), (4, 10, 16), None),
    "mul": (torch.mul, ("input", "other"), (8, 64), None),
    "softmax": (
        lambda x: F.softmax(x, -1) @ torch.eye(64),
        ("input",),
        (8, 64),
        None,
    ),  # a returned result is exact
    "log_softmax": (lambda x: F.log_softmax(x, -1), ("input",), (8, 64), None),
    "SwiGLU": (gated("silu"), ("gate", "up"), (8, 128), nn.Linear(2, 2)),
    "GEGLU": (gated("gelu"), ("gate", "up"), (8, 128), nn.Linear(2, 2)),
    "bilinear": (called, ("input1", "input2"), (16, 16), nn.Bilinear(16, 16, 8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_measured_against_rounding(device, name):
    """The errors of each gradient from one slot at 4 bits with the others at 8, on average over measurements."""
    function, names, shape, module = FUNCTIONS[name]
    torch.manual_seed(0)
    x = normal((len(names), *shape), scale=1.0).to(device)
    theirs = Of(len(names), function, copy.deepcopy(module)).to(device)

    def run(model, x, seed=0):
        torch.manual_seed(seed)
        model.zero_grad()
        loss_of(model(nn.Parameter(x))).backward()
        found = dict(zip(names, (input.grad for input in model.inputs), strict=True))
        if model.module is not None and model.module.weight.grad is not None:
            found["weight"] = model.module.weight.grad
        return found

    model = copy.deepcopy(theirs)
    exact = run(theirs, x)
    controller = converted(model, 8)
    seen = observed(model, controller, x, run=run).slots
    assert seen and all(slot.constraints for slot in seen.values())
    for variable in seen:
        averages = {name: 4.0 if name == variable else 8.0 for name in seen}
        runs = [observed(model, controller, x, i, averages, run).slots for i in range(6)]
        controller.context.policy = Fixed(averages)
        errors = squared_error(model, x, exact, 30, run)
        for demand in runs[0][variable].constraints:
            assert demand.kind == "measured" and demand.second == 0
            sharing = sum(
                demand.label in [constraint.label for constraint in of.constraints]
                for of in runs[0].values()
            )
            d = v2 = 0.0
            for entry in runs:
                of = {one.label: one for one in entry[variable].constraints}[demand.label]
                d += d_of(of, entry[variable].error2) / sharing / len(runs)
                v2 += of.v2 / len(runs)
            assert errors[demand.label] == pytest.approx(d, rel=0.35), (variable, demand.label)
            true = float(exact[demand.label].square().sum())
            assert v2 == pytest.approx(true, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", ["uniform", "rotated"])
@pytest.mark.parametrize("slopes", [1, 8])
@pytest.mark.parametrize("needs_input", [False, True])
def test_prelu(slopes, needs_input, quantizer):
    """In uniform copies only negative elements have errors, because the saved tensor is 0 at the others."""
    torch.manual_seed(0)
    theirs = nn.PReLU(slopes)
    x = normal((16, 8, 10), scale=1.0) + 0.5

    def run(model, x, seed=0):
        torch.manual_seed(seed)
        model.zero_grad()
        loss_of(model(nn.Parameter(x) if needs_input else x)).backward()
        return {"weight": next(model.parameters()).grad}

    exact = run(theirs, x)
    model = nn.Sequential(copy.deepcopy(theirs))
    controller = converted(model, 4, layers=fewbit.LayerSettings(quantizer=quantizer))
    (seen,) = observed(model, controller, x, run=run).slots.values()
    (demand,) = seen.constraints
    assert (demand.label, demand.kind) == ("weight", "in expectation")
    errors = squared_error(model, x, exact, 100, run)
    assert d_of(demand, seen.error2) == pytest.approx(errors["weight"], rel=0.35)
