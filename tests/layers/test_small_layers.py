"""Embedding, interpolation, PReLU, Softmax, LogSoftmax and Bilinear against torch's own."""

from dataclasses import dataclass, field
from functools import partial
from math import ceil, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DTYPES, LAYOUTS, name_of, normal, same
from torch import nn
from torch.nn import functional as torch_f

import fewbit.nn
from fewbit.errors import GradientError, InputError
from fewbit.functional import (
    bilinear,
    embedding,
    interpolate,
    log_softmax,
    matmul,
    mul,
    prelu,
    softmax,
)
from fewbit.runtime.quantizers.quantizer import Quantizer

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*", "ignore:.*isinstance.*treespec"
)
NAMES = (
    "Bilinear PReLU LogSoftmax Softmax Embedding Upsample UpsamplingBilinear2d UpsamplingNearest2d"
)
OURS = {name: getattr(fewbit.nn, name) for name in NAMES.split()}


def quantized_bytes(shape, bits, group=256):
    """docs/quantizer.md, written out: codes, and 4 bytes a group."""
    samples, features = shape[0], prod(shape[1:])
    groups = samples * ceil(features / group) if features >= 64 else ceil(prod(shape) / group)
    return 4 * bits * ceil(prod(shape) / 32) + 4 * groups


def step(module, inputs, autocast=False):
    """(result, gradients of the inputs and parameters that ask for one)."""
    inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=autocast):
        y = module(*inputs)
    leaves = [x for x in (*inputs, *module.parameters()) if x.requires_grad]
    weight = normal(y.shape, y.dtype, y.device, seed=6)
    return y, torch.autograd.grad(y, leaves, weight)


def kept_by(function, *inputs):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        y = function(*inputs)
    return y, saved


def bytes_of(tensors, but=()):
    """Bytes of different tensors, parameters apart."""
    pointers = {tensor.data_ptr() for tensor in but}
    return sum(t.numel() * t.itemsize for t in tensors if t.data_ptr() not in pointers)


def relative(ours, theirs):
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


@pytest.fixture
def one_thread():
    """For thousands of tiny calls: waiting threads take minutes on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- quantized layers ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A module, its inputs, which gradients are torch's to the bit, and the bytes that it keeps."""

    name: str
    arguments: tuple
    shapes: tuple
    bytes: object = field(repr=False)  # bits -> bytes
    exact: tuple[bool, ...]  # inputs, then parameters

    @property
    def id(self):
        return f"{self.name} {self.arguments} {self.shapes[0]}"

    def ours(self, bits=8, device="cpu", dtype=torch.float32, **options):
        torch.manual_seed(0)
        return OURS[self.name](*self.arguments, bits=bits, **options).to(device, dtype)

    def theirs(self, device="cpu", dtype=torch.float32):
        torch.manual_seed(0)
        return getattr(nn, self.name)(*self.arguments).to(device, dtype)

    def inputs(self, device="cpu", dtype=torch.float32, scale=1.0):
        return [
            normal(shape, dtype, device, scale=scale, seed=seed).requires_grad_()
            for seed, shape in enumerate(self.shapes)
        ]


def _prelu_bytes(shape):
    return lambda bits: 4 * ceil(prod(shape) / 32) + quantized_bytes(shape, bits)


def _prelu(arguments, shape):
    return Sample("PReLU", arguments, (shape,), _prelu_bytes(shape), (True, False))


def _softmax(name, dim, shape):
    return Sample(name, (dim,), (shape,), lambda bits: quantized_bytes(shape, bits), (False,))


def _bilinear(arguments, lead):
    shapes = tuple((*lead, size) for size in arguments[:2])
    exact = (False, False, False, True)[: 4 - ("no bias" in arguments)]
    arguments = tuple(False if each == "no bias" else each for each in arguments)

    def kept(bits):
        return sum(quantized_bytes(shape, bits) for shape in shapes)

    return Sample("Bilinear", arguments, shapes, kept, exact)


SAMPLES = [
    _prelu((), (4, 5, 6)),
    _prelu((5,), (4, 5, 6)),
    _prelu((5,), (4, 5, 9, 8)),
    _prelu((70,), (6, 70)),
    _prelu((), (40,)),
    _softmax("Softmax", -1, (6, 70)),
    _softmax("Softmax", 1, (3, 4, 5)),
    _softmax("LogSoftmax", -1, (6, 70)),
    _softmax("LogSoftmax", 0, (3, 4, 5)),
    _bilinear((5, 6, 7), (30,)),
    _bilinear((66, 6, 3, "no bias"), (4, 5)),
]
EACH = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
KINDS = {sample.name: sample for sample in SAMPLES}
EACH_KIND = pytest.mark.parametrize("sample", KINDS.values(), ids=lambda sample: sample.name)


