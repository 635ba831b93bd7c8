"""The variance that rounding adds to the gradient, as a probe reports it, against formulas and sampling."""

import gc
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from composed import Composed
from layers import LAYERS, fresh, ids
from layouts import LAYOUTS, InLayout
from probed_models import (
    MODELS,
    Collective,
    Counted,
    Fixed,
    Twice,
    converted,
    gradient,
    loss_of,
)
from samples import normal, same_sums
from torch import nn
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.runtime.backends.reference_quantizer import squares
from fewbit.runtime.format.distortion import distortion, relative_distortion
from fewbit.runtime.probes.variance_probe import VarianceProbe

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def observed(model, controller, x, seeds=1, run=gradient):
    """Return {name: sensitivity}, the mean over probes."""
    sums = {}
    for seed in range(seeds):
        probe = VarianceProbe(seed)
        controller.context.policy = Fixed(probe=probe)
        run(model, x)
        probe.send()
        for name, value in probe.results().items():
            sums[name] = sums.get(name, 0.0) + value.sensitivity / seeds
    return sums


def results_of(model, x, controller=None):
    """Return the results of a probe in one step of a model, which is converted first if it has no controller."""
    probe = VarianceProbe(0)
    (controller or converted(model)).context.policy = Fixed(probe=probe)
    gradient(model, x)
    probe.send()
    return probe.results()


def test_the_variance_of_a_parameter_counts_in_proportion_to_its_squared_gradient():
    """The gradient of the first layer is a thousand times as large as that of the second."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 8, bias=False))
    model[1].weight.data.mul_(1000)
    x = normal((32, 64), scale=1.0).requires_grad_()
    found = results_of(model, x)
    squares_of = [weight.grad.square().sum().item() for weight in model.parameters()]
    least = 0.01 * sum(squares_of) / 2
    for number, square in enumerate(squares_of):
        expected = 1 / (square + least)
        assert found[str(number), 0].weight == pytest.approx(expected, rel=1e-4)


# -- against the formulas of ActNN, long version, appendix B ------------------------------------------------
#
# In the paper the variance of rounding a sample to 1 bit is the sum of length * range^2 / 6 over its groups. Here it is
# distortion(kind, 1) * squares, which is the same in uniform copies.


def converted_to(kind, model, bits=8):
    """Compress a model with adaptive bits and copies of one kind, and return its controller."""
    return converted(model, bits, layers=fewbit.LayerSettings(quantizer=kind))


def at_one(x, kind):
    """Return the variance that rounding to 1 bit adds to each sample of x, by the formula."""
    return distortion(kind, 1) * squares(x, 256, kind=kind)


def of_layer(model, x, grad, kind):
    """Formula B.1 without positions: sum over samples of |gradient|^2 * variance of the sample."""
    return (grad.square().sum(1) * at_one(x, kind)).sum()


def of_convolution(model, x, grad, kind):
    """Formula B.1, K / (I A) sum |gradient|^2 variance, if every pixel is used equally often."""
    layer, pixels = model[0], x[0, 0].numel()
    share = layer.stride[0] ** 2 / (pixels * layer.groups)
    return share * (grad.square().sum((1, 2, 3)) * at_one(x, kind)).sum()


def of_norm(model, x, grad, kind):
    """Formula B.2 for the scale's gradient: the noise of x~ times the gradient, over samples."""
    normalized = (x - x.mean(1, keepdim=True)) / x.std(1, correction=0, keepdim=True)
    return of_layer(model, normalized, grad, kind) / x.shape[1]


FORMULAS = {  # {name: (module, shape of its input, formula, relative error)}
    "linear": (lambda: nn.Linear(300, 20), (16, 300), of_layer, 0.05),
    "kernels of 1": (lambda: nn.Conv2d(8, 12, 1, 1, groups=2), (4, 8, 12, 12), of_convolution, 0.1),
    "kernels of 2": (lambda: nn.Conv2d(8, 12, 2, 2, groups=2), (4, 8, 12, 12), of_convolution, 0.1),
    "norm": (lambda: nn.LayerNorm(512), (32, 512), of_norm, 0.05),
}


@pytest.mark.parametrize("kind", ["uniform", "rotated"])
@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name, kind, device):
    make, shape, formula, most = FORMULAS[name]
    model, x = nn.Sequential(make()).to(device), normal(shape, scale=1.0).to(device)
    x = x * torch.arange(1, len(x) + 1, device=device).view(-1, *[1] * (x.dim() - 1))
    y = model(x)
    expected = formula(model, x, torch.autograd.grad(loss_of(y), y)[0], kind)
    (found,) = observed(model, converted_to(kind, model), x, 20).values()
    assert found == pytest.approx(float(expected), rel=most)


