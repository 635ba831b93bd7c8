"""`fewbit.compile`: gradients and saved bytes."""

import pytest
import torch
from compiled_models import EXACT, MARKS, MODELS, exact_gradient, gradient, made
from composed import Composed
from layers import relative, saved_by
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.compiler import partitioner
from fewbit.compiler.joint_graph import is_probability

pytestmark = MARKS


BACKENDS = pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)


AVERAGED = ["attention", "gated", "functions", "scan"]
# Other tests compile the operations of "gated" and "experts" by Inductor.
COMPILED = ["attention", "attention written out", "convolutions", "scan", "functions"]


@pytest.mark.inductor
@pytest.mark.parametrize(
    "name, backend",
    [
        *((name, "aot_eager") for name in MODELS),
        *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in COMPILED),
    ],
)
def test_gradients_and_saved_bytes(name, backend):
    """The report counts what is saved, besides the input and what Inductor adds to align rows."""
    model, x = made(name)
    exact = exact_gradient(model, x, backend=backend, fullgraph=True)
    compiled = fewbit.compile(model, 8, backend=backend, fullgraph=True)
    assert 0 < relative(gradient(model, compiled, x), exact) < 0.02
    counted = compiled.partitioner.report.saved_bytes
    if backend == "aot_eager":
        assert counted <= fewbit.saved_bytes(compiled, x).total <= counted + x.nbytes
    assert sum(row.exact_bytes for row in compiled.partitioner.report.rows) > 3.4 * counted
    torch._dynamo.reset()
    compiled = fewbit.compile(model, 2, backend=backend)
    compiled(x)
    report = compiled.partitioner.report
    assert sum(row.exact_bytes for row in report.rows) > 8 * report.saved_bytes


@pytest.mark.inductor
@pytest.mark.parametrize("name", AVERAGED)
def test_the_mean_of_gradients_is_exact(name):
    """The product of two independent means has the expected value of the squared bias."""
    model, x = made(name)
    exact = gradient(model, model, x)
    compiled = fewbit.compile(model, 2, backend="aot_eager")
    draws = 20
    sums, squares = [0, 0], 0
    for draw in range(2 * draws):
        difference = gradient(model, compiled, x, seed=draw) - exact
        sums[draw % 2] += difference / draws
        squares += float(difference @ difference) / (2 * draws)
    assert abs(float(sums[0] @ sums[1])) < 0.05 * squares


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["attention", "convolutions"])
def test_converted_layers_keep_their_copies(name):
    """The copies of layers are not quantized again, and what functions save is quantized too."""
    model, x = made(name)
    exact = gradient(model, model, x)
    layers = {"activation_bits": 8}
    compiled = fewbit.compile(model, 8, layers=layers, backend="aot_eager")
    gradient(model, compiled, x)
    alone = compiled.partitioner.report.saved_bytes
    torch._dynamo.reset()
    fewbit.compress_(model, bits=8, layers=layers, verbose=False)
    plain = torch.compile(model, backend="aot_eager")
    _, saved = saved_by(plain, x)
    of_layers = sum(x.nbytes for x in saved if x.dtype in (torch.int32, torch.bfloat16))
    compiled = fewbit.compile(model, 8, backend="aot_eager")
    assert relative(gradient(model, compiled, x), exact) < 0.02
    rows = compiled.partitioner.report.rows
    found = [row for row in rows if row.op == "fewbit"]
    assert all(row.bits is None and "fewbit" in row.reason for row in found)
    assert "fewbit" in str(compiled.partitioner.report) and " codes " in str(
        compiled.partitioner.report
    )
    # A layer also saves a number of 4 bytes by which its result is multiplied.
    assert 0 < of_layers <= sum(row.saved_bytes for row in found) <= of_layers + 64
    assert fewbit.saved_bytes(compiled, x).total < 0.6 * fewbit.saved_bytes(plain, x).total
    assert compiled.partitioner.report.saved_bytes < 1.4 * alone


@pytest.mark.inductor
def test_parts_of_a_weight_stay_exact():
    def forward(model, x):
        x = model.embed(x)
        return sum(torch.tanh(x @ part) for part in model.weight.split(64)).square().mean()

    weight = nn.Parameter(torch.randn(192, 64) / 8)
    model, x = Composed(forward, embed=nn.Linear(64, 64), weight=weight), torch.randn(32, 16, 64)
    compiled = fewbit.compile(model, 2, backend="aot_eager")
    gradient(model, compiled, x)
    shapes = {row.shape for row in compiled.partitioner.report.rows if row.bits}
    assert shapes == {(512, 64), (32, 16, 64)}


