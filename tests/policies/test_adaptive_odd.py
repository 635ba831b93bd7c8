"""Level L3 in odd programs: graphs of several models, other ways to backward passes, threads, partly watched layers."""

import copy
import threading

import pytest
import torch
from composed import Composed
from probed_models import MODELS, loss_of
from regions import Regions
from samples import normal
from torch import nn
from torch._dynamo import compiled_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from training import build, least_budget, step

import fewbit

X = normal((8, 64), scale=1.0)


def mlp(results=64):
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, results))


def compressed(model, bits=2.5, **options):
    return fewbit.compress_(model, fewbit.AdaptiveBits(bits, interval=3), verbose=False, **options)


def names(controller):
    return {row.name for row in controller.allocation}


@pytest.mark.fast(1)
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_modules_of_a_model_called_one_by_one(interval):
    """Each module has its turn, even if one would be due whenever it is observed."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"enc": mlp(), "head": mlp(results=8), "rare": mlp()})
    config = fewbit.AdaptiveBits(2, interval=interval)
    controller = fewbit.compress_(model, config, verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(30):
        optimizer.zero_grad()
        h = model["enc"](X)
        if number == 0:
            model["rare"](h)  # once, and without a backward pass
        model["head"](h).square().mean().backward()
        optimizer.step()
    found = {row.name: row for row in controller.allocation}
    assert {"enc.0", "enc.2", "head.0", "head.2"} <= found.keys()
    assert all(row.sensitivity > 0 for name, row in found.items() if name[:4] != "rare")


def test_a_compressed_model_within_another():
    torch.manual_seed(0)
    outer = nn.Sequential(mlp(), nn.ReLU(), nn.Linear(64, 8))
    controller = compressed(outer, exclude="0")
    own = compressed(outer[0])
    for _ in range(8):
        loss_of(outer(X)).backward()
    assert names(controller) == {"2"} and names(own) == {"0", "2"}
    # Each has what one controller of all would find out.
    found = [row.sensitivity for row in (*own.allocation, *controller.allocation)]
    together = compressed(outer)
    for _ in range(8):
        loss_of(outer(X)).backward()
    assert [row.name for row in together.allocation] == ["0.0", "0.2", "2"]
    assert found == pytest.approx([row.sensitivity for row in together.allocation], rel=0.3)


def test_a_model_around_a_compressed_one_takes_it_over():
    inner = mlp()
    own = compressed(inner)
    outer = nn.Sequential(inner, nn.ReLU(), nn.Linear(64, 8))
    controller = compressed(outer, exclude="0")
    assert type(inner[0]) is nn.Linear
    for _ in range(3):
        step(outer, X)
    assert names(controller) == {"2"} and not own.allocation


def test_batched_gradients():
    model, controller, x = build(bits=2)
    for _ in range(4):
        y = model(x)
        rows = torch.eye(3).new_ones(2, *y.shape)
        torch.autograd.grad(y, list(model.parameters())[-1], rows, is_grads_batched=True)
    step(model, x)
    assert "not batched (vmap)" in " ".join(str(controller.allocation).split())
    for _ in range(5):
        step(model, x)
    assert controller.allocation


def test_functional_transforms():
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8))
    controller = compressed(model)
    parameters = dict(model.named_parameters())
    x = X

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x[None],)).square().sum()

    torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for _ in range(4):
        step(model, x)
    assert controller.allocation


# {what runs a backward pass alone, of a forward pass in eager mode: function(backward, gradients of the result)}
TRACED = {
    "vmap": lambda backward, grads: torch.func.vmap(backward)(grads),
    "vjp": lambda backward, grads: torch.stack(
        [torch.func.vjp(backward, grad)[0] for grad in grads]
    ),
    "make_fx": lambda backward, grads: torch.stack(
        [make_fx(backward)(torch.zeros_like(grad))(grad) for grad in grads]
    ),
}


@pytest.mark.parametrize(
    "policy", [2, fewbit.AdaptiveBits(3), fewbit.SampleBits(3), fewbit.ErrorBound(0.1)]
)
@pytest.mark.parametrize("way", TRACED)
def test_a_backward_pass_that_is_traced_alone(policy, way):
    """Copies with masks, or with different bits for samples, have the same values as in an ordinary backward pass."""
    torch.manual_seed(0)
    model = mlp()
    fewbit.compress_(model, policy, verbose=False)
    x = X * torch.linspace(0.1, 5, len(X))[:, None]
    for _ in range(3):
        model(x).sum().backward()
    y, grads = model(x), normal((3, *X.shape), seed=6)

    def backward(grad):
        found = torch.autograd.grad(y, list(model.parameters()), grad, retain_graph=True)
        return torch.cat([each.flatten() for each in found])

    found = TRACED[way](backward, grads)
    torch.testing.assert_close(found, torch.stack([backward(grad) for grad in grads]))


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a")
@pytest.mark.parametrize("policy", [fewbit.AdaptiveBits(3), fewbit.ErrorBound(0.1)])
def test_compiled_autograd_is_not_measured(policy):
    """Its graph takes no callback at the end of the backward pass."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    controller = fewbit.compress_(model, policy, verbose=False)
    torch._dynamo.reset()
    for run in (step, lambda model, x: model(x).backward(torch.ones(len(x), 8)), step):
        with compiled_autograd._enable(torch.compile(backend="eager")):
            run(model, X)
    assert not (controller.allocation or controller.bounds)
    for _ in range(3):
        step(model, X)
    assert controller.allocation or controller.bounds