@EACH
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_equals_torch(device, sample, dtype):
    inputs = sample.inputs(device, dtype)
    ours, grads = step(sample.ours(8, device, dtype), inputs)
    theirs, their_grads = step(sample.theirs(device, dtype), inputs)
    assert same(ours, theirs) and ours.stride() == theirs.stride()
    for grad, their_grad, exact in zip(grads, their_grads, sample.exact, strict=True):
        assert grad.dtype == their_grad.dtype
        assert same(grad, their_grad) if exact else relative(grad, their_grad) < 0.02


@EACH
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_bytes(device, sample, bits):
    module = sample.ours(bits, device)
    saved = kept_by(module, *sample.inputs(device))[1]
    assert bytes_of(saved, module.parameters()) == sample.bytes(bits)
    assert f"bits={bits}" in repr(module) and isinstance(module, getattr(nn, sample.name))


@EACH_KIND
def test_nothing_is_kept_without_a_gradient(device, sample):
    module, inputs = sample.ours(2, device), sample.inputs(device)
    with torch.no_grad():
        assert not kept_by(module, *inputs)[1]
    module.requires_grad_(False)
    y, saved = kept_by(module, *(x.detach() for x in inputs))
    assert not saved and same(y, sample.theirs(device)(*inputs))


@EACH_KIND
def test_eval_is_torch(device, sample):
    inputs = sample.inputs(device)
    ours, grads = step(sample.ours(2, device).eval(), inputs)
    theirs, their_grads = step(sample.theirs(device).eval(), inputs)
    assert same(ours, theirs) and all(map(same, grads, their_grads))


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_autocast(device, sample, dtype):
    inputs = sample.inputs(device, dtype)
    try:
        theirs, their_grads = step(sample.theirs(device), inputs, autocast=True)
    except RuntimeError:  # the CPU's autocast leaves two dtypes to bilinear
        with pytest.raises(RuntimeError):
            step(sample.ours(8, device), inputs, autocast=True)
        return
    ours, grads = step(sample.ours(8, device), inputs, autocast=True)
    assert same(ours, theirs)
    for grad, their_grad in zip(grads, their_grads, strict=True):
        assert grad.dtype == their_grad.dtype and relative(grad, their_grad) < 0.02


