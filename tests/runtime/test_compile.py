"""torch.compile and torch.export: results are those of eager mode, and only packed codes are saved."""

import copy
import io

import pytest
import torch
from compilers import inductor_passes
from layers import relative, saved_by
from samples import GELU, gradient, laid_out, load_table, normal, same
from torch import nn

import fewbit
import fewbit.functional as F
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.ops import library, quantizer_ops
from fewbit.runtime.quantizers.quantizer import Quantizer

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*", "ignore:.*isinstance.*treespec"
)
needs_tracing = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="older compilers cannot trace a user's table or callable",
)
DRAWN = load_table("gelu", 2, objective="unbiased")
TANH = load_table("tanh", 3)


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def step(function, x, weight):
    x = x.detach().requires_grad_()
    y = function(x)
    return y, torch.autograd.grad(y, x, weight)[0]


def check(function, x):
    weight = torch.empty_like(x).copy_(normal(x.shape, x.dtype, x.device, seed=6))
    ours, theirs = step(compiled(function), x, weight), step(function, x, weight)
    torch.testing.assert_close(ours[0], theirs[0])
    assert (ours[1] == theirs[1]).all()
    assert ours[0].stride() == theirs[0].stride()


CASES = {  # {name: (function, layout of its input, dtype)}
    "channels last": (lambda x: F.gelu(x * 1.0), "channels last", torch.float32),
    "stepped": (lambda x: F.gelu(x * 1.0), "stepped", torch.float32),
    "transposed": (lambda x: F.gelu(x * 1.0), "transposed", torch.float32),
    "scalar": (lambda x: F.gelu(x * 1.0), "scalar", torch.float32),
    "bfloat16": (F.gelu, "vector", torch.bfloat16),
    "scalar, bfloat16": (F.gelu, "scalar", torch.bfloat16),
    "float64": (F.gelu, "vector", torch.float64),
    "in place": (lambda x: F.relu(x * 2.0, inplace=True) + 1.0, "matrix", torch.float32),
    "modules": (
        nn.Sequential(fewbit.ELU(1.7, bits=2), fewbit.GELU("tanh"), fewbit.LeakyReLU(0.2)),
        *("vector", torch.float32),
    ),
}


@pytest.mark.inductor
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_eager_mode(device, case):
    function, layout, dtype = CASES[case]
    check(function, laid_out(layout, dtype, device))


@pytest.mark.inductor
def test_dynamic_shapes(device):
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(F.gelu, backend=count, fullgraph=True, dynamic=True)
    for shape in ((4, 9), (7, 33), (16, 2)):
        x = normal(shape, device=device)
        weight = normal(shape, device=device, seed=6)
        assert same(step(function, x, weight)[1], gradient(load_table("gelu", 3), x, weight))
    assert count.frame_count == 1


class Cached(nn.Module):
    """A model that concatenates its input with an empty tensor before layers that save it, as attention does with keys."""

    def __init__(self, kind):
        super().__init__()
        linear, quantizer = fewbit.nn.Linear(6, 6, bits=8), Quantizer(8)
        kinds = {
            "linear": lambda: linear,
            "activation": lambda: fewbit.GELU(bits=3),
            "norm": lambda: fewbit.nn.LayerNorm(6, bits=8),
            "sign": lambda: fewbit.nn.PReLU(),
            "gate": lambda: lambda x: F.swiglu(x, x * 0.5, quantizer=quantizer),
            "attention": lambda: (
                lambda x: F.scaled_dot_product_attention(x * 2, x, x * 0.5, quantizer=quantizer)
            ),
        }
        self.before, self.layer = linear, kinds[kind]()

    def forward(self, x):
        x = self.before(x).view(*x.shape[:2], 2, 3).transpose(1, 2)
        x = torch.cat([x.new_empty(0), x], -2)
        return self.layer(torch.cat([x, x * 1], -1))


