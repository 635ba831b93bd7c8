"""A probe of AC-GC's bounds in whole models and odd passes: activations, the monitor, cost, and clean-up."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from composed import Composed
from layouts import LAYOUTS, InLayout
from probed_models import (
    MODELS,
    Attention,
    Fixed,
    Twice,
    converted,
    gradient,
    loss_of,
)
from samples import normal
from test_error_models import monitored_of, observed
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fewbit.policies.error_bound.probe import ErrorBoundProbe


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))


X = normal((8, 64), scale=1.0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_whole_models(name, is_checkpointed):
    """The step is the same. A checkpointed region, which is rounded with other seeds, has a similar result."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), normal(shape, scale=1.0)
    controller = converted(model)
    gradients = []

    def run(model, x, seed=0, is_checkpointed=is_checkpointed):
        torch.manual_seed(3)
        model.zero_grad()
        y = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
        loss_of(y).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))

    controller.context.policy = Fixed()
    run(model, x)
    found = observed(model, controller, x, run=run, monitored={("0", 0), ("9", 0), ("4", 0)})
    assert torch.equal(*gradients)
    plain = observed(model, controller, x, run=lambda *of: run(*of, is_checkpointed=False))
    assert found.slots.keys() == plain.slots.keys()
    assert found.activations.keys() == plain.activations.keys() and len(found.activations) >= 2
    assert monitored_of(found).keys() == {("0", 0), ("9", 0), ("4", 0)} & found.slots.keys()
    for name, slot in plain.slots.items():
        ours = found.slots[name]
        assert slot.is_known and slot.samples == shape[0]
        assert (ours.elements, ours.is_known) == (slot.elements, True)
        assert (
            {one.label for one in ours.constraints}
            == {one.label for one in slot.constraints}
            != set()
        )
        for one, other in zip(ours.constraints, slot.constraints, strict=True):
            assert one.v2 == pytest.approx(other.v2, rel=0.35)
            assert one.first == pytest.approx(other.first, rel=0.4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
@pytest.mark.parametrize("is_inside", [False, True], ids=["of results", "within"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, is_inside):
    """Nothing raises, and the step is the same."""
    _, _, is_measured = LAYOUTS[name]
    model = InLayout(name, is_inside)
    controller = converted(model)
    gradients = []

    def run(model, x, seed=0):
        torch.manual_seed(0)
        model.zero_grad()
        model.loss(x).backward()
        gradients.append(model.a.weight.grad)

    controller.context.policy = Fixed()
    run(model, X)
    found = observed(model, controller, X, run=run, monitored={("a", 0)})
    assert torch.equal(*gradients)
    if is_measured:
        assert all(slot.constraints for slot in found.slots.values())
    elif found is not None:
        for slot in found.slots.values():
            assert slot.constraints or not slot.is_known


def activations(is_checkpointed):
    """Return a model with activations as modules, as a called function, and as a function that a module of torch has."""
    torch.manual_seed(0)

    def forward(model, x):
        if is_checkpointed:
            x = checkpoint(model.first, x, use_reentrant=False)
        else:
            x = model.first(x)
        return F.gelu(F.leaky_relu(F.gelu(model.last(model.layer(x))), 0.2))

    return Composed(
        forward,
        first=nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16), nn.GELU("tanh")),
        layer=nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True),
        last=nn.Linear(16, 16),
    )


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_names_of_activations(is_checkpointed):
    model = activations(is_checkpointed)
    found = observed(model, converted(model), normal((4, 6, 16), scale=1.0), run=gradient)
    assert {name: activation.function for name, activation in found.activations.items()} == {
        "first.1": "silu",
        "first.3": "gelu_tanh",
        "layer.activation": "gelu",
        ":gelu": "gelu",
        ":leaky_relu": "leaky_relu",
    }
    assert found.activations[":leaky_relu"].parameters == (0.2,)


@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_at_activations(device, inplace):
    """The result has squared norms of the gradients of its output and of its input, the latter by the table."""

    x = nn.Parameter(normal((8, 64), scale=1.0).to(device))
    y = x.detach().requires_grad_()
    inner = F.silu(y)
    outer = F.silu(inner * 2.0)
    at_outer = torch.autograd.grad(loss_of(outer), [outer, inner, y], retain_graph=True)
    model = Composed(
        lambda model, x: model.act(model.act(x * 1.0) * 2.0), act=nn.SiLU(inplace=inplace)
    )
    controller = converted(model, layers={"activation_bits": 8})
    found = observed(model, controller, x, run=gradient).activations["act"]
    squares = [float(gradient.square().sum()) for gradient in at_outer]
    assert found.grad2 == pytest.approx(squares[0] + squares[1], rel=1e-2)
    assert found.v2 == pytest.approx(squares[1] / 4 + squares[2], rel=1e-2)
    assert found.function == "silu" and found.parameters == ()