# -- against the variance itself ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uniform", "rotated"])
@pytest.mark.parametrize("name", MODELS)
def test_each_part_of_the_variance(name, kind):
    """One variable has 3 bits, the others 8. Parts agree with sampling within a factor of 2, the sum within 1.4."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    x = normal(shape, scale=1.0)
    controller = converted_to(kind, model, 4)
    predicted = observed(model, controller, x, 4)
    kinds = {name: made.quantizer for name, made in results_of(model, x, controller).items()}
    share = {name: relative_distortion(made, 3) for name, made in kinds.items()}
    predicted = {name: value * share[name] for name, value in predicted.items()}

    def variance(averages, draws=8):
        controller.context.policy = Fixed(averages)
        pairs = ((gradient(model, x, 2 * i), gradient(model, x, 2 * i + 1)) for i in range(draws))
        return sum(float((a - b).square().sum()) / 2 for a, b in pairs) / draws

    most = dict.fromkeys(predicted, 8.0)
    rest = variance(most)
    measured = {name: variance({**most, name: 3.0}) - rest for name in predicted}
    assert len(predicted) >= 8
    for value, expected in predicted.items():
        assert 1 / 2 < measured[value] / expected < 2, value
    assert 1 / 1.4 < sum(measured.values()) / sum(predicted.values()) < 1.4


@pytest.mark.slow
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_few_probabilities_of_many_classes(bits):
    """Values of a uniform copy lie on its steps. Noise from rounding them again was far too small."""

    def forward(model, x):
        return torch.nn.functional.cross_entropy(model.head(x), torch.arange(len(x)))

    torch.manual_seed(0)
    head = nn.Linear(32, 2048)
    with torch.no_grad():
        head.weight.mul_(10)  # a few classes have almost all the probability
    model, x = Composed(forward, head=head), torch.randn(64, 32)
    controller = converted(model, bits, overrides={"head": {"bits": 8}})
    slot = ":cross_entropy", 0
    predicted = observed(model, controller, x, seeds=8)[slot] * relative_distortion("uniform", bits)
    draws = torch.stack([gradient(model, x, seed) for seed in range(32)])
    assert 0.5 < predicted / draws.var(0).sum().item() < 2


@pytest.mark.slow
def test_noise_is_carried_through_views():
    """The loss's noise is in all classes, its gradient mostly in those that are right, whose weights are small here."""

    def forward(model, x):
        logits = model.head(model.up(x)).view(8, 8, -1).transpose(0, 1)
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).unsqueeze(1).squeeze(1), labels
        )

    torch.manual_seed(0)
    labels = torch.arange(64)
    model = Composed(forward, up=nn.Linear(16, 32), head=nn.Linear(32, 1024))
    with torch.no_grad():
        model.head.weight[:64] *= 0.1
    x, slot = torch.randn(64, 16), (":cross_entropy", 0)
    controller = converted(model, 2, overrides={"up": {"bits": 8}, "head": {"bits": 8}})
    predicted = observed(model, controller, x, seeds=8)[slot] * relative_distortion("uniform", 2)
    draws = torch.stack([gradient(model, x, seed) for seed in range(32)])
    assert 0.6 < predicted / draws.var(0).sum().item() < 1.6


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("scales", [(1.0, 100.0), (100.0, 1.0), (3.0, 3.0)])
def test_each_call_of_a_layer_has_noise_of_its_own(scales, is_checkpointed):
    """Noise is in the order of the calls, also in a recomputed region, and agrees with sampling."""
    model, x = Twice(scales, is_checkpointed), normal((16, 64), scale=1.0)
    controller = converted(model, 4)
    ((_, sensitivity),) = observed(model, controller, x, 4).items()
    controller.context.policy = Fixed({("linear", 0): 4.0})
    draws = torch.stack([gradient(model, x, seed) for seed in range(40)])
    expected = sensitivity * relative_distortion("rotated", 4)
    assert expected == pytest.approx(float(draws.var(0).sum()), rel=0.25)


@pytest.mark.parametrize("samples", [5, 16, 32])
def test_the_spread_of_a_layer_that_is_called_twice(samples):
    """It has the means of at most 16 parts of the samples, whose variances are combined in the order of their own sizes."""
    model = Twice((1.0, 3.0))
    x = normal((samples, 64), scale=1.0) * torch.arange(1, samples + 1)[:, None]
    (found,) = results_of(model, x).values()
    sizes, parts = squares(x, 256, kind="rotated").sort().values * (1 + 9), min(samples, 16)
    expected = [float(part.mean()) for part in sizes.tensor_split(parts)] + [0.0] * (16 - parts)
    assert found.samples == samples and found.elements == 2 * samples * 64
    assert found.spread == pytest.approx(expected)