@pytest.mark.inductor
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", ["linear", "activation", "norm", "sign", "gate", "attention"])
def test_what_a_compiler_removes_changes_no_order(kind, dynamic, monkeypatch):
    """Inductor removes the cat, so that the layer's input has other strides than in the trace."""

    def seed(x):
        return torch.full((1,), 7, dtype=torch.int64, device=x.device)

    monkeypatch.setattr(library, "new_seed", seed)  # both modes keep the same copies
    torch.manual_seed(0)
    model = Cached(kind)
    x, weight = normal((4, 5, 6)), normal((4, 2, 5, 6), seed=6)
    grads = []
    for run in (model, compiled(model, inductor_passes, dynamic=dynamic)):
        y = run(x)
        grads.append(torch.autograd.grad(y, list(model.parameters()), weight))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(8, 8), (5, 8)),
        (lambda: nn.Linear(8, 8), (2, 256, 8)),  # with numbers of channels
        (lambda: nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last), (3, 4, 12, 12)),
    ],
)
def test_copies_of_compiled_layers_are_made_without_python(layer, shape, device, monkeypatch):
    torch.manual_seed(0)
    exact = layer().to(device)
    model = copy.deepcopy(exact)
    fewbit.compress_(model, 8, verbose=False)
    x, run = normal(shape, device=device).requires_grad_(), compiled(model)
    run(x).sum().backward()

    def refuse(*_, **__):
        raise AssertionError("a copy was made or dequantized in Python")

    for name in ("quantize", "dequantize", "channel_statistics"):
        monkeypatch.setattr(quantizer_ops, name, refuse)
    weight = torch.empty_like(exact(x)).copy_(normal(exact(x).shape, device=device, seed=6))
    ours, theirs = (
        torch.autograd.grad(f(x), m.weight, weight)[0] for f, m in ((run, model), (exact, exact))
    )
    assert 0 < relative(ours, theirs) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_code_that_inductor_makes_compiles(dtype):
    """Each of the two dtypes has vector code of its own."""
    layers = [
        fewbit.nn.PReLU(),
        fewbit.nn.ReLU(),
        fewbit.GELU(),
        fewbit.nn.Dropout(),
        fewbit.nn.MaxPool1d(2),
        fewbit.nn.AvgPool1d(2),
        fewbit.nn.Linear(16, 4),
        fewbit.nn.Conv1d(5, 5, 3),
        fewbit.nn.Softmax(-1),
        fewbit.nn.BatchNorm1d(5),
        fewbit.nn.LayerNorm(16),
        fewbit.nn.RMSNorm(16),
        fewbit.nn.GroupNorm(5, 5),
    ]
    for layer in layers:
        layer.to(dtype)
    x = normal((8, 5, 16), dtype).requires_grad_()
    torch.compile(lambda: sum((layer(x * 2) * 1.5).sum() for layer in layers))().backward()
    assert x.grad.isfinite().all()


@pytest.mark.inductor
@pytest.mark.parametrize("kind", [fewbit.nn.BatchNorm1d, fewbit.nn.InstanceNorm1d])
def test_running_statistics_with_symbolic_sizes(kind):
    torch.manual_seed(0)
    x = normal((6, 5, 7))
    running = []
    for run in (lambda of: of, lambda of: compiled(of, dynamic=True)):
        layer = kind(5, affine=True, track_running_stats=True)
        run(layer)(x).sum().backward()
        running.append((layer.running_mean, layer.running_var))
    torch.testing.assert_close(*running)


@needs_tracing
def test_draws(device):
    """A draw returns one of the two levels next to the mean, and draws again in every call."""
    x = normal((2000,), device=device)
    torch.manual_seed(5)
    function = compiled(lambda x: F.gelu(x, table=DRAWN))
    ones = torch.ones_like(x)
    first, second = step(function, x, ones)[1], step(function, x, ones)[1]
    assert not same(first, second)
    torch.manual_seed(5)
    assert same(step(function, x, ones)[1], first)
    levels = torch.tensor(DRAWN.levels).float()
    assert torch.isin(first.cpu(), levels).all()
    mean = torch.from_numpy(DRAWN(x.cpu().double().numpy()))
    assert abs((first.cpu().double() - mean).mean()) < 0.05


@pytest.mark.inductor
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "inductor"])
def test_a_compiled_forward_keeps_codes_and_nothing_else(device, backend):
    x = normal((40, 32), device=device).requires_grad_()
    weight = normal((32, 32), device=device)  # its gradient is not asked for

    def function(x):
        return F.gelu((x @ weight) + 1.0, bits=3)

    y, saved = saved_by(compiled(function, backend), x)
    own = [tensor for tensor in saved if tensor.data_ptr() != weight.data_ptr()]
    assert sum(tensor.nbytes for tensor in own) == 4 * packed_words(40 * 32, 3)
    assert all(tensor.dtype == torch.int32 for tensor in own)
    (ours,) = torch.autograd.grad(y.sum(), x)
    (theirs,) = torch.autograd.grad(function(x).sum(), x)
    torch.testing.assert_close(ours, theirs)


