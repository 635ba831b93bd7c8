"""Properties that every activation has, for each row in tests/helpers/samples.py: outputs are torch's, gradients are the table's, and only packed codes are saved."""

import inspect
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from layers import saved_by
from samples import (
    ACTIVATIONS,
    DEVICE_FACTOR,
    DTYPES,
    EXACT,
    GELU,
    LAYOUTS,
    RELU,
    SMOOTH,
    adversarial,
    gradient,
    ids,
    kept_bits,
    laid_out,
    load_table,
    normal,
    same,
)
from torch.nn import functional as torch_f

import fewbit
import fewbit.functional as F
from fewbit import functions
from fewbit.errors import FunctionError, InputError, TableError
from fewbit.runtime.activations.recomputed import ANY_SCALE
from fewbit.runtime.activations.tables import DEFAULT
from fewbit.runtime.ops.torch_functions import FORWARD


def leaf(x):
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_()


def inputs(sample, dtype, device):
    table = sample.table()
    return torch.cat([adversarial(table, dtype), normal((700,), dtype)]).to(device)


# -- forward ---------------------------------------------------------------------------------------------------


def exact_value(sample, x):
    """Return f(x) in float64, and True if f(x) is finite."""
    names = functions.get(sample.function).parameters
    parameters = dict(zip(names, sample.parameters, strict=False))
    f = functions.get(sample.function, parameters)
    return torch.from_numpy(f.value(x.detach().cpu().to(torch.float64).numpy())).to(x.device)


def spacing(y, dtype):
    """Return the distance from |y| to the next number of dtype."""
    limits = torch.finfo(dtype)
    exponent = torch.frexp(y.abs().clamp(min=limits.smallest_normal, max=limits.max)).exponent - 1
    return torch.ldexp(torch.full_like(y, limits.eps), exponent)


@pytest.mark.parametrize("sample", **ids(ACTIVATIONS))
def test_forward_is_torchs(backend, sample):
    """The output is bit-equal to torch's, or within 2 ulp of f(x) plus ulp(1) |x| / 4, on a GPU within a multiple."""
    for dtype in DTYPES:
        x = inputs(sample, dtype, backend.device)
        y, theirs = sample(leaf(x)), sample.torch(x)
        assert y.dtype == dtype and y.requires_grad
        if backend.name.startswith("reference"):
            assert same(y, theirs), dtype
            continue
        finite = x.isfinite()
        known = (y == theirs) | (y.isnan() & theirs.isnan())
        if sample.function.startswith("gelu"):  # torch's vector code makes NaN of infinity
            known |= ~y.isfinite() & ~theirs.isfinite()
        assert known[~finite].all(), (dtype, x[~finite], y[~finite], theirs[~finite])
        x, y, theirs = x[finite], y.detach()[finite], theirs[finite]
        exact = exact_value(sample, x)
        limit = 2 * spacing(exact, dtype) + torch.finfo(dtype).eps / 4 * x.double().abs()
        if backend.device == "cuda" and dtype == torch.float32:
            limit *= DEVICE_FACTOR
        error = (y.double() - exact).abs()
        wrong = (error > limit) & (y != theirs)
        assert not wrong.any(), (dtype, x[wrong], y[wrong], exact[wrong], theirs[wrong])


@pytest.mark.parametrize("sample", **ids(ACTIVATIONS))
def test_without_a_gradient_torchs_own_function_runs_and_nothing_is_kept(backend, sample):
    x = normal((3000,), device=backend.device)
    with torch.no_grad():
        y, saved = saved_by(lambda: sample(leaf(x)))
    assert not saved and not y.requires_grad and same(y, sample.torch(x))
    y, saved = saved_by(lambda: sample(x))
    assert not saved and not y.requires_grad and same(y, sample.torch(x))
    with torch.inference_mode():
        y = sample(x)
        assert y.is_inference() and same(y, sample.torch(x))


# -- gradient --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", **ids(ACTIVATIONS))
def test_gradient_is_the_tables(backend, sample):
    """The gradient is levels[code(x)] * grad bit for bit, for all numbers, infinities and NaN (in the last piece)."""
    for dtype in DTYPES:
        for bits in (1, 3):
            table = sample.table(bits)
            x = leaf(inputs(sample, dtype, backend.device))
            grad = normal(x.shape, dtype, backend.device, seed=8)
            # Level 0 times infinity is NaN, so a GradScaler misses nothing.
            grad[::7], grad[1::7], grad[2::7] = math.inf, -math.inf, math.nan
            sample(x, table=table).backward(grad)
            assert same(x.grad, gradient(table, x, grad)), (dtype, bits)