@pytest.mark.fast(1)
@EACH_KIND
def test_compiled(device, sample):
    torch.compiler.reset()
    module, inputs = sample.ours(8, device), sample.inputs(device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager_decomp_partition")
    ours, grads = step(compiled, inputs)
    theirs, their_grads = step(sample.theirs(device), inputs)
    torch.testing.assert_close(ours, theirs)
    for grad, their_grad in zip(grads, their_grads, strict=True):
        assert relative(grad, their_grad) < 0.02
    saved = kept_by(compiled, *inputs)[1]
    assert bytes_of(saved, module.parameters()) <= sample.bytes(8)


@EACH_KIND
def test_a_second_derivative_is_refused(device, sample):
    inputs = sample.inputs(device)
    y = sample.ours(8, device)(*inputs)
    (grad,) = torch.autograd.grad(y.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(GradientError, match="no second derivative"):
        grad.sum().backward()


@EACH_KIND
def test_transforms_see_torch(device, sample):
    ours, theirs = sample.ours(2, device), sample.theirs(device)
    first, *rest = sample.inputs(device)

    def grad(module):
        return torch.func.grad(lambda x: module(x, *rest).square().sum())(first)

    assert same(grad(ours), grad(theirs))


@EACH_KIND
def test_empty_batches(device, sample):
    shapes = [(0, *shape[1:]) for shape in sample.shapes]
    inputs = [torch.zeros(shape, device=device, requires_grad=True) for shape in shapes]
    try:
        theirs, their_grads = step(sample.theirs(device), inputs)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            step(sample.ours(2, device), inputs)
        return
    ours, grads = step(sample.ours(2, device), inputs)
    assert same(ours, theirs)
    assert all(map(torch.equal, grads, their_grads))


@pytest.mark.parametrize("wrong", [{"bits": 0}, {"bits": 9}, {"group_size": 33}])
def test_bad_arguments(wrong):
    x = normal((3, 4))
    calls = [
        lambda: prelu(x, x[0, :1], **wrong),
        lambda: softmax(x, 1, **wrong),
        lambda: log_softmax(x, 1, **wrong),
        lambda: bilinear(x, x, normal((2, 4, 4)), **wrong),
        *(
            lambda sample=sample: OURS[sample.name](*sample.arguments, **wrong)
            for sample in SAMPLES
        ),
    ]
    for call in calls:
        with pytest.raises(InputError):
            call()


def mean_gradient(call, leaves, seeds):
    """Mean and standard error, in float64, of the gradients over that many draws."""
    total = [torch.zeros_like(leaf, dtype=torch.float64) for leaf in leaves]
    squares = [torch.zeros_like(each) for each in total]
    first = None
    for seed in range(seeds):
        torch.manual_seed(seed)
        grads = [grad.double() for grad in call()]
        first = first or grads  # taken off: what never varies has error 0 then, exactly
        for k, grad in enumerate(grads):
            total[k] += grad - first[k]
            squares[k] += (grad - first[k]) ** 2
    means = [each / seeds for each in total]
    errors = [
        ((square / seeds - mean**2).clamp(min=0) / seeds).sqrt()
        for square, mean in zip(squares, means, strict=True)
    ]
    means = [mean + start for mean, start in zip(means, first, strict=True)]
    return means, errors


def is_unbiased(mean, error, expected) -> bool:
    """Whether the mean of squared z, over elements that vary, is 1 to four standard errors.

    Elements of one gradient share what was rounded: no more than 60 of them are taken for
    independent.
    """
    varying = error > 1e-7
    z = (mean - expected.double())[varying] / error[varying]
    return abs(float(z.square().mean()) - 1) < 4 * (2 / min(z.numel(), 60)) ** 0.5


@pytest.mark.fast(1)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("offset", [0.0, 10.0, 1000.0])
@pytest.mark.parametrize("name", ["PReLU", "LogSoftmax", "Bilinear"])
def test_exact_in_expectation(name, offset):
    sample = {"PReLU": SAMPLES[3]}.get(name, KINDS[name])
    # Numbers that float32 holds, as the quantizer starts from that.
    inputs = [
        (x.detach() - offset).double().requires_grad_() for x in sample.inputs(dtype=torch.float32)
    ]
    ours = sample.ours(2, dtype=torch.float64)
    _, expected = step(sample.theirs(dtype=torch.float64), inputs)
    leaves = [*inputs, *ours.parameters()]
    means, errors = mean_gradient(lambda: step(ours, inputs)[1], leaves, 250)
    for mean, error, exact, is_exact in zip(means, errors, expected, sample.exact, strict=True):
        if not is_exact:
            assert is_unbiased(mean, error, exact)


@pytest.mark.usefixtures("one_thread")
def test_one_input_twice_is_exact_in_expectation():
    """The two copies of one input are rounded independently, within a forward as well."""
    from fewbit.runtime.saved.calls import CallGuard
    from fewbit.runtime.saved.context import ForwardContext

    torch.manual_seed(0)
    theirs = nn.Bilinear(6, 6, 3).double()
    x = normal((20, 6), torch.float64, scale=1.0)
    weight = normal((20, 3), torch.float64, seed=6)
    (expected,) = torch.autograd.grad(theirs(x, x), theirs.weight, weight)
    context = ForwardContext()
    quantizer = Quantizer(2, context=context)

    def call():
        arguments = x, x, theirs.weight, theirs.bias
        y = CallGuard(context).call(theirs, bilinear, arguments, {"quantizer": quantizer})
        return torch.autograd.grad(y, theirs.weight, weight)

    (mean,), (error,) = mean_gradient(call, [theirs.weight], 300)
    assert is_unbiased(mean, error, expected)


@pytest.mark.fast(1)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("offset", [0.0, 10.0, 1000.0])
@pytest.mark.parametrize(
    "ours, theirs, shapes",
    [
        (matmul, torch.matmul, [(3, 4, 30), (30, 5)]),
        (matmul, torch.matmul, [(2, 3, 70), (2, 70, 4)]),
        (mul, torch.mul, [(4, 5, 16), (5, 16)]),
        (mul, torch.mul, [(6, 70), (6, 70)]),
    ],
)
def test_products_are_exact_in_expectation(ours, theirs, shapes, offset):
    factors = [
        (normal(shape, scale=1.0, seed=seed) - offset).double().requires_grad_()
        for seed, shape in enumerate(shapes)
    ]
    y = theirs(*factors)
    g = normal(y.shape, torch.float64, seed=6)
    expected = torch.autograd.grad(y, factors, g)

    def call():
        y = ours(*(1.0 * x for x in factors), bits=2)  # a leaf would be kept as it is
        return torch.autograd.grad(y, factors, g)

    means, errors = mean_gradient(call, factors, 250)
    for mean, error, exact in zip(means, errors, expected, strict=True):
        assert (error > 0).double().mean() > 0.9 and is_unbiased(mean, error, exact)


# -- PReLU -----------------------------------------------------------------------------------------


def test_prelu_keeps_what_is_asked_for(device):
    shape = (4, 5, 9, 8)
    x = normal(shape, device=device)
    slopes = torch.full((5,), 0.3, device=device)
    sign, rest = 4 * ceil(x.numel() / 32), quantized_bytes(shape, 3)
    for needs_x, needs_weight in ((True, True), (True, False), (False, True)):
        inputs = x.clone().requires_grad_(needs_x), slopes.clone().requires_grad_(needs_weight)
        saved = kept_by(lambda x, slopes: prelu(x, slopes, bits=3), *inputs)[1]
        assert bytes_of(saved, inputs) == sign * needs_x + rest * needs_weight


def test_prelu_at_zero_and_beyond_numbers(device):
    x = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1.0, -1.0], device=device)
    x = x.requires_grad_()
    slope = torch.tensor([0.25], device=device)
    grad = normal(x.shape, device=device, seed=6)
    ours = torch.autograd.grad(prelu(x, slope), x, grad)[0]
    assert same(ours, torch.autograd.grad(torch_f.prelu(x, slope), x, grad)[0])


