"""Embedding, interpolation, PReLU, Softmax, LogSoftmax, Bilinear and products: properties of these layers alone."""

from functools import partial
from math import ceil

import pytest
import torch
from expectation import drawn, pooled_z
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import Called, bytes_by, gradients, relative, saved_by
from samples import DTYPES, LAYOUTS, name_of, normal, same, same_sums
from torch import nn
from torch.nn import functional as torch_f

import fewbit.functional as F
import fewbit.nn
from fewbit.functional.products import matmul, mul
from fewbit.functional.softmax import log_softmax, softmax
from fewbit.runtime.format.groups import quantized_bytes
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.saved.calls import CallGuard
from fewbit.runtime.saved.context import ForwardContext

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*", "ignore:.*isinstance.*treespec"
)


@pytest.fixture
def one_thread():
    """Run thousands of tiny calls with one thread, because waiting threads take minutes on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- several copies --------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
def test_one_input_twice_is_exact_in_expectation():
    """The two copies of one input are rounded independently, also within a forward."""
    torch.manual_seed(0)
    theirs = nn.Bilinear(6, 6, 3).double()
    x = normal((20, 6), torch.float64, scale=1.0)
    weight = normal((20, 3), torch.float64, seed=6)
    (expected,) = torch.autograd.grad(theirs(x, x), theirs.weight, weight)
    context = ForwardContext()
    quantizer = Quantizer(2, context=context)

    def call():
        arguments = x, x, theirs.weight, theirs.bias
        y = CallGuard(context).call(theirs, F.bilinear, arguments, {"quantizer": quantizer})
        return torch.autograd.grad(y, theirs.weight, weight)

    torch.manual_seed(0)
    (samples,) = drawn(call, 300)
    assert abs(pooled_z(samples, expected, 1e-7, 60)) < 4


@pytest.mark.fast(1)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("offset", [0.0, 10.0, 1000.0])
@pytest.mark.parametrize(
    "ours, theirs, shapes",
    [
        (matmul, torch.matmul, [(3, 4, 30), (30, 5)]),
        (matmul, torch.matmul, [(2, 3, 70), (2, 70, 4)]),
        (mul, torch.mul, [(3, 40, 30), (40, 30)]),
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

    torch.manual_seed(0)
    for samples, exact in zip(drawn(call, 250), expected, strict=True):
        assert (samples.std(0) > 0).double().mean() > 0.9
        assert abs(pooled_z(samples, exact, 1e-7, 60)) < 4


# -- PReLU -----------------------------------------------------------------------------------------


def test_prelu_keeps_what_is_asked_for(device):
    shape = (4, 5, 9, 8)
    x = normal(shape, device=device)
    slopes = torch.full((5,), 0.3, device=device)
    sign, rest = 4 * ceil(x.numel() / 32), quantized_bytes(shape, 3)
    for needs_x, needs_weight in ((True, True), (True, False), (False, True)):
        inputs = x.clone().requires_grad_(needs_x), slopes.clone().requires_grad_(needs_weight)
        saved = saved_by(lambda x, slopes: F.prelu(x, slopes, bits=3), *inputs)[1]
        pointers = {x.data_ptr() for x in inputs}
        found = sum(tensor.nbytes for tensor in saved if tensor.data_ptr() not in pointers)
        assert found == sign * needs_x + rest * needs_weight


def test_prelu_at_zero_and_beyond_numbers(device):
    x = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1.0, -1.0], device=device)
    x = x.requires_grad_()
    slope = torch.tensor([0.25], device=device)
    grad = normal(x.shape, device=device, seed=6)
    ours = torch.autograd.grad(F.prelu(x, slope), x, grad)[0]
    assert same(ours, torch.autograd.grad(torch_f.prelu(x, slope), x, grad)[0])


# -- Softmax ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "draws"), [("uniform", 20000), ("rotated", 40000), ("unbiased", 160000)]
)
@pytest.mark.parametrize("bits", [1, 2])
def test_the_bias_of_softmax(bits, kind, draws):
    """The bias E[grad^] - grad = -Cov[y^] g is measured over equal rows.

    In a uniform copy, elements are rounded independently, so this is -g_j Var[y^_j].
    """
    width = 64
    torch.manual_seed(0)
    x = normal((1, width), torch.float64, scale=1.0).expand(draws, width).requires_grad_()
    g = normal((1, width), torch.float64, scale=1.0, seed=6).expand(draws, width)
    y = torch_f.softmax(x, -1)
    (exact,) = torch.autograd.grad(y, x, g)
    kept = Quantizer(bits, kind=kind).quantize(y.detach())
    covariance = kept.spec.dequantize(kept.tensors, torch.float64).t().cov()
    if kind == "uniform":
        covariance = covariance.diagonal().diag()
    (found,) = torch.autograd.grad(softmax(x, -1, bits=bits, quantizer=kind), x, g)
    bias, measured = -covariance @ g[0], found.mean(0) - exact[0]
    assert abs(pooled_z(found, exact[0], 1e-7, 60)) > 4
    assert abs(pooled_z(found, exact[0] + bias, 1e-7, 60)) < 4
    # Along the formula's direction: 1 where it holds, 0 where there is no bias.
    assert abs(float((measured * bias).sum() / bias.square().sum()) - 1) < 0.1


@pytest.mark.parametrize(
    "deviation, bits, kind, size",
    [
        (1.0, 1, "uniform", 0.063),
        (1.0, 2, "uniform", 0.012),
        (1.0, 3, "uniform", 0.003),
        (3.0, 2, "uniform", 0.037),
        (1.0, 1, "rotated", 0.009),
        (1.0, 2, "rotated", 0.0016),
        (3.0, 2, "rotated", 0.0185),
        (1.0, 1, "unbiased", 0.024),
        (1.0, 2, "unbiased", 0.0027),
        (3.0, 2, "unbiased", 0.031),
    ],
)
def test_the_size_of_the_bias_of_softmax(deviation, bits, kind, size):
    """For normal rows of 64 and uniform copies it is 0.5 to 5 % of the gradient at 2 bits."""
    torch.manual_seed(0)
    rows, draws = 100, 300
    x = normal((rows, 64), scale=deviation).requires_grad_()
    g = normal((rows, 64), scale=1.0, seed=6)
    (exact,) = torch.autograd.grad(torch_f.softmax(x, -1), x, g)
    many = x.detach().repeat(draws, 1).requires_grad_()  # each row with groups of its own
    (found,) = torch.autograd.grad(
        softmax(many, -1, bits=bits, quantizer=kind), many, g.repeat(draws, 1)
    )
    measured = found.view(draws, rows, 64).double().mean(0) - exact
    kept = Quantizer(bits, kind=kind).quantize(torch_f.softmax(many.detach(), -1))
    values = kept.spec.dequantize(kept.tensors).view(draws, rows, 64).double()
    bias = -g * values.var(0)  # other sampling errors than those along this direction are left out
    along = (measured * bias).sum() / bias.norm() / exact.norm()
    assert 0.6 * size < along < 1.4 * size
    assert kind != "uniform" or bits != 2 or 0.005 < along < 0.05


def test_softmax_dtype_and_dim(device):
    x = normal((3, 70), torch.bfloat16, device, scale=1.0).requires_grad_()
    grad = normal((3, 70), device=device, seed=6)
    for ours, theirs in ((softmax, torch_f.softmax), (log_softmax, torch_f.log_softmax)):
        y = ours(x, 1, dtype=torch.float32, bits=8)
        their_y = theirs(x, 1, dtype=torch.float32)
        assert same(y, their_y)
        found, expected = (torch.autograd.grad(result, x, grad)[0] for result in (y, their_y))
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
    for kind in (fewbit.nn.Embedding, nn.Embedding):
        torch.manual_seed(0)
        made.append(kind(rows, width, **options).to(device, dtype))
    return made


def embedding_step(module, indices):
    y = module(indices)
    y.backward(normal(y.shape, y.dtype, y.device, seed=6))
    grad, module.weight.grad = module.weight.grad, None
    return y, grad


def compare_embeddings(ours, theirs, indices):
    """Check that results are equal to the bit, or that both refuse."""
    try:
        their_y, their_grad = embedding_step(theirs, indices)
    except IndexError:  # sparse, with padding, and one index without a dimension
        with pytest.raises(IndexError):
            embedding_step(ours, indices)
        return
    except RuntimeError:
        if indices.is_cuda and not indices.numel():
            pytest.skip("this version of torch cannot compute it on a GPU")
        raise
    y, grad = embedding_step(ours, indices)
    assert same(y, their_y) and y.stride() == their_y.stride()
    assert same(ours.weight, theirs.weight) and grad.layout == their_grad.layout
    assert same_sums(grad.to_dense(), their_grad.to_dense())


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
    assert bytes_by(ours, indices) == size * indices.numel()
    ours.weight.requires_grad_(False)
    assert not bytes_by(ours, indices) and isinstance(ours, nn.Embedding)


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
        F.embedding(torch.tensor([5]), weight.cpu())
    with pytest.raises(AssertionError):
        F.embedding(torch.tensor([1], device=device), weight, padding_idx=7)
    with pytest.raises(RuntimeError):
        F.embedding(torch.tensor([1.0], device=device), weight)


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
    assert bytes_by(compiled, indices) == 2 * 400


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


IMAGE = (2, 3, 9, 8)
MODES += [
    ("bilinear", IMAGE, {"scale_factor": 0.5, "antialias": True}),
    ("bicubic", IMAGE, {"size": (4, 5), "antialias": True}),
    ("bilinear", IMAGE, {"scale_factor": (2.0, 1.5), "align_corners": True}),
    ("area", IMAGE, {"scale_factor": (0.6, 1.5)}),
    ("area", IMAGE, {"size": [2, 11]}),
    ("nearest", IMAGE, {"scale_factor": 1.6, "recompute_scale_factor": True}),
    ("area", IMAGE, {"scale_factor": 0.4, "recompute_scale_factor": True}),
]


def check_upsampling(ours, theirs, x):
    """Compare values and gradients to the bit; nothing is saved."""
    found, expected = gradients(ours, x), gradients(theirs, x)
    assert same(found[0], expected[0]) and all(map(same_sums, found[1], expected[1]))
    assert not bytes_by(ours, x.requires_grad_())


@pytest.mark.parametrize("mode, shape, options", MODES)
def test_interpolate(device, mode, shape, options):
    x = normal(shape, device=device)
    calls = (partial(functions.interpolate, mode=mode, **options) for functions in (F, torch_f))
    check_upsampling(*map(Called, calls), x)
    if "antialias" not in options:
        ours, theirs = (module.Upsample(mode=mode, **options) for module in (fewbit.nn, nn))
        check_upsampling(ours, theirs, x)
        assert repr(ours) == repr(theirs)
        assert same(ours.eval()(x), theirs(x))


def test_interpolate_refuses_what_torch_refuses(device):
    x = normal(IMAGE, device=device).requires_grad_()
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
            F.interpolate(x, **options)


@pytest.mark.parametrize("name", ["UpsamplingNearest2d", "UpsamplingBilinear2d"])
def test_upsampling_2d(device, name):
    ours, theirs = (getattr(module, name)(scale_factor=2) for module in (fewbit.nn, nn))
    check_upsampling(ours, theirs, normal((2, 3, 4, 5), device=device))
    assert isinstance(ours, type(theirs))


def test_interpolate_compiled(device):
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: F.interpolate(x * 1.0, scale_factor=0.5, mode="area") * 1.0,
        fullgraph=True,
        backend="aot_eager_decomp_partition",
    )
    x = normal((2, 3, 8, 6), device=device).requires_grad_()
    y, saved = saved_by(compiled, x)
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
    """Return the distance, in steps, by which independent errors of mean 0 within a step move sum(terms * errors).

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
    g, x1, x2 = (tensor.flatten(0, -2) for tensor in (g, x1, x2))
    of_both = torch.einsum("nk,kij->nij", g, weight)
    of_1, of_2 = (torch.einsum("nk,nm->nkm", g, x) for x in (x1, x2))
    of_weight = (
        step2 * moved_by(of_1, 0)[:, :, None]
        + step1 * moved_by(of_2, 0)[:, None, :]
        + step1 * step2 * moved_by(g, 0)[:, None, None]
    )
    g, w, x1, x2 = (tensor.abs() for tensor in (g, weight, x1, x2))
    size1 = torch.einsum("nk,kij,nj->ni", g, w, x2 + step2).view(shapes[0])
    size2 = torch.einsum("nk,kij,ni->nj", g, w, x1 + step1).view(shapes[1])
    size_weight = torch.einsum("nk,ni,nj->kij", g, x1 + step1, x2 + step2)
    return [
        ((step2 * moved_by(of_both, 2)).view(shapes[0]), size1),
        ((step1 * moved_by(of_both, 1)).view(shapes[1]), size2),
        (of_weight, size_weight),
        *((0 * entry, g.sum(0)) for entry in bias),
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
    ours = getattr(fewbit.nn, name)(*arguments, bits=bits, group_size=group_size).to(dtype)
    theirs = getattr(nn, name)(*arguments).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    inputs = [normal(shape, dtype, scale=1.0, seed=seed + i) for i, shape in enumerate(shapes)]
    (y, grads), (their_y, their_grads) = gradients(ours, *inputs), gradients(theirs, *inputs)
    assert same(y, their_y)
    if name == "PReLU":
        assert same(grads[0], their_grads[0])
    g = normal(y.shape, dtype, scale=1.0, seed=7).double()
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
        (fewbit.nn.PReLU(bits=8), nn.PReLU()),
        (fewbit.nn.Softmax(-1, bits=8), nn.Softmax(-1)),
        (fewbit.nn.LogSoftmax(0, bits=8), nn.LogSoftmax(0)),
    ):
        y, (grad, *_) = gradients(ours.to(device), x)
        expected, (their_grad, *_) = gradients(theirs.to(device), x)
        assert same(y, expected) and y.stride() == expected.stride()
        assert relative(grad, their_grad) < 0.02