@pytest.mark.slow
def test_parts_that_cancel():
    """Each sum below returns x: as independent parts, 500 of them would make noise 5^500 times as large."""
    torch.manual_seed(0)

    def forward(model, x, parts):
        x = model.body(x)
        for _ in range(parts):
            x = 2 * x - x.sigmoid() * 0 - x
        return x

    model = Composed(forward, body=mlp())
    controller = compressed(model)

    def after(parts):
        for _ in range(8):
            model.zero_grad()
            loss_of(model(X, parts)).backward()
        return {row.name: row.sensitivity for row in controller.allocation}

    few, many = after(1), after(500)
    assert few.keys() == many.keys()
    for name in ("body.0", "body.2"):
        assert many[name] == pytest.approx(few[name], rel=0.5)


def test_a_forward_of_another_thread_during_a_backward_pass():
    """The forward pass does not end the measurement; else layers below would seem to have no gradient."""
    torch.manual_seed(0)
    model = mlp(results=8)
    controller = compressed(model)
    seen = []

    def other(grad):
        thread = threading.Thread(target=model, args=(normal((8, 64)),))
        thread.start()
        thread.join()
        seen.append(len(controller.allocation))

    x = X
    handle = model[1].register_forward_hook(lambda module, args, y: y.register_hook(other) and None)
    loss_of(model(x)).backward()
    handle.remove()
    assert seen == [0]
    step(model, x)
    assert {row.name for row in controller.allocation if row.sensitivity > 0} == {"0", "2"}