def test_the_truth_about_a_norm_and_what_shares_its_copy():
    """g^ is the gradient of the step, g is torch's own from the same gradient of the result."""
    torch.manual_seed(0)

    def forward(model, x):
        x = model.norm(x)
        return torch.cat([model.a(x), model.b(x)], 1)

    model = Composed(forward, norm=nn.LayerNorm(64), a=nn.Linear(64, 8), b=nn.Linear(64, 8))
    x = nn.Parameter(X)

    def squares():
        weights = {"weight": model.norm, "a: weight": model.a, "b: weight": model.b}
        found = {"input": x.grad, **{label: part.weight.grad for label, part in weights.items()}}
        return {label: float(grad.square().sum()) for label, grad in found.items()}

    gradient(model, x)
    expected, x.grad = squares(), None
    found = observed(model, converted(model, 2), x, run=gradient, monitored={("norm", 0)})
    monitored = found.slots["norm", 0].monitored
    assert {label: square for label, _, square in monitored} == pytest.approx(expected, rel=1e-4)
    assert {label: hat for label, hat, _ in monitored} == pytest.approx(squares(), rel=1e-4)


def test_the_truth_about_attention():
    """q, k and v are exact together if all are monitored. A slot has labels of the gradients that depend on it."""

    class Model(Attention):
        def forward(self, x):
            self.before = self.qkv(x)
            self.before.retain_grad()
            heads = [part.unflatten(2, (4, 8)).transpose(1, 2) for part in self.before.chunk(3, 2)]
            return F.scaled_dot_product_attention(*heads)

    torch.manual_seed(0)
    model, x = Model(), normal((4, 8, 32), scale=1.0)
    loss_of(model(x)).backward()
    of = dict(zip(("query", "key", "value"), model.before.grad.chunk(3, 2), strict=True))
    expected = {label: float(grad.square().sum()) for label, grad in of.items()}
    controller = converted(model, 2)
    name = ":scaled_dot_product_attention"
    all_of_it = {(name, slot) for slot in range(3)}

    def run(model, x, seed=0):
        loss_of(model(x)).backward()

    found = monitored_of(observed(model, controller, x, run=run, monitored=all_of_it))
    assert found.keys() == all_of_it
    for slot, labels in enumerate([expected, expected, ("query", "key")]):
        exact = {label: square for label, _, square in found[name, slot]}
        assert exact == pytest.approx({label: expected[label] for label in labels}, rel=1e-4)
    (_, hat2, exact2), *_ = found[name, 0]
    assert hat2 != pytest.approx(exact2, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["with the graph", "after the backward pass"])
def test_exact_values_of_monitored_slots_alone_are_held_and_freed(how):
    """If an exception comes between the forward and the backward pass, nothing but the graph frees the values."""
    probe = ErrorBoundProbe(0, {("0", 0)})
    model = mlp()
    converted(model).context.policy = Fixed(probe=probe)
    y = model(X)
    (exact,) = [weakref.ref(rounding.exact) for rounding in probe._exact]
    assert exact() is not None
    if how == "with the graph":
        del y
    else:
        loss = loss_of(y)
        loss.backward()
    gc.collect()
    assert exact() is None
    y = model(X)
    assert any(rounding.exact is not None for rounding in probe._exact)
    probe.end()
    assert all(rounding.exact is None for rounding in probe._exact)
    loss_of(y).backward()  # which finds nothing, and raises nothing


@pytest.mark.slow
def test_a_backward_pass_that_fails():
    """Exact values are freed although the graph exists. A later backward pass still has a result."""

    fails = [True]

    def fail(grad):
        if fails:
            raise RuntimeError("not this time")

    def forward(model, x):
        y = model.a(x)
        y.register_hook(fail)
        return model.b(y)

    probe = ErrorBoundProbe(0, {("a", 0), ("b", 0)})
    model = Composed(forward, a=nn.Linear(64, 64), b=nn.Linear(64, 8))
    converted(model).context.policy = Fixed(probe=probe)
    loss = loss_of(model(X))
    exact = [weakref.ref(rounding.exact) for rounding in probe._exact]
    with pytest.raises(RuntimeError, match="not this time"):
        loss.backward(retain_graph=True)
    gc.collect()
    assert len(exact) == 2 and not any(gradient() is not None for gradient in exact)
    assert not probe.runs() and not probe.has_run()
    fails.clear()
    loss.backward()
    assert probe.has_run()
    probe.send()
    found = probe.results()
    assert all(found.slots[name].constraints for name in (("a", 0), ("b", 0)))
    assert not monitored_of(found)  # by then there was nothing to compare with