def test_products_of_one_module():
    """q @ k and a @ v have one name, and together the variance that they have in separate modules."""

    def by_hand(products):
        def forward(model, x):
            first, second = model.products or (torch.matmul, torch.matmul)
            q, k, v = model.qkv(x).chunk(3, -1)
            weights = (first(q, k.transpose(1, 2)) / 8).softmax(-1)
            return model.last(second(weights, v))

        torch.manual_seed(0)
        parts = {"qkv": nn.Linear(64, 192), "last": nn.Linear(64, 8)}
        return Composed(forward, **parts, products=nn.ModuleList(products))

    x, sums = normal((8, 16, 64)), []
    for products in ((), [Composed(lambda _, a, b: a @ b) for _ in range(2)]):
        model = by_hand(products)
        found = observed(model, converted(model, 4), x, 6)
        sums.append(sum(value for (name, _), value in found.items() if "matmul" in name))
        assert len([name for name, _ in found if "matmul" in name]) == max(len(products), 1)
    assert sums[0] == pytest.approx(sums[1], rel=0.15)


# -- without traces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", **ids(LAYERS))
def test_every_layer(device, layer):
    """Results and torch's random state are those of a step without a probe. The variances are positive."""
    model, _ = layer.pair(4, device)
    model = nn.Sequential(model)
    x = nn.Parameter(layer.input(device))
    controller = converted(model)
    controller.context.policy = Fixed()
    expected, state = gradient(fresh(model), x), torch.get_rng_state()
    grad_x, x.grad = x.grad, None
    found = observed(model, controller, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert same_sums(x.grad, grad_x)
    again = torch.cat(
        [x.new_empty(0), *(parameter.grad.flatten() for parameter in model.parameters())]
    )
    assert same_sums(again, expected)
    assert found and all(result > 0 for result in found.values())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_step_that_is_observed_is_the_same_step(name, is_checkpointed):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), normal(shape, scale=1.0)
    controller = converted(model)
    gradients = []

    def run(model, x):
        torch.manual_seed(3)
        model.zero_grad()
        y = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
        loss_of(y).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))

    controller.context.policy = Fixed()
    run(model, x)
    observed(model, controller, x, run=run)
    assert torch.equal(*gradients)


def test_one_input_of_several_layers_is_one_variable():
    def summed(*layers):
        return Composed(
            lambda model, x: sum(layer(x) for layer in model.layers), layers=nn.ModuleList(layers)
        )

    torch.manual_seed(0)
    layers = nn.Linear(64, 8), nn.Linear(64, 8)
    x = normal((8, 64), scale=1.0)
    both = summed(*layers)
    (name,) = (sums := observed(both, converted(both), x, 10))
    fewbit.restore_(both)
    alone = [observed(model, converted(model), x, 10) for model in map(summed, layers)]
    parts = sum(value for found in alone for value in found.values())
    assert name == ("layers.0", 0) and sums[name] == pytest.approx(parts, rel=0.1)


# -- odd passes --------------------------------------------------------------------------------------------


def test_no_backward_pass_and_one_through_a_part():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    probe = VarianceProbe(0)
    converted(model).context.policy = Fixed(probe=probe)
    y = model(normal((8, 64)))
    assert not probe.has_run()
    torch.autograd.grad(y.sum(), model[1].weight)
    assert probe.has_run()
    probe.send()
    found = probe.results()
    assert found["1", 0].sensitivity > 0 == found["0", 0].sensitivity


def test_a_second_pass_replaces_the_first():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8))
    x = normal((8, 64), scale=1.0)
    controller = converted(model)

    def twice(model, x):
        y = loss_of(model(x))
        y.backward(retain_graph=True)
        y.backward()

    once, again = observed(model, controller, x, 10), observed(model, controller, x, 10, twice)
    for name, value in once.items():
        assert again[name] == pytest.approx(value, rel=0.3)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_gradients_that_are_not_finite_say_nothing(value):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))

    def run(model, x):
        (model(x) * value).sum().backward()

    assert observed(model, converted(model), normal((8, 64)), run=run) == {}


@dataclass(slots=True)
class Slots:
    y: torch.Tensor
    unset: int = field(init=False)


@dataclass
class Branch:
    y: torch.Tensor
    others: list = field(default_factory=list)


def circle(a, b):
    first, second = Branch(a), Branch(b)
    first.others += [second, first.others]
    second.others.append(first)
    return first