def test_several_threads():
    torch.manual_seed(0)
    model = mlp(results=8)
    exact = copy.deepcopy(model)
    controller = compressed(model)
    errors = []

    def train(seed):
        try:
            for i in range(12):
                loss_of(model(normal((8, 64), scale=1.0, seed=seed + i))).backward()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(100 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert controller.context.policy.step == 36
    # No gradient of a thread's is lost, or another's: those of biases are exact.
    for first in (0, 100, 200):
        for i in range(12):
            loss_of(exact(normal((8, 64), scale=1.0, seed=first + i))).backward()
    for place in (0, 2):
        torch.testing.assert_close(model[place].bias.grad, exact[place].bias.grad)
    # And what the threads have begun leaves nothing behind that keeps it from adapting.
    for _ in range(6):
        step(model, X)
    assert names(controller) == {"0", "2"}
    assert all(row.sensitivity > 0 for row in controller.allocation)
    assert controller.allocation.bits <= 2.5


def test_an_empty_batch():
    """Its gradients are 0, and a measurement gets nothing from it."""
    torch.manual_seed(0)
    model = mlp()
    controller = compressed(model)
    for i in range(6):
        controller.number_samples(torch.zeros(0, dtype=torch.int64))
        model.zero_grad()
        model(torch.zeros(0, 64)).sum().backward()
        assert all(parameter.grad.eq(0).all() for parameter in model.parameters())
        step(model, X)
        shapes = {(row.elements, row.samples) for row in controller.allocation}
        assert shapes == ({(8 * 64, 8)} if i else set())
    assert controller.context.policy.step == 12
    assert controller.state_dict().keys().isdisjoint({"magnitudes", "numbers"})


def test_layers_that_no_output_leads_to_keep_the_average():
    """Only a loss inside the model depends on such layers."""
    torch.manual_seed(0)

    def forward(model, x):
        model.loss = 100 * model.aux(2 * x).square().sum()
        return model.body(x)

    model = Composed(forward, body=mlp(), aux=mlp())
    controller = compressed(model, 3)
    for _ in range(6):
        (loss_of(model(X)) + model.loss).backward()
    for row in controller.allocation:
        assert row.bits == 3 if row.name.startswith(("aux", ":square")) else row.sensitivity > 0
    own = [row for row in controller.allocation if row.name.startswith("body")]
    assert sum(row.bits * row.elements for row in own) <= 3 * sum(row.elements for row in own)


def test_a_function_with_an_attribute_that_leaves_have():
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.variable = 3
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return grad

    model = Composed(
        lambda model, x: model.b(Same.apply(torch.relu(model.a(x)))),
        a=nn.Linear(64, 64),
        b=nn.Linear(64, 8),
    )
    controller = compressed(model)
    for _ in range(4):
        step(model, X)
    assert all(row.sensitivity > 0 for row in controller.allocation)


def test_inputs_with_gradients_are_no_parameters():
    """Frozen layers have no sensitivity of their own, and carry noise to no parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))
    model[1].requires_grad_(False)
    model[0].requires_grad_(False)
    controller = compressed(model)
    for _ in range(4):
        step(model, X.requires_grad_())
    found = {row.name: row.sensitivity for row in controller.allocation}
    # The last layer's input is computed from the norm's copy.
    assert found["1"] > 0 and "3" not in found


@pytest.mark.parametrize("level", ["L2.5", "L3"])
def test_layers_of_one_input_with_bits_of_their_own(level):
    layers = {name: nn.Linear(256, 8) for name in "abc"}
    model = Composed(lambda model, x: model.a(x) + model.b(x) + model.c(x), **layers)
    fewbit.compress_(model, fewbit.Level(level, 2), overrides={"b": 8}, verbose=False)
    found = fewbit.saved_bytes(model, normal((32, 256))).kept
    codes = sorted(entry.bytes for entry in found if entry.kind == "packed" and entry.bytes)
    assert len(codes) == 2
    assert codes[1] > 3.5 * codes[0]


def test_gradients_that_are_not_finite_leave_magnitudes_alone():
    model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8))
    controller = fewbit.compress_(model, fewbit.SampleBits(2), verbose=False)
    x = normal((8, 256), scale=1.0)
    for scale in (1.0, float("inf"), 1.0):
        controller.number_samples(range(8))
        (model(x) * scale).square().sum().backward()
    tables = controller.context.policy.magnitudes._tables
    assert all(tensor[:8].isfinite().all() for tensor in tables.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpointed", "other shapes", "branches"])
def test_budgets_are_of_the_sample(kind):
    """Training on other inputs does not change the budget."""
    torch.manual_seed(0)
    sample = normal((32, 64), scale=1.0)
    if kind == "checkpointed":
        model, inputs = Regions(False), [(sample,)]
    elif kind == "other shapes":
        model, sample = MODELS["transformer"][0](), normal((4, 64, 32), scale=1.0)
        inputs = [(normal((4, 8, 32), scale=1.0),)]
    else:
        model = Composed(
            lambda model, x, first=True: model.a(x) if first else model.b(x), a=mlp(), b=mlp()
        )
        inputs = [(sample, True), (sample, False)]
    most = fewbit.saved_bytes(model, sample).total
    budget = int(1.5 * least_budget(model, sample)) + 1000
    assert budget < most or kind == "checkpointed"
    fewbit.compress_(model, fewbit.Budget(budget, interval=4), sample=sample, verbose=False)
    for i in range(10):
        assert fewbit.saved_bytes(model, sample).total <= budget
        model.zero_grad()
        loss_of(model(*inputs[i % len(inputs)])).backward()
    assert fewbit.saved_bytes(model, sample).total > 0.6 * budget


def test_a_sample_without_tensors_to_choose_for():
    model = mlp().eval()
    with pytest.raises(fewbit.errors.InputError, match="in training mode"):
        fewbit.compress_(model, fewbit.Budget("6 GiB"), sample=normal((8, 64)), verbose=False)


def test_softmax_and_its_logarithm_are_two_slots():
    def forward(model, x):
        y = model.body(x)
        return torch.softmax(y, 1) + torch.log_softmax(2 * y, 1) + F.softmax(y, 1)

    model = Composed(forward, body=nn.Linear(64, 64))
    controller = compressed(model)
    for _ in range(3):
        step(model, X)
    assert {":softmax", ":log_softmax"} <= names(controller)


def test_layers_made_as_ours_are_left_without_the_context():
    model = nn.Sequential(fewbit.nn.Linear(64, 64), nn.Linear(64, 8))
    compressed(model)
    fewbit.restore_(model)
    assert model[0].quantizer.context is None
