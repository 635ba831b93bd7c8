"""`fewbit.compile`: gradients, saved bytes, seeds, the report, and what it refuses."""

import pytest
import torch
from compiled_models import MODELS, made
from torch import fx, nn
from torch._subclasses import FakeTensorMode

import fewbit
from fewbit.compiler import compiling
from fewbit.compiler.graphs import insert
from fewbit.compiler.joint_graph import JointGraph
from fewbit.compiler.joint_graph import _is_probability as is_probability
from fewbit.compiler.rewrite import Rewriter
from fewbit.compiler.seeds import draw_seeds_op, mixed
from fewbit.runtime.ops.quantizer_ops import quantize_op

EXACT = {"": None}
"""Overrides that leave all tensors exact."""


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def reset():
    torch._dynamo.reset()


def gradient(model, compiled, x, seed=3):
    """Return the gradient of all parameters after one step, as a float64 vector."""
    model.zero_grad()
    torch.manual_seed(seed)
    compiled(x).backward()
    gradients = [
        parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None
    ]
    return torch.cat(gradients).double()


def exact_gradient(model, x, **settings):
    compiled = fewbit.compile(model, overrides=EXACT, **settings)
    found = gradient(model, compiled, x)
    torch._dynamo.reset()
    return found


def error(found, exact):
    return float((found - exact).norm() / exact.norm())


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


def test_a_product_with_probabilities_is_no_probability():
    graph, aten = fx.Graph(), torch.ops.aten
    scores, values = graph.placeholder("scores"), graph.placeholder("values")
    weights = graph.call_function(aten.exp.default, (scores,))
    weights = graph.call_function(aten.div.Tensor, (weights, values))
    product = graph.call_function(aten.bmm.default, (weights, values))
    assert is_probability(weights)
    assert not is_probability(graph.call_function(aten.view.default, (product, [4])))


def test_no_gradient_no_copies():
    model, x = made("gated")
    compiled = fewbit.compile(model, 2, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))


def test_dropout_draws_what_it_would_draw():
    model, x = made("attention written out")
    losses = []
    for overrides in (EXACT, None):
        torch._dynamo.reset()
        compiled = fewbit.compile(model, 2, overrides=overrides, backend="aot_eager")
        torch.manual_seed(5)
        losses.append([float(compiled(x).detach()) for _ in range(3)])
    assert losses[0] == losses[1]


def test_each_step_rounds_anew_and_a_seed_reproduces_the_steps():
    def drawn(seed):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        seeds = [draw_seeds_op(3, device=torch.device("cpu")) for _ in range(2)]
        assert torch.equal(before, torch.get_rng_state())
        return torch.cat(seeds)

    first, other, again = drawn(11), drawn(12), drawn(11)
    assert len({*first.tolist(), *other.tolist()}) == 12
    assert torch.equal(first, again)


def test_seeds_are_those_of_splitmix64():
    """The first numbers of SplitMix64 from the seed 0, by its authors' program."""
    step = -7046029254386353131
    numbers = torch.arange(1, 4) * step
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [number % 2**64 for number in mixed(numbers).tolist()] == expected


def test_each_device_draws_its_seeds():
    """The devices exist only as those of fake tensors."""
    devices = [torch.device("cpu"), torch.device("cuda", 1)]
    with FakeTensorMode() as mode:
        inputs, results = [], []
        graph = fx.Graph()
        for i, device in enumerate(devices):
            inputs.append(graph.placeholder(f"primals_{i + 1}"))
            inputs[-1].meta["val"] = torch.empty(64, 64, device=device)
        tangents = [graph.placeholder(f"tangents_{i + 1}") for i in range(2)]
        for x, tangent in zip(inputs, tangents, strict=True):
            tangent.meta["val"] = x.meta["val"]
        sines = [insert(graph, mode, torch.ops.aten.sin.default, (x,)) for x in inputs]
        for sine, tangent in zip(sines, tangents, strict=True):
            results.append(insert(graph, mode, torch.ops.aten.mul.Tensor, (tangent, sine)))
        graph.output((*sines, *results))
    settings = compiling._resolved(2, None)
    copies = Rewriter(JointGraph(graph, 2, frozenset()), lambda root: settings).run()
    assert {copy.root.node for copy in copies.values()} == set(sines)
    quantizations = [node for node in graph.nodes if node.target is quantize_op]
    assert len(quantizations) == 2
    for node in quantizations:
        x, _, seed = node.args[:3]
        (drawn,) = seed.all_input_nodes
        assert drawn.target is draw_seeds_op
        assert drawn.kwargs["device"] == seed.meta["val"].device == x.meta["val"].device
    graph.lint()