@pytest.mark.parametrize("shape", [(2, 5, 4, 3), (2, 5, 2, 4, 3)])
def test_prelu_channels_last(device, shape):
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
    x = normal(shape, device=device).to(memory_format=last).requires_grad_()
    torch.manual_seed(0)
    ours = OURS["PReLU"](5, bits=8).to(device)
    theirs = nn.PReLU(5).to(device)
    (y, grads), (their_y, their_grads) = step(ours, [x]), step(theirs, [x])
    assert same(y, their_y) and y.stride() == their_y.stride()
    assert same(grads[0], their_grads[0]) and relative(grads[1], their_grads[1]) < 0.02


# -- Softmax ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2])
def test_the_bias_of_softmax(bits):
    """E[grad^_j] - grad_j = -g_j Var[e_j], measured over rows that are all the same."""
    draws, width = 20000, 64
    torch.manual_seed(0)
    x = normal((1, width), torch.float64, scale=1.0).expand(draws, width).requires_grad_()
    g = normal((1, width), torch.float64, scale=1.0, seed=6).expand(draws, width)
    y = torch_f.softmax(x, -1)
    (exact,) = torch.autograd.grad(y, x, g)
    kept = Quantizer(bits).quantize(y.detach())
    variance = kept.spec.dequantize(kept.tensors, torch.float64).var(0)
    (found,) = torch.autograd.grad(softmax(x, -1, bits=bits), x, g)
    bias, measured = -g[0] * variance, found.mean(0) - exact[0]
    error = found.std(0) / draws**0.5
    assert not is_unbiased(found.mean(0), error, exact[0])
    assert is_unbiased(found.mean(0), error, exact[0] + bias)
    # Along the formula's direction: 1 where it holds, 0 where there is no bias.
    assert abs(float((measured * bias).sum() / bias.square().sum()) - 1) < 0.1