@pytest.mark.parametrize("monitored", [frozenset(), {("1", 0)}])
def test_layers_with_formulas_run_backward_once(monitored, monkeypatch):
    """They run it more often only to measure, or if exact values are saved."""
    runs = []
    original = ErrorBoundProbe.probe

    def probe(self, number, backward, context, *rest):
        def counting(context, *grads):
            runs.append(context._forward_cls.__name__)
            return backward(context, *grads)

        return original(self, number, counting, context, *rest)

    monkeypatch.setattr(ErrorBoundProbe, "probe", probe)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 8, 3), nn.GroupNorm(2, 8)
    )
    model.extend([nn.PReLU(), nn.Flatten(), nn.Linear(512, 64), nn.LayerNorm(64), nn.RMSNorm(64)])
    model.append(nn.Softmax(1))
    found = observed(
        model, converted(model), normal((4, 3, 8, 8)), run=gradient, monitored=monitored
    )
    assert len(found.slots) >= 7
    expected = ["_Softmax", *(["_BatchNormFunction", "_Convolution"] if monitored else [])]
    assert sorted(runs) == sorted(expected)


def test_what_comes_to_the_host_is_small():
    """Single numbers, and one for each channel, are copied to the host, but none for each row."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8))
    probe = ErrorBoundProbe(0)
    converted(model).context.policy = Fixed(probe=probe)
    gradient(model, normal((2000, 64)))
    assert sum(item.numel() for item in probe._measured()) < 100


@pytest.mark.slow
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("scales", [(1.0, 100.0), (100.0, 1.0), (3.0, 3.0)])
def test_each_call_of_a_layer(scales, is_checkpointed):
    """Squares add up. D is that of both calls, with the errors of each, and agrees with sampling."""
    model, x = Twice(scales, is_checkpointed), normal((16, 64), scale=1.0)
    controller = converted(model, 4)
    ((_, seen),) = observed(model, controller, x, run=gradient).slots.items()
    assert seen.elements == 2 * 16 * 64
    (demand,) = seen.constraints
    controller.context.policy = Fixed()
    draws = torch.stack([gradient(model, x, seed) for seed in range(60)])
    assert demand.first**2 * seen.error2 == pytest.approx(float(draws.var(0).sum()), rel=0.2)
    grads = normal((16, 64), scale=1.0, seed=9)
    squares = [
        float((grads.t() @ (scale * item)).square().sum())
        for scale, item in zip(scales, (x, x.flip(0)), strict=True)
    ]
    assert demand.v2 == pytest.approx(sum(squares), rel=0.05)


def test_skipped_and_frozen_layers():
    torch.manual_seed(0)
    a, b, skipped = (nn.Linear(64, 64) for _ in range(3))
    model = Composed(
        lambda model, x: model.norm(model.b(model.a(x))),
        a=a,
        b=b,
        skipped=skipped,
        norm=nn.LayerNorm(64).requires_grad_(False),
    )
    b.weight.requires_grad_(False)

    def run(model, x, seed):
        loss_of(model(x)).backward()

    found = observed(model, converted(model), X, run=run).slots
    assert found.keys() == {("a", 0), ("norm", 0)}
    assert [constraint.label for constraint in found["norm", 0].constraints] == ["input"]


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_inputs(value):
    """They have no errors at any bits, so the formula depends on the gradient alone."""
    model = nn.Sequential(nn.Linear(64, 8))
    x = torch.full((8, 64), value)
    (seen,) = observed(model, converted(model), x, run=gradient).slots.values()
    assert seen.error2 == 0 and not any(seen.squares)
    (demand,) = seen.constraints
    grad2 = float(normal((8, 8), scale=1.0, seed=9).square().sum())
    assert demand.first**2 == pytest.approx(64 * grad2, rel=1e-5)
    assert demand.v2 == pytest.approx(float(model[0].weight.grad.square().sum()), rel=1e-5)


def test_bits_that_samples_do_not_share():
    """A tensor whose samples are not known has one square for the whole."""

    model = Composed(lambda model, x: model.a(x[:5]), a=nn.Linear(64, 8))
    (seen,) = observed(model, converted(model), X, run=gradient).slots.values()
    squares = (X[:5] - X[:5].mean(1, keepdim=True)).square().sum()
    assert seen.samples == 0 and not any(seen.squares[1:])
    assert seen.squares[0] == pytest.approx(float(squares), rel=1e-4)


def test_the_noise_has_the_deviation_of_rounding():
    """It is uniform, so that its largest number is sqrt(3) deviations."""
    slot = SimpleNamespace(rounding=SimpleNamespace(tensor=SimpleNamespace(deviation=0.5)))
    noise = ErrorBoundProbe(0).noise(torch.zeros(400, 500), slot, 0, None)
    assert noise.mean().item() == pytest.approx(0, abs=0.01)
    assert noise.std().item() == pytest.approx(0.5, rel=0.01)
    assert noise.abs().max().item() == pytest.approx(0.5 * 3**0.5, rel=0.001)