def steps(x):
    """Return the strides of dimensions that have more than one element."""
    return [
        stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel()
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(backend, name):
    """Strides of the output are torch's. The numbers do not depend on the strides of the gradient."""
    table = load_table("gelu", 3)
    for dtype in DTYPES:
        strided = laid_out(name, dtype, backend.device).requires_grad_()
        (y, saved), theirs = saved_by(F.gelu, strided), torch_f.gelu(strided.detach())
        assert sum(tensor.nbytes for tensor in saved) == 4 * 3 * math.ceil(strided.numel() / 32)
        assert y.shape == theirs.shape and steps(y) == steps(theirs)
        torch.testing.assert_close(y, theirs)
        grads = [normal(y.shape, dtype, backend.device, seed=9)]
        grads += [torch.empty_like(y).copy_(grads[0])]
        dims = tuple(reversed(range(y.dim())))
        grads += [grads[0].permute(dims).contiguous().permute(dims)]
        grads += [torch.ones((), dtype=dtype, device=backend.device).expand(y.shape)]
        if y.dim() > 1:
            grads += [grads[0][:1].expand(y.shape)]
        for grad in grads:
            (ours,) = torch.autograd.grad(y, strided, grad, retain_graph=True)
            assert same(ours, gradient(table, strided, grad)), name
            assert ours.shape == strided.shape


# -- saved tensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", **ids(ACTIVATIONS))
def test_saved_bytes(backend, sample):
    for bits in (1, 2, 3, 4) if not sample.parameters else (1, 3):
        table = sample.table(bits)
        for dtype in (torch.float32, torch.bfloat16):
            for n in (0, 32, 33):
                x = leaf(normal((n,), dtype, backend.device))
                y, saved = saved_by(lambda x=x, bits=bits: sample(x, bits=bits))
                (codes,) = saved if n else saved or [torch.empty(0, dtype=torch.int32)]
                assert codes.nbytes == 4 * kept_bits(table) * math.ceil(n / 32)
                assert codes.nbytes == codes.untyped_storage().nbytes()
                assert codes.dtype == torch.int32
                hung = [v for v in vars(y.grad_fn).values() if isinstance(v, torch.Tensor)]
                assert not hung, "a payload that hooks and checkpointing do not see"


# -- exact derivatives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", **ids(EXACT))
def test_one_bit_is_exact(backend, sample):
    x = normal((12,), torch.float64, backend.device)
    near = torch.stack([(x - kink).abs() < 1e-3 for kink in sample.kinks()]).any(0)
    assert torch.autograd.gradcheck(lambda x: sample(x, bits=1), leaf(x[~near]))


DEGENERATE = {
    "hardshrink": [(0.0,), (-0.0,), (1e-50,), (1e-40,), (1.0,)],
    "softshrink": [(0.0,), (-0.0,), (1e-50,), (1e-40,), (1.0,)],
    "hardtanh": [(0.0, 1.0), (-1.0, 0.0), (1.0, 2.0), (0.0, 1e-40), (-2.0, 0.5)],
    "threshold": [(0.0, 5.0), (1.0, 1.0), (-1.0, 3.0), (1e-40, 0.0)],
    "leaky_relu": [(0.0,), (1.0,), (-1.0,), (2.0,), (1e-40,)],
    "rrelu": [(0.1, 0.1), (1.0, 1.0), (0.0, 0.0), (-1.0, 1.0)],
}
KINKED = {sample.function: sample for sample in EXACT}
KINKED = [
    *EXACT,
    *(
        replace(KINKED[name], parameters=given)
        for name, several in DEGENERATE.items()
        for given in several
    ),
]


@pytest.mark.parametrize("sample", **ids(KINKED))
def test_torchs_gradient_at_kinks_and_saturated_values(backend, sample):
    for dtype in DTYPES:
        points = torch.tensor(
            [*sample.kinks(), 0.0, -0.0, 1.0, -1.0, 1e30, -1e30, math.inf, -math.inf],
            dtype=torch.float64,
        ).to(dtype)
        up, down = (torch.tensor(end, dtype=dtype) for end in (math.inf, -math.inf))
        points = torch.cat([points, points.nextafter(up), points.nextafter(down)])
        # What another layer saturated to: the output of the function itself.
        saturated = sample.torch(normal((200,), dtype))
        x = torch.cat([points, saturated]).to(backend.device)
        grad = normal(x.shape, dtype, backend.device, seed=2)
        ours, theirs = leaf(x), leaf(x)
        y, their_y = sample(ours), sample.torch(theirs)
        if sample not in EXACT:  # test_forward_is_torchs has the others
            torch.testing.assert_close(y, their_y, rtol=0, atol=0, equal_nan=True)
        y.backward(grad)
        their_y.backward(grad)
        zeros = (ours.grad == 0) & (theirs.grad == 0)  # 0 * -1 is -0 here, 0 in some of torch's
        equal = zeros | (ours.grad == theirs.grad)
        if sample.function == "hardsigmoid" and dtype == torch.float64:
            equal |= (
                ours.grad - theirs.grad
            ).abs() < 1e-7 * grad.abs()  # torch's sixth is float32's
        if sample.function == "threshold" and dtype.itemsize == 2 and x.is_cuda:
            equal |= x == torch.tensor(sample.parameters[0], dtype=dtype)  # as for hardshrink
        if sample.function == "hardshrink" and sample.parameters and dtype.itemsize == 2:
            equal |= x.abs() == torch.tensor(0.3, dtype=dtype)  # torch rounds its bound to 16 bits
        assert equal.all(), (dtype, x[~equal], ours.grad[~equal], theirs.grad[~equal])


# -- arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", **ids(ACTIVATIONS))
def test_default_bits_and_table(sample, device):
    default = inspect.signature(getattr(F, sample.function.removesuffix("_tanh"))).parameters
    assert default["bits"].default == sample.bits and default["table"].default is None
    assert default["bits"].kind is default["table"].kind is inspect.Parameter.KEYWORD_ONLY
    x = leaf(normal((500,), device=device))
    torch.manual_seed(0)
    (plain,) = torch.autograd.grad(sample(x).sum(), x)
    torch.manual_seed(0)
    (named,) = torch.autograd.grad(sample(x, bits=sample.bits).sum(), x)
    (given,) = torch.autograd.grad(sample(x, table=sample.table(**DEFAULT)).sum(), x)
    assert same(plain, named)
    assert same(plain, given) != (sample.function in ANY_SCALE)


@pytest.mark.parametrize("scale", [0.03, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("function", sorted(ANY_SCALE))
def test_a_derivative_that_is_0_at_0_is_right_at_every_scale(function, scale, device):
    x = leaf(normal((256, 256), scale=scale, device=device))
    weight = normal((256, 256), seed=2, device=device)
    for bits, most in ((3, 0.25), (4, 0.17), (8, 0.02)):
        y = getattr(F, function)(x, bits=bits)
        exact, got = (
            torch.autograd.grad((z * weight).sum(), x)[0] for z in (FORWARD[function](x), y)
        )
        assert (got - exact).norm() < most * exact.norm()
        assert abs((got * exact).sum() / (exact * exact).sum() - 1) < 0.03


WITHOUT_SIGNATURE = {  # built-in functions of torch, from their documentation
    "gelu": {"input": None, "approximate": "none"},
    "logsigmoid": {"input": None},
    "softplus": {"input": None, "beta": 1.0, "threshold": 20.0},
    "softshrink": {"input": None, "lambd": 0.5},
    "hardshrink": {"input": None, "lambd": 0.5},
    "tanh": {"input": None},
    "sigmoid": {"input": None},
}


@pytest.mark.parametrize(
    "name",
    sorted(
        name for name in F.activations.__all__ if hasattr(torch_f, name) or hasattr(torch, name)
    ),
)
def test_signatures_are_torchs(name):
    ours = {
        key: None if parameter.default is inspect.Parameter.empty else parameter.default
        for key, parameter in inspect.signature(getattr(F, name)).parameters.items()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    }
    theirs = WITHOUT_SIGNATURE.get(name)
    if theirs is None:
        theirs = {
            key: None if parameter.default is inspect.Parameter.empty else parameter.default
            for key, parameter in inspect.signature(getattr(torch_f, name)).parameters.items()
        }
    assert list(ours) == list(theirs) and ours == theirs


def test_every_function_is_here():
    assert set(functions.names()) - set(F.activations.__all__) == {
        "gelu_tanh"
    }  # gelu(approximate="tanh")
    covered = {sample.function for sample in ACTIVATIONS}
    assert set(functions.names()) - covered == {"identity"}


def test_integers_and_names_of_parameters(device):
    x = leaf(normal((50,), device=device))
    for ours, theirs in [
        (F.elu(input=x, alpha=2), torch_f.elu(input=x, alpha=2)),
        (F.gelu(input=x, approximate="tanh"), torch_f.gelu(x, approximate="tanh")),
        (F.hardtanh(x, 0, 2), torch_f.hardtanh(x, 0, 2)),
        (F.threshold(x, 1, -3), torch_f.threshold(x, 1, -3)),
    ]:
        torch.testing.assert_close(ours, theirs)
    assert F.identity(x) is x


# -- refusals --------------------------------------------------------------------------------------------------

LIST = [1.0]
GIVEN = r"; bits are given by name, as "
FIRST = {
    "threshold": (0, 0), "layer_norm": ((1,),), "rms_norm": ((1,),), "group_norm": (1,), "softmax": (0,),
    "linear": (torch.ones(2, 2),), "swiglu": (torch.ones(2),), "matmul": (torch.ones(2),), "max_pool2d": (2,),
    "interpolate": (2,), "pointwise": (torch.sin,), "dropout2d": (), "rrelu": (), "silu": (), "gelu": (), "hardtanh": (),
}  # fmt: skip
REFUSED = [  # (a call with x, which needs a gradient or not, the error, the message)
    *(
        (lambda x, sample=sample, bits=bits: sample(x, bits=bits), InputError, "bits: expected a whole number from 1 to 8, got .*")
        for bits in (0, 9, -1, 2.5, "3", True)
        for sample in (GELU, RELU)
    ),
    *(
        (lambda x, name=name: getattr(F, name)(LIST, *FIRST[name]), InputError, r"expected a torch.Tensor, got \[1.0\]")
        for name in FIRST
    ),
    *(
        (lambda x, value=value: F.hardshrink(value), InputError, "expected a torch.Tensor, got .*")
        for value in (None, np.ones(2))
    ),
    (lambda x: fewbit.GELU(3), InputError, f"approximate: expected 'none' or 'tanh', got 3{GIVEN}GELU\\(bits=3\\)"),
    (lambda x: fewbit.SiLU(3), InputError, f"inplace: expected False or True, got 3{GIVEN}SiLU\\(bits=3\\)"),
    (lambda x: fewbit.ReLU(1), InputError, f"inplace: expected False or True, got 1{GIVEN}ReLU\\(bits=3\\)"),
    (lambda x: fewbit.GELU("tan"), InputError, "approximate: expected 'none' or 'tanh', got 'tan'"),
    *(
        (lambda x, name=name: getattr(F, name)(x + 0, 3), InputError, f"inplace: expected False or True, got 3{GIVEN}{name}\\(x, bits=3\\)")
        for name in ("relu", "silu", "hardswish")
    ),
    (lambda x: F.relu(x + 0, "yes"), InputError, "inplace: expected False or True.*"),
    (lambda x: F.gelu(x, 3), FunctionError, ".*got 3; bits are given by name, as gelu.*"),
    (lambda x: F.gelu(x, table=torch.ones(8, requires_grad=True)), TableError, ".*takes no gradient.*"),
    (lambda x: F.gelu(x, table="g.json"), TableError, r"table: expected a fewbit.Table, got str; fewbit.Table.load\('g.json'\) reads a file"),
    (lambda x: F.gelu(x, table=load_table("silu", 3)), TableError, "table: expected a table of gelu, got one of silu.*"),
    (lambda x: F.elu(x, 2.0, table=load_table("elu", 3)), TableError, r"table: expected a table of elu\(alpha=2\), got one of elu.*"),
    (lambda x: F.gelu(x, "tanh", table=load_table("gelu", 3)), TableError, "table: expected a table of gelu_tanh, got one of gelu.*"),
    *(
        (lambda x, table=table, call=call: call(x, table), TableError, "table: expected a fewbit.Table.*")
        for table in (torch.ones(3), "gelu", 3, np.ones(3), [1.0])
        for call in (
            lambda x, table: F.gelu(x, table=table),
            lambda x, table: F.pointwise(x, torch.sin, table=table),
        )
    ),
    *(
        (lambda x, dtype=dtype: F.tanh(x.to(dtype)), InputError, r"tanh: expected a float32, .* tensor, got torch.complex.*")
        for dtype in (torch.complex64, torch.complex128)
    ),
    (lambda x: F.gelu(x, "quick"), FunctionError, ".*"),
    (lambda x: F.hardtanh(x, 2.0, 1.0), FunctionError, ".*"),
    (lambda x: F.elu(x, math.nan), FunctionError, ".*"),
]  # fmt: skip


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_refusals(needs_gradient):
    """A model that fails at the first step of training also fails at its first evaluation, and nothing is written."""
    for call, error, message in REFUSED:
        x = normal((4,)).requires_grad_(needs_gradient)
        before = x.detach().clone()
        if not needs_gradient and "complex" in message:  # which torch's own function computes
            continue
        with pytest.raises(error, match=f"^{message}$") as caught:
            call(x)
            pytest.fail(message)
        assert "\n" not in str(caught.value) and torch.equal(x, before)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_layouts_without_strides_are_torchs():
    nested = torch.nested.nested_tensor([torch.ones(2), -torch.ones(3)], requires_grad=True)
    sparse = torch.eye(3).to_sparse().requires_grad_()
    assert torch.equal(F.relu(sparse).to_dense(), torch.eye(3))
    assert [row.tolist() for row in F.relu(nested).unbind()] == [[1, 1], [0, 0, 0]]


def test_integers_go_where_torch_sends_them():
    x = torch.arange(-3, 4)
    assert F.relu(x).tolist() == [0, 0, 0, 0, 1, 2, 3]
    with pytest.raises(RuntimeError):
        torch_f.gelu(x)
    with pytest.raises(RuntimeError):
        F.gelu(x)


# -- surroundings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [*ids(SMOOTH[:1] + EXACT[:2])["argvalues"]], ids=lambda s: s.id)
def test_under_other_defaults_of_torch(sample, device):
    x = leaf(normal((100,), device=device))
    (expected,) = torch.autograd.grad(sample(x).sum(), x)

    def check():
        (ours,) = torch.autograd.grad(sample(x).sum(), x)
        assert same(ours, expected)

    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            check()
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        check()
    torch.use_deterministic_algorithms(True)
    try:
        check()
    finally:
        torch.use_deterministic_algorithms(False)


def test_meta_and_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(3, 5, device="meta", requires_grad=True)
    (grad,) = torch.autograd.grad(F.gelu(x.t()).sum(), x)
    assert grad.device.type == "meta" and grad.shape == (3, 5)
    with FakeTensorMode():
        x = torch.randn(3, 5, requires_grad=True)
        (grad,) = torch.autograd.grad(F.relu(x).sum(), x)
        assert type(grad) is type(x) and grad.shape == (3, 5) and grad.stride() == (5, 1)


def test_a_subclass_of_tensor_stays_one(device):
    class Marked(torch.Tensor):
        pass

    x = normal((50,), device=device).as_subclass(Marked).requires_grad_()
    y = F.gelu(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert type(y) is Marked
    expected = gradient(load_table("gelu", 3), x.as_subclass(torch.Tensor), torch.ones(50))
    assert same(grad.as_subclass(torch.Tensor).cpu(), expected)


def test_threads(device):
    """Several Python threads run at once, each with its own graph."""
    from concurrent.futures import ThreadPoolExecutor

    def work(seed):
        x = leaf(normal((20_000,), device=device, seed=seed))
        for _ in range(5):
            x.grad = None
            F.gelu(x, bits=1 + seed % 4).sum().backward()
        return same(x.grad, gradient(load_table("gelu", 1 + seed % 4), x, torch.ones_like(x)))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.parametrize("slopes", [(0.0, -0.0, 0.0), (-0.0, 0.0)])
def test_parameters_that_differ_only_in_the_sign_of_zero(slopes):
    x = leaf(torch.tensor([-1.0, 2.0]))
    for slope in slopes:
        y, expected = F.leaky_relu(x, slope), torch.nn.functional.leaky_relu(x, slope)
        assert torch.equal(y.signbit(), expected.signbit())


def test_torch_fx_traces_torchs_function_without_gradients():
    with torch.no_grad():
        traced = torch.fx.symbolic_trace(lambda x: F.gelu(x, bits=3))
    x = normal((7,))
    assert torch.equal(traced(x), torch.nn.functional.gelu(x))