@pytest.mark.parametrize(
    "deviation, bits, size",
    [(1.0, 1, 0.063), (1.0, 2, 0.012), (1.0, 3, 0.003), (3.0, 2, 0.037)],
)
def test_the_size_of_the_bias_of_softmax(deviation, bits, size):
    """As a fraction of the gradient, of normal rows of 64: 0.5 to 5 % at 2 bits."""
    torch.manual_seed(0)
    rows, draws = 100, 300
    x = normal((rows, 64), scale=deviation).requires_grad_()
    g = normal((rows, 64), scale=1.0, seed=6)
    (exact,) = torch.autograd.grad(torch_f.softmax(x, -1), x, g)
    many = x.detach().repeat(draws, 1).requires_grad_()  # each row with groups of its own
    (found,) = torch.autograd.grad(softmax(many, -1, bits=bits), many, g.repeat(draws, 1))
    measured = found.view(draws, rows, 64).double().mean(0) - exact
    kept = Quantizer(bits).quantize(torch_f.softmax(many.detach(), -1))
    variance = kept.spec.dequantize(kept.tensors).view(draws, rows, 64).double().var(0)
    bias = -g * variance  # the sampling error that is not along the formula's direction is left out
    along = (measured * bias).sum() / bias.norm() / exact.norm()
    assert 0.6 * size < along < 1.4 * size
    assert bits != 2 or 0.005 < along < 0.05


def test_softmax_dtype_and_dim(device):
    x = normal((3, 70), torch.bfloat16, device, scale=1.0).requires_grad_()
    grad = normal((3, 70), device=device, seed=6)
    for ours, theirs in ((softmax, torch_f.softmax), (log_softmax, torch_f.log_softmax)):
        y = ours(x, 1, dtype=torch.float32, bits=8)
        their_y = theirs(x, 1, dtype=torch.float32)
        assert same(y, their_y)
        found, expected = (torch.autograd.grad(each, x, grad)[0] for each in (y, their_y))
        assert found.dtype == torch.bfloat16 and relative(found, expected) < 0.02
        for shape in ((), (5,), (3, 4), (2, 3, 4)):
            z = normal(shape, device=device).requires_grad_()
            with pytest.warns(UserWarning, match="Implicit dimension choice"):
                chosen = ours(z)
            with pytest.warns(UserWarning):
                assert same(chosen, theirs(z))
            chosen.sum().backward()
    with pytest.raises(IndexError):
        softmax(x, 5)


# -- Embedding -------------------------------------------------------------------------------------

EMBEDDINGS = [
    # rows, arguments, bytes an index
    (10, {}, 1),
    (256, {"padding_idx": 3}, 1),
    (257, {"padding_idx": -1}, 2),
    (1 << 15, {"scale_grad_by_freq": True}, 2),
    ((1 << 15) + 1, {}, 4),
    (300, {"sparse": True, "padding_idx": 0}, 2),
    (50, {"max_norm": 1.0}, 1),
    (50, {"max_norm": 1.0, "norm_type": 1.0, "scale_grad_by_freq": True}, 1),
]


def embeddings(rows, options, device="cpu", dtype=torch.float32, width=4):
    made = []
    for kind in (OURS["Embedding"], nn.Embedding):
        torch.manual_seed(0)
        made.append(kind(rows, width, **options).to(device, dtype))
    return made


def embedding_step(module, indices):
    y = module(indices)
    y.backward(normal(y.shape, y.dtype, y.device, seed=6))
    grad, module.weight.grad = module.weight.grad, None
    return y, grad


def compare_embeddings(ours, theirs, indices):
    """Equal to the bit, or refused by both."""
    try:
        their_y, their_grad = embedding_step(theirs, indices)
    except IndexError:  # sparse, with padding, and one index without a dimension
        with pytest.raises(IndexError):
            embedding_step(ours, indices)
        return
    y, grad = embedding_step(ours, indices)
    assert same(y, their_y) and y.stride() == their_y.stride()
    assert same(ours.weight, theirs.weight) and grad.layout == their_grad.layout
    assert same(grad.to_dense(), their_grad.to_dense())


@pytest.mark.parametrize("rows, options, size", EMBEDDINGS)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=name_of)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (0, 4)])
def test_embedding(device, rows, options, size, kind, shape):
    ours, theirs = embeddings(rows, options, device)
    torch.manual_seed(1)
    indices = torch.randint(rows, shape, dtype=kind, device=device)
    if shape == (7,):
        indices[1:4] = indices[0]
        indices[4] = rows - 1
    compare_embeddings(ours, theirs, indices)
    saved = kept_by(ours, indices)[1]
    assert bytes_of(saved) == size * indices.numel()
    ours.weight.requires_grad_(False)
    assert not kept_by(ours, indices)[1] and isinstance(ours, nn.Embedding)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_embedding_dtypes(device, dtype):
    ours, theirs = embeddings(20, {}, device, dtype)
    indices = torch.arange(30, device=device).remainder(20).view(5, 6).t()
    compare_embeddings(ours, theirs, indices)
    with torch.autocast(device, torch.bfloat16):
        compare_embeddings(ours, theirs, indices)
    assert same(embedding_step(ours.eval(), indices)[1], embedding_step(theirs, indices)[1])