@pytest.mark.inductor
@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_of_relu_are_restored_exactly(dtype, backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).to(dtype)
    with torch.no_grad():
        model[0].bias[::2] = -100
    compiled = fewbit.compile(model, 2, backend=backend)
    compiled(torch.randn(512, 64, dtype=dtype)).square().mean().backward()
    gradient = model[2].weight.grad
    assert (gradient[:, ::2] == 0).all()
    assert (gradient[:, 1::2] != 0).all()
    assert {row.bits for row in compiled.partitioner.report.rows if row.bits} == {1, 2}


def test_a_product_with_probabilities_is_no_probability():
    graph, aten = fx.Graph(), torch.ops.aten
    scores, values = graph.placeholder("scores"), graph.placeholder("values")
    weights = graph.call_function(aten.exp.default, (scores,))
    weights = graph.call_function(aten.div.Tensor, (weights, values))
    product = graph.call_function(aten.bmm.default, (weights, values))
    assert is_probability(weights)
    assert not is_probability(graph.call_function(aten.view.default, (product, [4])))


@pytest.mark.inductor
def test_a_checkpointed_region_is_computed_again():
    def forward(model, x):
        return checkpoint(model.inner, model.embed(x), use_reentrant=False)

    inner, x = made("gated")
    model = Composed(forward, inner=inner, embed=nn.Linear(64, 64))
    compiled = fewbit.compile(model, 2, backend="aot_eager")
    assert relative(gradient(model, compiled, x), gradient(model, model, x)) < 0.5
    # The region's input alone: what the region itself computes is not saved.
    assert compiled.partitioner.report.saved_bytes <= 2.1 * x.nbytes


@pytest.mark.inductor
def test_torchs_partition_stays_if_it_saves_fewer_bytes(monkeypatch):
    """torch computes a long chain of functions of a single tensor again, from one tensor with 32 bits per element."""

    def sines(model, x):
        y = x * model.scale
        return sum((number * y).sin() * y.cos() for number in range(2, 22)).square().mean()

    calls = []
    partition = partitioner._partition
    monkeypatch.setattr(partitioner, "_partition", lambda *a: calls.append(a) or partition(*a))
    model, x = Composed(sines, scale=nn.Parameter(torch.ones(32, 64))), torch.randn(8, 32, 64)
    plain = fewbit.compile(model, 2, overrides=EXACT, backend="aot_eager")
    least = fewbit.saved_bytes(plain, x).total
    torch._dynamo.reset()
    compiled = fewbit.compile(model, 2, backend="aot_eager")
    calls.clear()
    assert fewbit.saved_bytes(compiled, x).total <= least
    assert len(calls) == 2
    torch._dynamo.reset()
    calls.clear()
    model, x = made("attention")
    gradient(model, fewbit.compile(model, 2, backend="aot_eager"), x)
    assert len(calls) == 1  # a second partition takes time, and would be in vain


@pytest.mark.inductor
def test_a_memory_budget_of_torch_does_not_replace_the_copies():
    model, x = made("attention")
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        compiled = fewbit.compile(model, 2, backend="aot_eager")
        gradient(model, compiled, x)
    assert any(row.bits == 2 for row in compiled.partitioner.report.rows)


class Weighty(nn.Module):
    """Layers whose weights are much larger than what the layers save, used as they are, transposed and in slices."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.conv = nn.Linear(256, 512), nn.Linear(512, 256), nn.Conv2d(16, 64, 3)

    def forward(self, x):
        y = self.b(torch.sigmoid(self.a(x))) @ self.b.weight[:, :256]
        y = self.conv(y.reshape(2, 16, 16, 16)).float()
        return y.square().mean()


@pytest.mark.inductor
@BACKENDS
def test_parameters_that_autocast_casts_are_not_saved(backend):
    torch.manual_seed(0)
    model, x = Weighty(), torch.randn(32, 256)
    settings = {"backend": backend, "fullgraph": True}
    with torch.autocast("cpu", torch.bfloat16):
        compiled = fewbit.compile(model, 8, **settings)
        exact = gradient(model, model, x)
        assert 0 < relative(gradient(model, compiled, x), exact) < 0.03
    of_weights = {weight.nbytes // 2 for weight in (model.a.weight, model.conv.weight)}
    rows = compiled.partitioner.report.rows
    assert rows and not of_weights & {row.exact_bytes for row in rows}
    assert sum(row.saved_bytes for row in rows) < 200_000 < model.a.weight.nbytes // 2
