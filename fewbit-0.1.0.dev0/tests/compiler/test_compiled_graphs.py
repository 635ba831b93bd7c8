"""`fewbit.compile`: gradients and saved bytes."""

import pytest
import torch
from compiled_gradients import EXACT, MARKS, error, exact_gradient, gradient
from compiled_models import MODELS, made
from torch import fx, nn

import fewbit
from fewbit.compiler import partitioner
from fewbit.compiler.joint_graph import _is_probability as is_probability

pytestmark = MARKS


def copies_of_layers(compiled, x):
    """Return the bytes of packed codes and ranges that a compiled model saves, by saved_tensors_hooks."""
    found = []

    def pack(tensor):
        if tensor.dtype in (torch.int32, torch.bfloat16):
            found.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(x)
    return sum(found)


@pytest.mark.inductor
@pytest.mark.parametrize("name", MODELS)
def test_gradients_with_8_bits(name):
    model, x = made(name)
    settings = {"backend": "aot_eager", "fullgraph": True}
    exact = exact_gradient(model, x, **settings)
    compiled = fewbit.compile(model, 8, **settings)
    assert 0 < error(gradient(model, compiled, x), exact) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_gradients_under_inductor(name):
    model, x = made(name)
    exact = exact_gradient(model, x, fullgraph=True)
    compiled = fewbit.compile(model, 8, fullgraph=True)
    assert 0 < error(gradient(model, compiled, x), exact) < 0.02


@pytest.mark.inductor
@pytest.mark.parametrize("name", MODELS)
def test_the_report_counts_what_is_saved(name):
    model, x = made(name)
    compiled = fewbit.compile(model, 2, backend="aot_eager")
    saved = fewbit.saved_bytes(compiled, x)
    counted = compiled.partitioner.report.saved_bytes
    exact = sum(row.exact_bytes for row in compiled.partitioner.report.rows)
    inputs = x.numel() * x.element_size()
    assert counted <= saved.total <= counted + inputs
    assert exact / counted > 8


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["attention", "gated", "functions", "scan"])
def test_the_mean_of_gradients_is_exact(name):
    """The product of two independent means has the expected value of the squared bias."""
    model, x = made(name)
    exact = exact_gradient(model, x, backend="aot_eager")
    compiled = fewbit.compile(model, 2, backend="aot_eager")
    draws = 20
    sums, squares = [0, 0], 0
    for draw in range(2 * draws):
        difference = gradient(model, compiled, x) - exact
        sums[draw % 2] += difference / draws
        squares += float(difference @ difference) / (2 * draws)
    assert abs(float(sums[0] @ sums[1])) < 0.05 * squares


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["attention", "convolutions", "functions"])
def test_converted_layers_keep_their_copies(name):
    """The copies of layers are not quantized again, and what functions save is quantized too."""
    model, x = made(name)
    exact = exact_gradient(model, x, backend="aot_eager")
    compiled = fewbit.compile(model, 8, backend="aot_eager")
    gradient(model, compiled, x)
    alone = compiled.partitioner.report.saved_bytes
    torch._dynamo.reset()
    fewbit.compress_(model, bits=8, layers={"activation_bits": 8}, verbose=False)
    plain = torch.compile(model, backend="aot_eager")
    of_layers = copies_of_layers(plain, x)
    compiled = fewbit.compile(model, 8, backend="aot_eager")
    assert error(gradient(model, compiled, x), exact) < 0.02
    rows = compiled.partitioner.report.rows
    found = [row for row in rows if row.op == "fewbit"]
    assert all(row.bits is None and "fewbit" in row.reason for row in found)
    # A layer also saves a number of 4 bytes by which its result is multiplied.
    assert 0 < of_layers <= sum(row.saved_bytes for row in found) <= of_layers + 64
    assert fewbit.saved_bytes(compiled, x).total < 0.6 * fewbit.saved_bytes(plain, x).total
    assert compiled.partitioner.report.saved_bytes < 1.4 * alone


@pytest.mark.inductor
def test_parts_of_a_weight_stay_exact():
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(192, 64) / 8)
            self.embed = nn.Linear(64, 64)

        def forward(self, x):
            x, y = self.embed(x), 0
            for part in self.weight.split(64):
                y = y + torch.tanh(x @ part)
            return y.square().mean()

    torch.manual_seed(0)
    model, x = Fused(), torch.randn(32, 16, 64)
    compiled = fewbit.compile(model, 2, backend="aot_eager")
    gradient(model, compiled, x)
    assert {row.shape for row in compiled.partitioner.report.rows if row.bits} == {
        (512, 64),
        (32, 16, 64),
    }


@pytest.mark.inductor
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
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
def test_no_gradient_no_copies():
    model, x = made("gated")
    compiled = fewbit.compile(model, 2, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))


@pytest.mark.inductor
def test_a_checkpointed_region_is_computed_again():
    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, _ = made("gated")
            self.embed = nn.Linear(64, 64)

        def forward(self, x):
            from torch.utils.checkpoint import checkpoint

            return checkpoint(self.inner, self.embed(x), use_reentrant=False)

    model, x = Region(), made("gated")[1]
    exact = exact_gradient(model, x, backend="aot_eager")
    compiled = fewbit.compile(model, 2, backend="aot_eager")
    assert error(gradient(model, compiled, x), exact) < 0.5
    # The region's input alone: what the region itself computes is not saved.
    assert compiled.partitioner.report.saved_bytes <= 2.1 * x.numel() * x.element_size()


@pytest.mark.inductor
def test_torchs_partition_stays_if_it_saves_fewer_bytes(monkeypatch):
    """torch computes a long chain of functions of a single tensor again, from one tensor with 32 bits per element."""

    class Sines(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(32, 64))

        def forward(self, x):
            y = x * self.scale
            return sum((number * y).sin() * y.cos() for number in range(2, 22)).square().mean()

    calls = []
    partition = partitioner._partition
    monkeypatch.setattr(partitioner, "_partition", lambda *a: calls.append(a) or partition(*a))
    model, x = Sines(), torch.randn(8, 32, 64)
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
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_parameters_that_autocast_casts_are_not_saved(backend):
    torch.manual_seed(0)
    model, x = Weighty(), torch.randn(32, 256)
    settings = {"backend": backend, "fullgraph": True}
    with torch.autocast("cpu", torch.bfloat16):
        exact = exact_gradient(model, x, **settings)
        compiled = fewbit.compile(model, 8, **settings)
        assert 0 < error(gradient(model, compiled, x), exact) < 0.03
    of_weights = {weight.nbytes // 2 for weight in (model.a.weight, model.conv.weight)}
    rows = compiled.partitioner.report.rows
    assert rows and not of_weights & {row.exact_bytes for row in rows}
    assert sum(row.saved_bytes for row in rows) < 200_000 < model.a.weight.nbytes // 2