def test_embedding_refuses_what_torch_does(device):
    weight = normal((5, 3), device=device).requires_grad_()
    with pytest.raises((IndexError, RuntimeError)):
        embedding(torch.tensor([5]), weight.cpu())
    with pytest.raises(AssertionError):
        embedding(torch.tensor([1], device=device), weight, padding_idx=7)
    with pytest.raises(RuntimeError):
        embedding(torch.tensor([1.0], device=device), weight)


def test_embedding_compiled(device):
    torch.compiler.reset()
    ours, theirs = embeddings(300, {"padding_idx": 2}, device)
    indices = torch.arange(400, device=device).remainder(300)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager_decomp_partition")
    (y, grad), (their_y, their_grad) = (
        embedding_step(compiled, indices),
        embedding_step(theirs, indices),
    )
    assert same(y, their_y)
    torch.testing.assert_close(ours.weight.grad if grad is None else grad, their_grad)
    assert bytes_of(kept_by(compiled, indices)[1]) == 2 * 400


def test_embedding_has_no_second_derivative(device):
    ours, _ = embeddings(20, {}, device)
    y = ours(torch.arange(9, device=device))
    (grad,) = torch.autograd.grad(y.square().sum(), ours.weight, create_graph=True)
    with pytest.raises(GradientError, match="no second derivative"):
        grad.sum().backward()


@settings(max_examples=40)
@given(
    st.integers(1, 400),
    st.lists(st.integers(0, 5), max_size=3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0, -1]),
    st.sampled_from([None, 0.5]),
    st.integers(0, 5),
)
def test_any_embedding(rows, shape, freq, sparse, padding_idx, max_norm, seed):
    if sparse:
        freq = False
    options = dict(
        scale_grad_by_freq=freq, sparse=sparse, padding_idx=padding_idx, max_norm=max_norm
    )
    ours, theirs = embeddings(rows, options)
    torch.manual_seed(seed)
    compare_embeddings(ours, theirs, torch.randint(rows, shape))


# -- interpolation ---------------------------------------------------------------------------------

MODES = [
    (mode, shape, options)
    for shape, modes in (
        ((2, 3, 9), ("nearest", "nearest-exact", "linear", "area")),
        ((2, 3, 9, 8), ("nearest", "nearest-exact", "bilinear", "bicubic", "area")),
        ((2, 3, 5, 4, 6), ("nearest", "nearest-exact", "trilinear", "area")),
    )
    for mode in modes
    for options in ({"scale_factor": 0.5}, {"scale_factor": 1.7}, {"size": 3}, {"size": 1})
]


@pytest.mark.parametrize("mode, shape, options", MODES)
def test_interpolate(device, mode, shape, options):
    x = normal(shape, device=device).requires_grad_()
    y, saved = kept_by(lambda: interpolate(x, mode=mode, **options))
    theirs = torch_f.interpolate(x, mode=mode, **options)
    assert not saved and same(y, theirs)
    grad = normal(y.shape, device=device, seed=6)
    ours_grad, their_grad = (torch.autograd.grad(each, x, grad)[0] for each in (y, theirs))
    assert same(ours_grad, their_grad)
    module, their_module = OURS["Upsample"](mode=mode, **options), nn.Upsample(mode=mode, **options)
    y, saved = kept_by(module, x)
    assert not saved and same(y, theirs) and repr(module) == repr(their_module)
    assert same(module.eval()(x), theirs)