def deep(a, b):
    nest = [b]
    for _ in range(5000):
        nest = [nest]
    return a, nest


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: {"a": [a], "b": (b, 3)},
        lambda a, b: {"a": Slots(a), "b": (b,)},
        circle,
        deep,
    ],
    ids=["containers", "dataclasses", "circle", "deep"],
)
def test_outputs_in_containers(make):
    def forward(model, x):
        model.results = model.a(x), model.b(2 * x)
        return make(*model.results)

    def run(model, x):
        model(x)
        a, b = model.results
        (a.square().sum() + b.square().sum()).backward()

    model = Composed(forward, a=nn.Linear(64, 8), b=nn.Linear(64, 8))
    found = observed(model, converted(model), normal((8, 64)), run=run)
    assert len(found) == 2 and all(result > 0 for result in found.values())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
@pytest.mark.parametrize("is_inside", [False, True], ids=["of results", "within"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, is_inside):
    """Nothing raises, and the step is the same. Tensors that cannot be measured have no result."""
    _, _, is_measured = LAYOUTS[name]
    model = InLayout(name, is_inside)
    controller = converted(model)
    gradients = []

    def run(model, x):
        torch.manual_seed(0)
        model.zero_grad()
        controller.number_samples(range(8))
        model.loss(x).backward()
        gradients.append(model.a.weight.grad)

    controller.context.policy = Fixed()
    run(model, normal((8, 64), scale=1.0))
    found = observed(model, controller, normal((8, 64), scale=1.0), run=run)
    assert torch.equal(*gradients)
    assert len(found) == (1 + is_inside if is_measured else 0)
    assert all(result > 0 for result in found.values())


def nodes_below(y) -> list:
    found, waiting = [], [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.append(node)
            waiting += [child for child, _ in node.next_functions]
    return found


def test_an_observation_without_a_backward_pass_leaves_nothing_behind():
    """A graph that continues from forward to forward has hooks of the latest probe alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    controller = fewbit.compress_(model, fewbit.AdaptiveBits(2, interval=1), verbose=False)
    x = normal((8, 64), scale=1.0)
    for _ in range(20):
        x = model(x)
    functions = [node for node in nodes_below(x) if hasattr(node, "saved_tensors")]
    assert len(functions) >= 20
    assert all(len(node._fewbit_observed) == 1 for node in functions)
    x.square().sum().backward()
    model(x)
    assert [row.name for row in controller.allocation] == ["0", "1"]


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_backward_pass_within_the_forward(is_alone):
    """A layer counts if the step's own backward pass reaches it too. Otherwise nothing is known of it."""

    def forward(model, x):
        z = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(model.a(z).square().sum(), z)
        x = x + g.detach()
        return model.b(torch.relu(x if is_alone else model.a(x)))

    torch.manual_seed(0)
    model = Composed(forward, a=nn.Linear(64, 64), b=nn.Linear(64, 8))
    controller = fewbit.compress_(model, fewbit.AdaptiveBits(3, interval=1), verbose=False)
    for _ in range(4):
        loss_of(model(normal((8, 64), scale=1.0))).backward()
    seen = controller.context.policy.knowledge.slots
    assert seen["a", 0].is_known != is_alone and seen["b", 0].is_known
    assert (seen["a", 0].sensitivity > 0) != is_alone
    assert (("a", 0) in controller.context.policy.averages) != is_alone


@pytest.mark.parametrize("function", [Counted, Collective])
def test_backward_passes_with_collectives_run_once(function):
    """They keep the average bits, and noise passes through them."""

    def forward(model, x):
        quantizer = model.linear.quantizer.copy_for("scale")
        return model.last(model.norm(function.apply(model.linear(x), model.weight, quantizer)))

    torch.manual_seed(0)
    layers = {"linear": nn.Linear(64, 64), "last": nn.Linear(64, 8), "norm": nn.LayerNorm(64)}
    model = Composed(forward, weight=nn.Parameter(normal((64,))), **layers)
    function.passes = 0
    found = results_of(model, normal((8, 64), scale=1.0))
    assert (function.passes == 1) == (function is Collective)
    assert found["scale", 0].is_known == (function is Counted)
    assert all(found[name, 0].sensitivity > 0 for name in ("linear", "norm"))


@pytest.mark.slow
def test_nothing_of_the_graph_is_held():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    probe = VarianceProbe(0)
    converted(model).context.policy = Fixed(probe=probe)
    y = model(normal((8, 64)))
    node = weakref.ref(y.grad_fn)
    del y
    gc.collect()
    assert node() is None and len(probe.slots) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8))
    x = normal((32, 64), scale=1.0)
    expected = observed(model, converted(model), x, 4)
    model = model.to(dtype)
    found = observed(model, converted(model), x.to(dtype), 4)
    # (In 16 bits the last layer keeps a copy of its own.)
    assert found["0", 0] == pytest.approx(expected["0", 0], rel=0.1)
    assert sum(found.values()) == pytest.approx(sum(expected.values()), rel=0.1)