@pytest.mark.fast(2)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ["attention", "attention written out", "convolutions", "gated"])
def test_sizes_that_vary(name, dynamic):
    """The gradients of every size are right, and torch compiles as often as without copies."""
    model, x = made(name)
    batches = [x[:size] for size in (len(x), len(x) * 3 // 4, len(x) // 2)]
    gradients, graphs = {}, {}
    for bits in (None, 8):
        torch._dynamo.reset()
        torch._dynamo.pgo.reset_code_state()  # the sizes that torch has seen change
        torch._dynamo.utils.counters.clear()
        overrides = EXACT if bits is None else None
        compiled = fewbit.compile(
            model, bits, overrides=overrides, backend="aot_eager", dynamic=dynamic
        )
        gradients[bits] = [gradient(model, compiled, batch) for batch in batches]
        graphs[bits] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs[8] == graphs[None] <= 2
    for found, exact in zip(gradients[8], gradients[None], strict=True):
        assert 0 < error(found, exact) < 0.02


@pytest.mark.slow
def test_sizes_that_vary_under_inductor():
    model, x = made("gated")
    compiled = fewbit.compile(model, 8, fullgraph=True)
    for size in (32, 24, 16):
        exact = gradient(model, model, x[:size])
        assert 0 < error(gradient(model, compiled, x[:size]), exact) < 0.02


def test_copies_of_sizes_that_vary_have_the_bytes_of_other_copies():
    model, x = made("attention")
    compiled = fewbit.compile(model, 2, backend="aot_eager", dynamic=True)
    of_all = [fewbit.saved_bytes(compiled, batch).total for batch in (x, x[:5])]
    rows = compiled.partitioner.report.rows
    assert sum(row.exact_bytes for row in rows) / sum(row.saved_bytes for row in rows) > 8
    for batch, found in zip((x, x[:5]), of_all, strict=True):
        torch._dynamo.reset()
        static = fewbit.compile(model, 2, backend="aot_eager", dynamic=False)
        assert found == pytest.approx(fewbit.saved_bytes(static, batch).total, rel=0.05)


def test_a_size_that_depends_on_values_stays_exact():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            x = self.a(x)
            return self.b(x.tanh())[x[:, 0] > 0].tanh().square().mean()

    torch.manual_seed(0)
    model, x = Chosen(), torch.randn(512, 64)
    exact = gradient(model, model, x)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = fewbit.compile(model, 8, backend="aot_eager", fullgraph=True)
        assert 0 < error(gradient(model, compiled, x), exact) < 0.02
    reasons = {row.reason for row in compiled.partitioner.report.rows}
    assert "its size depends on values of tensors" in reasons


def test_overrides():
    model, x = made("gated")
    bits = {}
    for overrides in ({"down": 8}, {"down": None}, {"gate": 3, "up": 5}):
        torch._dynamo.reset()
        compiled = fewbit.compile(model, 2, overrides=overrides, backend="aot_eager")
        gradient(model, compiled, x)
        rows = compiled.partitioner.report.rows
        bits[tuple(overrides)] = {(row.module, row.bits) for row in rows}
    assert {number for module, number in bits["down",] if module == "down"} == {None}
    # The norm's result is the input of both, and the one with more bits decides.
    numbers = {number for _, number in bits["gate", "up"]}
    assert 5 in numbers
    assert 3 not in numbers


def test_an_override_gives_more_bits():
    model, x = made("gated")
    compiled = fewbit.compile(model, 2, overrides={"down": 8}, backend="aot_eager")
    gradient(model, compiled, x)
    assert {row.bits for row in compiled.partitioner.report.rows if row.module == "down"} == {8}


def test_the_report():
    model, x = made("convolutions")
    compiled = fewbit.compile(model, 2, backend="aot_eager")
    assert "no graph compiled" in str(compiled.partitioner.report)
    gradient(model, compiled, x)
    report = compiled.partitioner.report
    rows = {(row.module, row.op): row for row in report.rows}
    assert rows["", "threshold_backward"].bits == 1
    assert rows["", "max_pool2d_with_indices"].bits == 2
    assert "saved for backward, in place of" in str(report)
    assert len(report.records()) == len(report.rows)


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


def test_an_untested_torch_saves_exact_tensors(monkeypatch):
    model, x = made("gated")
    monkeypatch.setattr(compiling, "TESTED", ("1.0",))
    with pytest.warns(UserWarning, match=r"tested with torch 1\.0 and this is torch"):
        compiled = fewbit.compile(model, 2, backend="aot_eager")
    assert not hasattr(compiled, "partitioner")
    torch.testing.assert_close(gradient(model, compiled, x), gradient(model, model, x))


def test_partition_fn():
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    model, x = made("gated")
    exact = gradient(model, model, x)
    partition = fewbit.partition_fn(bits=8)
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    assert 0 < error(gradient(model, torch.compile(model, backend=backend), x), exact) < 0.02
    assert partition.report.rows


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"bits": 9}, "1 to 8"),
        ({"bits": fewbit.AdaptiveBits(2)}, "a whole number from 1 to 8 or FixedBits"),
        ({"backend": "eager"}, 'expected "inductor" or "aot_eager"'),
        ({"overrides": {"nothing": 2}}, "a glob that matches a module"),
        ({"layers": {"bits": 2}}, "bits"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(fewbit.InputError, match=message):
        fewbit.compile(made("gated")[0], **arguments)


def test_a_function_is_refused():
    with pytest.raises(fewbit.InputError, match=r"expected a torch\.nn\.Module, got function"):
        fewbit.compile(lambda x: x)


# --- models that were wrong once, against torch in eager mode ----------------------------------------------------


class RunningMean(nn.Module):
    """A model that changes a buffer after it has used it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32)
        self.register_buffer("mean", torch.full((64,), 2.0))

    def forward(self, x):
        h = self.a(x)
        y = self.b(h - self.mean) + self.c(h)
        with torch.no_grad():
            self.mean.lerp_(h.mean((0, 1)), 0.5)
        return y.square().mean()


class Probabilities(nn.Module):
    """Sigmoid and binary cross-entropy, whose derivatives have large factors that cancel each other."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 64)

    def forward(self, x):
        p = torch.sigmoid(8 * self.a(x))
        return nn.functional.binary_cross_entropy(p, (x > 0).float())


class Rows(nn.Module):
    """A norm of 4,096 rows, some of which are much larger than the others. A row is a group of elements."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(64, 256), nn.RMSNorm(256), nn.Linear(256, 16)

    def forward(self, x):
        scale = torch.ones(x.shape[1], 1)
        scale[0] = 1000
        return self.b(self.norm(self.a(x.repeat(4, 4, 1)) * scale.repeat(4, 1))).square().mean()


class Channels(nn.Module):
    """A batch norm of small images, whose channels have very different sizes."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(8, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.b = nn.Conv2d(64, 8, 3)
        with torch.no_grad():
            self.a.weight *= torch.logspace(-1, 1, 64).view(-1, 1, 1, 1)

    def forward(self, x):
        images = x.flatten()[: 16 * 8 * 16].view(16, 8, 4, 4)
        return self.b(torch.relu(self.norm(self.a(images)))).square().mean()


class Truncated(nn.Module):
    """A cast to integers and back, whose result another layer uses."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x):
        h = 3 * self.a(x)
        return (self.b(h.to(torch.int32).float()) + self.c(h)).square().mean()


class MaskedMean(nn.Module):
    """A mean whose divisor is a tensor of integers, in bfloat16."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 64, dtype=torch.bfloat16)

    def forward(self, x):
        mask = (x[..., 0] > -1).long()
        y = self.a(x.bfloat16()) * mask[..., None]
        return (y.sum(1) / mask.sum(1, keepdim=True)).float().square().mean()


# --- products of a gradient with several tensors -------------------------------------------------------------------


class Chain(nn.Module):
    """A linear layer and an elementwise function of its result, whose backward pass has several factors."""

    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, dtype=dtype), nn.Linear(64, 64, dtype=dtype)
        self.function = function

    def forward(self, x):
        x = self.a(x.to(self.a.weight.dtype))
        return self.function(x, self.b(x)).float().square().mean()