def test_interpolate_options(device):
    x = normal((2, 3, 9, 8), device=device).requires_grad_()
    for options in (
        {"mode": "bilinear", "scale_factor": 0.5, "antialias": True},
        {"mode": "bicubic", "size": (4, 5), "antialias": True},
        {"mode": "bilinear", "scale_factor": (2.0, 1.5), "align_corners": True},
        {"mode": "area", "scale_factor": (0.6, 1.5)},
        {"mode": "area", "size": [2, 11]},
        {"mode": "nearest", "scale_factor": 1.6, "recompute_scale_factor": True},
        {"mode": "area", "scale_factor": 0.4, "recompute_scale_factor": True},
    ):
        y, saved = kept_by(lambda: interpolate(x, **options))  # noqa: B023
        theirs = torch_f.interpolate(x, **options)
        assert not saved and same(y, theirs)
        grad = normal(y.shape, device=device, seed=6)
        ours_grad, their_grad = (torch.autograd.grad(each, x, grad)[0] for each in (y, theirs))
        assert same(ours_grad, their_grad)
    for options in (
        {"mode": "area"},
        {"mode": "area", "size": 3, "scale_factor": 2.0},
        {"mode": "area", "size": 3, "align_corners": True},
        {"mode": "area", "size": (3, 3, 3)},
        {"mode": "area", "scale_factor": (3.0,)},
        {"mode": "area", "size": 3, "recompute_scale_factor": True},
        {"mode": "area", "size": 3, "antialias": True},
        {"mode": "linear", "size": 3},
    ):
        with pytest.raises((ValueError, NotImplementedError)) as theirs:
            torch_f.interpolate(x, **options)
        with pytest.raises(type(theirs.value)):
            interpolate(x, **options)


def test_upsampling_2d(device):
    x = normal((2, 3, 4, 5), device=device).requires_grad_()
    for name in ("UpsamplingNearest2d", "UpsamplingBilinear2d"):
        ours, theirs = OURS[name](scale_factor=2), getattr(nn, name)(scale_factor=2)
        (y, grads), (their_y, their_grads) = step(ours, [x]), step(theirs, [x])
        assert same(y, their_y) and same(grads[0], their_grads[0])
        assert isinstance(ours, getattr(nn, name)) and not kept_by(ours, x)[1]


def test_interpolate_compiled(device):
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: interpolate(x * 1.0, scale_factor=0.5, mode="area") * 1.0,
        fullgraph=True,
        backend="aot_eager_decomp_partition",
    )
    x = normal((2, 3, 8, 6), device=device).requires_grad_()
    y, saved = kept_by(compiled, x)
    assert not saved
    grad = normal(y.shape, device=device, seed=6)
    theirs = torch_f.interpolate(x, scale_factor=0.5, mode="area")
    torch.testing.assert_close(
        torch.autograd.grad(y, x, grad)[0], torch.autograd.grad(theirs, x, grad)[0]
    )


# -- all configurations of the quantized ones ------------------------------------------------------


def step_of(x, bits):
    """At least that of each group of x: minimum and range in bfloat16 add less than 0.3 to a range.

    Rounding adds 2^-7 of the range, and of a minimum. A tensor whose range is below 2^-5 of its least
    element keeps float32 minimums; else those of its groups are below 33 ranges.
    """
    x = x.double()
    return 1.3 * float(x.max() - x.min()) / (2**bits - 1)


def moved_by(terms, dims):
    """How far independent errors within a step, of mean 0, move sum(terms * errors), in steps.

    The sum of all, or six deviations: the deviation of an error within a step is half of one at most.
    """
    return torch.minimum(terms.abs().sum(dims), 3 * terms.square().sum(dims).sqrt())


def limits_of_prelu(bits, g, x, slope):
    negative = g * (x < 0)
    dims = [dim for dim in range(x.dim()) if dim != 1 or slope.numel() == 1]
    by_step = step_of(x.clamp(max=0), bits) * moved_by(negative, dims)
    size = (negative * x).abs().sum(dims)
    return [(0 * x, g.abs()), (by_step.view_as(slope), size.view_as(slope))]


def limits_of_softmax(dim, bits, g, x):
    y = x.softmax(dim)
    step = step_of(y, bits)
    total = step * moved_by(g, dim).unsqueeze(dim)
    by_step = step * (g - (g * y).sum(dim, keepdim=True)).abs() + (y + step) * total
    return [(by_step, (y + step) * (g.abs() + (g * y).abs().sum(dim, keepdim=True)))]


def limits_of_log_softmax(dim, bits, g, x):
    y = x.softmax(dim)
    step = step_of(y, bits)
    by_step = step * g.sum(dim, keepdim=True).abs()
    return [(by_step, g.abs() + (y + step) * g.abs().sum(dim, keepdim=True))]