CHANGES = {  # {attribute: (function, module, values)}
    "bits": (F.gelu, fewbit.GELU, (1, 3, 4)),
    "negative_slope": (F.leaky_relu, fewbit.LeakyReLU, (0.25, 0.5, 0.125, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_arguments_that_change_between_calls(device, name):
    function, kind, values = CHANGES[name]
    x, weight = normal((50,), device=device), normal((50,), device=device, seed=6)
    module = kind()
    of_function = compiled(lambda x, value: function(x, **{name: value}))
    of_module = compiled(module)
    for value in values:
        setattr(module, name, value)
        y, grad = step(lambda x, value=value: function(x, **{name: value}), x, weight)
        for ours in (lambda x, value=value: of_function(x, value), of_module):
            found = step(ours, x, weight)
            torch.testing.assert_close(found[0], y)
            assert same(found[1], grad)


@pytest.mark.inductor
@needs_tracing
def test_callables_that_enclose_other_numbers(device):
    """At the second value of an enclosed number the compiler makes it a variable."""

    def scaled_tanh(scale):
        return lambda x: torch.tanh(scale * x)

    x, weight = normal((50,), device=device), normal((50,), device=device, seed=6)
    module = fewbit.Pointwise(torch.tanh, bits=1)
    of_module = compiled(module)
    for scale in (1.0, 2.0, 4.0, 8.0):
        module.function = scaled_tanh(scale)
        ours, expected = step(of_module, x, weight)[1], step(module, x, weight)[1]
        assert same(ours, expected)


@needs_tracing
def test_a_callable(device):
    check(lambda x: F.pointwise(x, torch.tanh, table=TANH), normal((50,), device=device))


@needs_tracing
def test_a_callable_without_a_gradient_and_one_that_needs_one():
    class Learnable(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return torch.tanh(self.scale * x)

    module, x = Learnable(), normal((50,))
    function = compiled(lambda x: F.pointwise(x, module, table=TANH))
    assert same(function(x), module(x))
    with pytest.raises(Exception, match="whose parameters need no gradient"):
        function(x.requires_grad_())


@pytest.mark.inductor
@pytest.mark.parametrize("layer", [nn.LayerNorm, nn.RMSNorm])
def test_norms_of_sizes_that_the_compiler_does_not_know(layer):
    model = layer(16)
    fewbit.compress_(model, bits=8, verbose=False)

    def function(x, which):
        return model(x[which])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        ours = compiled(function)
        for rows in (5, 8, 1, 0):
            x, which = normal((10, 16)).requires_grad_(), torch.arange(10) < rows
            y = ours(x, which)
            torch.testing.assert_close(y, function(x, which))
            (gradient,) = torch.autograd.grad(y.square().sum(), x)
            (expected,) = torch.autograd.grad(layer(16)(x[which]).square().sum(), x)
            torch.testing.assert_close(gradient, expected, rtol=0.0, atol=0.05)


def test_without_a_gradient_no_codes_are_made(device):
    seen = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    function = torch.compile(F.gelu, backend=backend, fullgraph=True)
    x = normal((40,), device=device)
    assert same(function(x), torch.nn.functional.gelu(x))
    assert not any("fewbit" in target for target in seen)


@pytest.mark.filterwarnings(
    "ignore:The given buffer is not writable"
)  # in torch.export.load of torch 2.11
def test_export(device):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), fewbit.GELU(bits=2), fewbit.ReLU(True), nn.Linear(8, 2)
    ).to(device)
    model.eval()
    x = normal((3, 6), device=device)
    batch = torch.export.Dim("batch")
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    again = torch.export.load(buffer).module()
    for rows in (3, 5):
        x = normal((rows, 6), device=device, seed=rows)
        torch.testing.assert_close(again(x), model(x).detach())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_trace_records_torchs_own_function():
    model = nn.Sequential(nn.Linear(4, 4), fewbit.GELU(), fewbit.Pointwise(torch.tanh, table=TANH))
    traced = torch.jit.trace(model, normal((3, 4)))
    torch.jit.save(traced, io.BytesIO())
    x = normal((5, 4), seed=6)
    torch.testing.assert_close(traced(x), model(x))


def test_compiled_errors_are_the_eager_ones():
    x = normal((4,)).requires_grad_()
    with pytest.raises(Exception, match="whole number from 1 to 8"):
        compiled(lambda x: F.gelu(x, bits=9))(x)


def test_compiled_checkpoint(device):
    from torch.utils.checkpoint import checkpoint

    def function(x):
        return checkpoint(lambda x: F.gelu(x * 2.0), x, use_reentrant=False)

    x = normal((40,), device=device)
    weight = normal((40,), device=device, seed=6)
    ours = step(compiled(function), x, weight)[1]
    assert same(ours, step(function, x, weight)[1])
    assert same(ours, gradient(GELU.table(), x * 2.0, weight) * 2.0)


class Feedforward(nn.Module):
    """The block whose large tensors a memory budget changes. Only the activation uses the activation's input."""

    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = fewbit.GELU(bits=3)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


@pytest.mark.inductor
@pytest.mark.parametrize("budget", [1.0, 0.5, 0.2])
def test_codes_are_kept_under_a_memory_budget(device, budget):
    """The partitioner recomputes other tensors but never the codes. Without the codes more is saved."""
    from torch._functorch import config

    torch.manual_seed(0)
    model = nn.Sequential(Feedforward(), Feedforward()).to(device)
    x = normal((32, 64), device=device)
    with config.patch(activation_memory_budget=budget):
        _, saved = saved_by(compiled(model, "aot_eager_decomp_partition"), x)
    codes = [tensor for tensor in saved if tensor.dtype == torch.int32]
    assert [tensor.numel() for tensor in codes] == [packed_words(32 * 256, 3)] * 2
    wide = [tensor for tensor in saved if tensor.shape == (32, 256)]
    # Beside the codes, each block keeps at most one large tensor (for the next layer's weight), fewer below 1.
    assert len(wide) <= {1.0: 2, 0.5: 1, 0.2: 0}[budget]