def gelu_written_out(x, y):
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.045 * x**3)))


def differences(x, y):
    return torch.tanh(x) * y - x.sin() * y / 3 - (-y) * x.cos()


def with_itself(x, y):
    return x - x * torch.tanh(x) * 0.5 + 2 * x


def broadcast(x, y):
    scale = torch.linspace(0.1, 30, x.shape[-2])[:, None]
    return (x.sin() * scale).tanh() * y.mean(-1, keepdim=True)


def several_users(x, y):
    inner = x * y
    return inner.tanh() + inner.sin() * x.cos() + inner.cumsum(-1) / 64


def casts(x, y):
    return (x.float().sin() * y.float()).to(x.dtype) * torch.tanh(x) + 0.5 * x.float().cos()


class Difference(torch.autograd.Function):
    """sin(x) + cos(x), whose backward pass subtracts products of the gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin() + x.cos()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos() - gradient * x.sin()


def custom(x, y):
    return Difference.apply(x) * y


CHAINS = custom, gelu_written_out, differences, with_itself, broadcast, several_users, casts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", CHAINS)
def test_gradients_of_chains(function, dtype):
    """The gradients of the same model in float64 are the reference."""
    torch.manual_seed(0)
    model, x = Chain(function, dtype), torch.randn(8, 16, 64)
    reference = Chain(function, torch.float64)
    reference.load_state_dict(model.state_dict())
    exact = gradient(reference, reference, x)
    plain = error(gradient(model, model, x), exact)
    compiled = fewbit.compile(model, 8, backend="aot_eager", fullgraph=True)
    assert error(gradient(model, compiled, x), exact) < 0.01 + 1.5 * plain


def test_a_derivative_that_is_written_out_is_one_tensor():
    torch.manual_seed(0)
    model, x = Chain(gelu_written_out), torch.randn(8, 16, 64)
    rows = {}
    for name, autocast in {"float32": False, "bfloat16": True}.items():
        torch._dynamo.reset()
        compiled = fewbit.compile(model, 2, backend="aot_eager")
        with torch.autocast("cpu", torch.bfloat16, autocast):
            gradient(model, compiled, x)
        rows[name] = sorted(row.bits for row in compiled.partitioner.report.rows if row.bits)
    # The gradient of the square is a multiple of the loss's gradient too. Autocast makes another tensor of the input.
    assert rows == {"float32": [3], "bfloat16": [2, 3]}


def test_torchs_partition_stays_if_it_saves_fewer_bytes():
    """torch computes a long chain of functions of a single tensor again, from one tensor with 32 bits per element."""

    class Sines(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(32, 64))

        def forward(self, x):
            y = x * self.scale
            return sum((number * y).sin() * y.cos() for number in range(2, 22)).square().mean()

    model, x = Sines(), torch.randn(8, 32, 64)
    plain = fewbit.compile(model, 2, overrides=EXACT, backend="aot_eager")
    least = fewbit.saved_bytes(plain, x).total
    torch._dynamo.reset()
    compiled = fewbit.compile(model, 2, backend="aot_eager")
    assert fewbit.saved_bytes(compiled, x).total <= least
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cls", [RunningMean, Probabilities, Rows, Channels, Truncated, MaskedMean])
def test_gradients_against_eager_torch(cls, backend):
    torch.manual_seed(0)
    model, x = cls(), torch.randn(8, 64, 64)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    exact = gradient(model, model, x)
    model.load_state_dict(state)
    found = gradient(model, fewbit.compile(model, 8, backend=backend), x)
    assert error(found, exact) < 0.02


class ShortRows(nn.Module):
    """A root-mean-square norm whose rows have fewer elements than a group, every second row 100 times larger."""

    def __init__(self, form):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(96, 96), nn.RMSNorm(96, eps=1e-6), nn.Linear(96, 16)
        self.form = form

    def forward(self, x):
        scale = torch.ones(x.shape[1], 1)
        scale[::2] = 100
        x = self.a(x) * scale
        mean = x.square().mean(-1, keepdim=True) + 1e-6
        if self.form == "module":
            x = self.norm(x)
        else:
            x = x * torch.rsqrt(mean)
        return torch.tanh(self.b(x)).square().mean()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["module", "written out"])
def test_small_rows_of_a_norm_have_small_errors(form, backend):
    torch.manual_seed(0)
    model, x = ShortRows(form), torch.randn(32, 16, 96, requires_grad=True)
    (exact,) = torch.autograd.grad(model(x), x)
    compiled = fewbit.compile(model, 8, backend=backend)
    (found,) = torch.autograd.grad(compiled(x), x)
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        assert 0 < error(found[:, rows], exact[:, rows]) < 0.02
    norms = [row for row in compiled.partitioner.report.rows if row.shape == (32, 16, 96)]
    assert [row.bits for row in norms].count(
        8
    ) <= 2  # the normalized input and the input of the first layer


def test_a_memory_budget_of_torch_does_not_replace_the_copies():
    model, x = made("attention")
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        compiled = fewbit.compile(model, 2, backend="aot_eager")
        gradient(model, compiled, x)
    assert any(row.bits == 2 for row in compiled.partitioner.report.rows)


def test_an_override_that_may_not_hold_warns():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            torch._dynamo.graph_break()
            return torch.tanh(self.layer(x)).square()

    model = nn.Sequential(nn.Linear(64, 64), Inner())
    compiled = fewbit.compile(model, 2, overrides={"1.layer": 8}, backend="aot_eager")
    with pytest.warns(UserWarning, match="overrides: torch.compile calls a module"):
        compiled(torch.randn(8, 64, 64)).sum().backward()