def limits_of_bilinear(bits, g, x1, x2, weight, *bias):
    step1, step2 = step_of(x1, bits), step_of(x2, bits)
    shapes = x1.shape, x2.shape
    g, x1, x2 = (each.flatten(0, -2) for each in (g, x1, x2))
    of_both = torch.einsum("nk,kij->nij", g, weight)
    of_1, of_2 = (torch.einsum("nk,nm->nkm", g, x) for x in (x1, x2))
    of_weight = (
        step2 * moved_by(of_1, 0)[:, :, None]
        + step1 * moved_by(of_2, 0)[:, None, :]
        + step1 * step2 * moved_by(g, 0)[:, None, None]
    )
    g, w, x1, x2 = (each.abs() for each in (g, weight, x1, x2))
    size1 = torch.einsum("nk,kij,nj->ni", g, w, x2 + step2).view(shapes[0])
    size2 = torch.einsum("nk,kij,ni->nj", g, w, x1 + step1).view(shapes[1])
    size_weight = torch.einsum("nk,ni,nj->kij", g, x1 + step1, x2 + step2)
    return [
        ((step2 * moved_by(of_both, 2)).view(shapes[0]), size1),
        ((step1 * moved_by(of_both, 1)).view(shapes[1]), size2),
        (of_weight, size_weight),
        *((0 * each, g.sum(0)) for each in bias),
    ]


ROUNDINGS = 4  # to the dtype, on the way to an element of a gradient
LIMITS = {
    "PReLU": lambda dim: limits_of_prelu,
    "Softmax": lambda dim: partial(limits_of_softmax, dim),
    "LogSoftmax": lambda dim: partial(limits_of_log_softmax, dim),
    "Bilinear": lambda dim: limits_of_bilinear,
}


@settings(max_examples=120)
@given(
    st.sampled_from(["PReLU", "Softmax", "LogSoftmax", "Bilinear"]),
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.sampled_from(DTYPES),
    st.integers(1, 8),
    st.sampled_from([32, 256]),
    st.integers(0, 9),
)
def test_any_configuration(name, shape, dtype, bits, group_size, seed):
    """Values to the bit; gradients exact where they are, else as close as the step makes them.

    Against float64: what errors of a step make of the layer's own formula, and rounding to the dtype.
    """
    torch.manual_seed(seed)
    dim = seed % len(shape)
    arguments = {
        "PReLU": ((), (shape[1],))[seed % 2],
        "Softmax": (dim,),
        "LogSoftmax": (dim - len(shape),),
        "Bilinear": (shape[-1], shape[0], 3, seed % 2 == 0),
    }[name]
    shapes = [shape] if name != "Bilinear" else [shape, [*shape[:-1], shape[0]]]
    ours = OURS[name](*arguments, bits=bits, group_size=group_size).to(dtype)
    theirs = getattr(nn, name)(*arguments).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    inputs = [
        normal(each, dtype, scale=1.0, seed=seed + i).requires_grad_()
        for i, each in enumerate(shapes)
    ]
    (y, grads), (their_y, their_grads) = step(ours, inputs), step(theirs, inputs)
    assert same(y, their_y)
    if name == "PReLU":
        assert same(grads[0], their_grads[0])
    g = normal(y.shape, dtype, seed=6).double()
    theirs, inputs = theirs.double(), [x.detach().double().requires_grad_() for x in inputs]
    leaves = [*inputs, *theirs.parameters()]
    exact = torch.autograd.grad(theirs(*inputs), leaves, g)
    limits = LIMITS[name](dim)(bits, g, *(x.detach() for x in leaves))
    eps = max(torch.finfo(dtype).eps, 2**-22)
    for grad, wanted, (by_step, size) in zip(grads, exact, limits, strict=True):
        assert grad.shape == wanted.shape and grad.dtype == dtype
        limit = by_step + ROUNDINGS * eps * (size + wanted.abs()) + torch.finfo(dtype).tiny
        assert ((grad.double() - wanted).abs() <= limit).all()


@pytest.mark.parametrize(
    "layout", ["transposed", "permuted", "channels last", "stepped", "columns", "expanded"]
)
def test_layouts(device, layout):
    x = LAYOUTS[layout](lambda shape: normal(shape, device=device, scale=1.0))
    for ours, theirs in (
        (OURS["PReLU"](bits=8), nn.PReLU()),
        (OURS["Softmax"](-1, bits=8), nn.Softmax(-1)),
        (OURS["LogSoftmax"](0, bits=8), nn.LogSoftmax(0)),
    ):
        first, (grad, *_) = step(ours.to(device), [x.requires_grad_()])
        second, (their_grad, *_) = step(theirs.to(device), [x])
        assert same(first, second) and first.stride() == second.stride()
        assert relative(grad, their_grad) < 0.02
