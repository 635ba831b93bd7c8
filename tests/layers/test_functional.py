"""fewbit.functional: outputs are torch's, gradients are the table's, and only packed codes are saved."""

import functools
import inspect
import math

import numpy as np
import pytest
import torch
from layers import bytes_by, saved_by
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
    name_of,
    normal,
    same,
)
from torch.nn import functional as torch_f

import fewbit
import fewbit.functional as F
from fewbit import functions
from fewbit.catalog import store
from fewbit.errors import FewbitError, FunctionError, InputError, TableError
from fewbit.runtime.activations import callable_tables
from fewbit.runtime.activations.tables import DEFAULT

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


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
    """The gradient is levels[code(x)] * grad bit for bit, at breaks, infinities and NaN (in the last piece)."""
    for dtype in DTYPES:
        for bits in (1, 3):
            table = sample.table(bits)
            x = leaf(inputs(sample, dtype, backend.device))
            grad = normal(x.shape, dtype, backend.device, seed=8)
            sample(x, table=table).backward(grad)
            assert same(x.grad, gradient(table, x, grad)), (dtype, bits)


def steps(x):
    """Return the strides of dimensions that have more than one element."""
    return [
        stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel()
    ]


def reversed_strides(x):
    dims = tuple(range(x.dim()))[::-1]
    return x.permute(dims).contiguous().permute(dims)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(backend, name):
    """Strides of the output are torch's. The numbers do not depend on the strides of the gradient."""
    table = load_table("gelu", 3)
    for dtype in DTYPES:
        strided = laid_out(name, dtype, backend.device).requires_grad_()
        y, theirs = F.gelu(strided), torch_f.gelu(strided.detach())
        assert y.shape == theirs.shape and steps(y) == steps(theirs)
        torch.testing.assert_close(y, theirs)
        grads = [normal(y.shape, dtype, backend.device, seed=9)]
        grads += [torch.empty_like(y).copy_(grads[0])]
        grads += [reversed_strides(grads[0])]
        grads += [torch.ones((), dtype=dtype, device=backend.device).expand(y.shape)]
        if y.dim() > 1:
            grads += [grads[0][:1].expand(y.shape)]
        for grad in grads:
            (ours,) = torch.autograd.grad(y, strided, grad, retain_graph=True)
            assert same(ours, gradient(table, strided, grad)), name
            assert ours.shape == strided.shape


def test_views_of_the_input_and_a_parameter(backend):
    parameter = torch.nn.Parameter(normal((4, 6), device=backend.device))
    table = load_table("gelu", 3)
    F.gelu(parameter).sum().backward()
    assert same(parameter.grad, gradient(table, parameter, torch.ones_like(parameter)))
    parameter.grad = None
    F.gelu(parameter[1:, ::2].t()).sum().backward()
    expected = torch.zeros_like(parameter)
    part = parameter.detach()[1:, ::2]
    expected[1:, ::2] = gradient(table, part, torch.ones_like(part))
    assert same(parameter.grad, expected)


# -- saved tensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", **ids(ACTIVATIONS))
def test_saved_bytes(backend, sample):
    for bits in (1, 2, 3, 4) if not sample.parameters else (1, 3):
        table = sample.table(bits)
        for dtype in DTYPES:
            for n in (0, 1, 32, 33, 1000):
                x = leaf(normal((n,), dtype, backend.device))
                y, saved = saved_by(lambda x=x, bits=bits: sample(x, bits=bits))
                (codes,) = saved if n else saved or [torch.empty(0, dtype=torch.int32)]
                assert codes.nbytes == 4 * kept_bits(table) * math.ceil(n / 32)
                assert codes.nbytes == codes.untyped_storage().nbytes()
                assert codes.dtype == torch.int32
                hung = [v for v in vars(y.grad_fn).values() if isinstance(v, torch.Tensor)]
                assert not hung, "a payload that hooks and checkpointing do not see"


@pytest.mark.parametrize("layout", ["channels last", "stepped", "expanded"])
def test_saved_bytes_of_a_strided_input(backend, layout):
    x = laid_out(layout, device=backend.device).requires_grad_()
    _, saved = saved_by(lambda: F.gelu(x, bits=4))
    assert [tensor.nbytes for tensor in saved] == [4 * 4 * math.ceil(x.numel() / 32)]


def test_more_bits_than_levels_cost_nothing(device):
    x = leaf(normal((320,), device=device))
    _, saved = saved_by(lambda: F.relu(x, bits=8))
    assert [tensor.nbytes for tensor in saved] == [40]


# -- exact derivatives -----------------------------------------------------------------------------------------


def kinks(sample):
    names = functions.get(sample.function).parameters
    parameters = dict(zip(names, sample.parameters, strict=False))
    return list(functions.get(sample.function, parameters).kinks)


@pytest.mark.parametrize("sample", **ids(EXACT))
def test_one_bit_is_exact(backend, sample):
    x = normal((60,), torch.float64, backend.device)
    near = torch.stack([(x - kink).abs() < 1e-3 for kink in kinks(sample)]).any(0)
    assert torch.autograd.gradcheck(lambda x: sample(x, bits=1), leaf(x[~near]))


@pytest.mark.parametrize("sample", **ids(EXACT))
def test_torchs_gradient_at_kinks_and_saturated_values(backend, sample):
    for dtype in DTYPES:
        points = torch.tensor(
            [*kinks(sample), 0.0, -0.0, 1e30, -1e30, math.inf, -math.inf], dtype=torch.float64
        ).to(dtype)
        up, down = (torch.tensor(end, dtype=dtype) for end in (math.inf, -math.inf))
        points = torch.cat([points, points.nextafter(up), points.nextafter(down)])
        # What another layer saturated to: the output of the function itself.
        saturated = sample.torch(normal((200,), dtype))
        x = torch.cat([points, saturated]).to(backend.device)
        grad = normal(x.shape, dtype, backend.device, seed=2)
        ours, theirs = leaf(x), leaf(x)
        sample(ours).backward(grad)
        sample.torch(theirs).backward(grad)
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
    (plain,) = torch.autograd.grad(sample(x).sum(), x)
    (named,) = torch.autograd.grad(sample(x, bits=sample.bits).sum(), x)
    (given,) = torch.autograd.grad(sample(x, table=sample.table(**DEFAULT)).sum(), x)
    assert same(plain, named) and same(plain, given)


@pytest.mark.parametrize("function", ["gelu", "silu"])
def test_each_number_of_bits_is_the_table_of_that_many(function, device):
    x = leaf(normal((500,), device=device))
    for bits in range(1, 9):
        (ours,) = torch.autograd.grad(getattr(F, function)(x, bits=bits).sum(), x)
        assert same(ours, gradient(load_table(function, bits), x, torch.ones_like(x)))


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


def test_keywords(device):
    x = leaf(normal((20,), device=device))
    assert same(F.elu(input=x, alpha=1.7), F.elu(x, 1.7))
    assert same(F.gelu(input=x, approximate="tanh"), F.gelu(x, "tanh"))
    assert not same(F.gelu(x, "tanh"), F.gelu(x, "none"))
    assert F.identity(x) is x


def test_integers_stand_for_parameters(device):
    x = leaf(normal((50,), device=device))
    for ours, theirs in [
        (F.elu(x, 2), torch_f.elu(x, 2)),
        (F.hardtanh(x, 0, 2), torch_f.hardtanh(x, 0, 2)),
        (F.threshold(x, 1, -3), torch_f.threshold(x, 1, -3)),
    ]:
        torch.testing.assert_close(ours, theirs)


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0, 9, -1, 2.5, "3", True])
def test_bits_that_are_none(bits):
    x = leaf(normal((4,)))
    for sample in (GELU, RELU):
        with pytest.raises((FewbitError, TypeError), match="bits") as caught:
            sample(x, bits=bits)
        assert "\n" not in str(caught.value)


FIRST_ARGUMENTS_ONLY = {
    "threshold": (0, 0), "layer_norm": ((1,),), "rms_norm": ((1,),), "group_norm": (1,), "softmax": (0,),
    "linear": (torch.ones(2, 2),), "swiglu": (torch.ones(2),), "matmul": (torch.ones(2),), "max_pool2d": (2,),
    "interpolate": (2,), "pointwise": (torch.sin,), "dropout2d": (), "rrelu": (),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({"silu", "gelu", "hardtanh", *FIRST_ARGUMENTS_ONLY}))
def test_an_input_that_is_no_tensor(name):
    with pytest.raises(InputError, match=r"^expected a torch.Tensor, got \[1.0\]$"):
        getattr(F, name)([1.0], *FIRST_ARGUMENTS_ONLY.get(name, ()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fewbit.GELU(3), "expected 'none' or 'tanh' for approximate, got 3; bits are given by name, as GELU(bits=3)"),
        (lambda: fewbit.SiLU(3), "expected False or True for inplace, got 3; bits are given by name, as SiLU(bits=3)"),
        (lambda: fewbit.ReLU(1), "expected False or True for inplace, got 1; bits are given by name, as ReLU(bits=3)"),
        (lambda: fewbit.GELU("tan"), "expected 'none' or 'tanh' for approximate, got 'tan'"),
    ],
)  # fmt: skip
def test_bits_in_the_place_of_another_argument(make, message):
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value) == message


def test_a_table_of_another_function_or_parameters_is_refused():
    x = leaf(normal((4,)))
    with pytest.raises(TableError, match="expected a table of gelu, got one of silu"):
        F.gelu(x, table=load_table("silu", 3))
    with pytest.raises(TableError, match=r"expected a table of elu\(alpha=2\), got one of elu"):
        F.elu(x, 2.0, table=load_table("elu", 3))
    with pytest.raises(TableError, match="expected a table of gelu_tanh, got one of gelu"):
        F.gelu(x, "tanh", table=load_table("gelu", 3))
    F.gelu(x, table=load_table("gelu", 8, form="levels"))


@pytest.mark.parametrize("table", [torch.ones(3), "gelu", 3, np.ones(3), [1.0]])
def test_something_that_is_no_table(table):
    x = leaf(normal((4,)))
    with pytest.raises(TableError, match="expected a fewbit.Table for table="):
        F.gelu(x, table=table)
    with pytest.raises(TableError, match="expected a fewbit.Table for table="):
        F.pointwise(x, torch.sin, table=table)


def test_a_wrong_choice_is_refused_without_a_gradient_too():
    """A model that fails at the first step of training should also fail at its first evaluation."""
    with pytest.raises((FewbitError, TypeError)):
        F.gelu(normal((4,)), bits=9)
    with pytest.raises(TableError):
        F.gelu(normal((4,)), table=load_table("silu", 3))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_inputs_are_refused(dtype):
    x = torch.ones(3, dtype=dtype, requires_grad=True)
    with pytest.raises(InputError, match=r"tanh: expected a float32, .* tensor, got torch.complex"):
        F.tanh(x)


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


def test_parameters_that_a_function_does_not_have():
    x = leaf(normal((4,)))
    with pytest.raises(FunctionError):
        F.gelu(x, "quick")
    with pytest.raises(FunctionError):
        F.hardtanh(x, 2.0, 1.0)
    with pytest.raises(FunctionError):
        F.elu(x, math.nan)


# -- any callable ----------------------------------------------------------------------------------------------


def wavelet(x):
    return x * torch.exp(-0.5 * x * x)


def test_a_callable(backend):
    table = fewbit.solve(lambda x: x * np.exp(-0.5 * x * x), bits=3, domain=(-8, 8))
    for dtype in DTYPES:
        x = leaf(normal((300,), dtype, backend.device))
        grad = normal((300,), dtype, backend.device, seed=4)
        y, saved = saved_by(lambda x=x: F.pointwise(x, wavelet, table=table))
        assert sum(tensor.nbytes for tensor in saved) == 4 * 3 * 10
        assert same(y, wavelet(x))
        y.backward(grad)
        assert same(x.grad, gradient(table, x, grad))
    assert not bytes_by(lambda: F.pointwise(x.detach(), wavelet, table=table))


def test_a_callable_that_returns_its_input(device):
    table = load_table("relu", 1)
    x = leaf(normal((40,), device=device))
    y = F.pointwise(x, lambda x: x, table=table)
    assert y is not x and same(y, x)
    y.sum().backward()
    assert same(x.grad, gradient(table, x, torch.ones_like(x)))


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


class Swish(torch.nn.Module):
    """A module that computes x sigmoid(beta x)."""

    def __init__(self, beta, needs_gradient=False):
        super().__init__()
        self.beta = torch.nn.Parameter(torch.tensor(beta), requires_grad=needs_gradient)

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


def swish_of(beta):
    return lambda x: x * torch.sigmoid(beta * x)


@pytest.mark.parametrize("table", [None, "silu"])
def test_a_callable_whose_parameters_need_a_gradient_is_refused(table):
    table = table and load_table(table, 3)
    beta = torch.ones((), requires_grad=True)
    holds = (Swish(1.0, True), swish_of(beta), functools.partial(torch.mul, other=beta))
    for function in (*holds, Swish(1.0, True).forward):
        with pytest.raises(FunctionError, match="whose parameters need no gradient"):
            F.pointwise(leaf(normal((4,))), function, table=table)
    y = F.pointwise(leaf(normal((4,))), holds[0], bits=None)
    assert torch.autograd.grad(y.sum(), holds[0].beta)[0] is not None


class Equal:
    """A callable that equals all of its kind, and has no hash."""

    def __init__(self, beta):
        self.beta = beta

    def __eq__(self, other):
        return isinstance(other, Equal)

    __hash__ = None

    def __call__(self, x):
        return x * torch.sigmoid(self.beta * x)


def changed(module, value):
    with torch.no_grad():
        module.beta.fill_(value)


def frozen(value):
    return torch.nn.Parameter(torch.tensor(value), requires_grad=False)


class Wide:
    """A callable with a tensor that is too large to be compared by value."""

    def __init__(self, beta):
        self.beta = torch.full((1000,), beta)

    def __call__(self, x):
        return x * torch.sigmoid(self.beta[0] * x)


class Unseen:
    """A callable with a NumPy array, which has no version counter that shows changes."""

    def __init__(self, beta):
        self.beta = np.full(1, beta)

    def __call__(self, x):
        return x * torch.sigmoid(float(self.beta[0]) * x)


def enclosing(beta):
    def function(x):
        return x * torch.sigmoid(beta * x)

    def change(value):
        nonlocal beta
        beta = value

    function.change = change
    return function


BETA = 1.0


def with_a_global(beta):
    globals().update(BETA=beta)
    return lambda x: x * torch.sigmoid(BETA * x)


CHANGES = {
    "parameter": (Swish, changed),
    "data": (Swish, lambda module, value: module.beta.data.fill_(value)),
    "attribute": (Equal, lambda function, value: setattr(function, "beta", value)),
    "replaced": (Swish, lambda module, value: setattr(module, "beta", frozen(value))),
    "numpy": (Swish, lambda module, value: module.beta.numpy().fill(value)),
    "large": (Wide, lambda function, value: function.beta.fill_(value)),
    "enclosed": (enclosing, lambda function, value: function.change(value)),
    "global": (with_a_global, lambda function, value: globals().update(BETA=value)),
    "unseen": (Unseen, lambda function, value: function.beta.fill(value)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_the_table_of_a_callable_follows_its_values(kind):
    make, change = CHANGES[kind]
    function, x = make(1.0), leaf(normal((2000,)))

    def error():
        ours = torch.autograd.grad(F.pointwise(x, function, bits=4).sum(), x)[0]
        theirs = torch.autograd.grad(function(x).sum(), x)[0]
        return float((ours - theirs).norm() / theirs.norm())

    assert error() < 0.1
    change(function, -3.0)
    assert error() < 0.1


@pytest.mark.parametrize("slopes", [(0.0, -0.0, 0.0), (-0.0, 0.0)])
def test_parameters_that_differ_only_in_the_sign_of_zero(slopes):
    x = leaf(torch.tensor([-1.0, 2.0]))
    for slope in slopes:
        y, expected = F.leaky_relu(x, slope), torch.nn.functional.leaky_relu(x, slope)
        assert torch.equal(y.signbit(), expected.signbit())


@pytest.mark.parametrize("value", [None, [1.0], np.ones(2)])
@pytest.mark.parametrize("function", [F.relu, F.silu, F.hardshrink])
def test_what_is_no_tensor_is_refused_in_one_line(function, value):
    with pytest.raises(fewbit.InputError, match="^expected a torch.Tensor, got .*$"):
        function(value)


@pytest.mark.parametrize("function", [F.relu, F.silu, F.hardswish])
def test_bits_in_the_place_of_inplace_are_refused(function):
    x = leaf(normal((5,))) + 0.0
    before = x.detach().clone()
    name = function.__name__
    message = f"expected False or True for inplace, got 3; bits are given by name, as {name}\\(x, bits=3\\)"
    with pytest.raises(InputError, match=f"^{message}$"):
        function(x, 3)
    with torch.no_grad(), pytest.raises(InputError, match="^expected False or True for inplace"):
        function(x, "yes")
    with pytest.raises(FunctionError, match="got 3; bits are given by name, as gelu"):
        F.gelu(x, 3)
    assert torch.equal(x, before)


def test_torch_fx_traces_torchs_function_without_gradients():
    with torch.no_grad():
        traced = torch.fx.symbolic_trace(lambda x: F.gelu(x, bits=3))
    x = normal((7,))
    assert torch.equal(traced(x), torch.nn.functional.gelu(x))


def test_callables_that_compare_equal_have_tables_of_their_own():
    x = leaf(normal((2000,)))
    for function in (Equal(1.0), Equal(-3.0)):
        ours = torch.autograd.grad(F.pointwise(x, function, bits=4).sum(), x)[0]
        theirs = torch.autograd.grad(function(x).sum(), x)[0]
        assert (ours - theirs).norm() < 0.1 * theirs.norm()


class Counting(Swish):
    calls = 0

    def forward(self, x):
        Counting.calls += 1
        return super().forward(x)

    def method(self, x):
        return self(x)


@pytest.fixture
def solutions(monkeypatch):
    """Record the callables for which a table is solved."""
    solved, load = [], store.load_table

    def spied(function, *arguments, **options):
        solved.append(function)
        return load(function, *arguments, **options)

    monkeypatch.setattr(store, "load_table", spied)
    return solved


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_callable_runs_alone_if_the_input_needs_no_gradient(needs_gradient):
    function, x = Counting(1.5, needs_gradient), normal((50,))
    Counting.calls = 0
    y = F.pointwise(x, function)
    assert y.requires_grad == needs_gradient
    with torch.no_grad():
        assert same(F.pointwise(leaf(x), function), y)
    assert Counting.calls == 2


def methods():
    module = Counting(0.7)
    return lambda: module.method


def lambdas():
    beta = torch.tensor(0.6)
    return lambda: lambda x: x * torch.sigmoid(0.5 * beta * x)


@pytest.mark.parametrize("make", [methods, lambdas])
def test_a_table_is_solved_once_for_all_objects_that_python_makes_of_a_callable(make, solutions):
    make = make()
    assert make() is not make()
    for _ in range(3):
        F.pointwise(leaf(normal((4,))), make(), bits=1)
    assert len(solutions) == 1


@pytest.mark.parametrize("table", [None, "silu"])
def test_a_callable_is_called_once_in_each_forward(table):
    table = table and load_table(table, 3)
    module, x = Counting(1.0), leaf(normal((50,)))
    F.pointwise(x, module, table=table)
    Counting.calls, shapes = 0, []
    module.register_forward_hook(lambda module, inputs, result: shapes.append(result.shape))
    for _ in range(3):
        F.pointwise(x, module, table=table)
    assert Counting.calls == 3 and shapes == 3 * [(50,)]


def test_a_change_that_leaves_the_values_alone_solves_no_table(solutions):
    module, x = Swish(1.25), leaf(normal((4,)))
    module.other = torch.nn.Parameter(torch.ones(100), requires_grad=False)
    for _ in range(3):
        F.pointwise(x, module, bits=1)
        changed_version = module.other._version
        module.other.add_(1.0)
        assert module.other._version > changed_version
    assert len(solutions) == 1


def test_a_table_of_a_callable_in_and_outside_of_autocast(solutions):
    weight = torch.tensor([[2.0]])
    array = np.ones(3)  # its state is not seen: the values are compared

    def function(x):
        assert len(array) == 3
        return torch.tanh(torch.nn.functional.linear(x[..., None], weight.to(x.dtype))[..., 0])

    x = leaf(normal((50,)))
    assert F.pointwise(x, function, bits=1).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert F.pointwise(x, function, bits=1).dtype == torch.bfloat16
    assert len(solutions) == 1


def test_tables_of_callables_in_threads():
    from concurrent.futures import ThreadPoolExecutor

    for_all, saved = callable_tables._solved, dict(callable_tables._solved)

    def work(number):
        for second in range(300):
            callable_tables._remember(("test", number, second), None)

    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert len(for_all) <= callable_tables._MOST_SOLVED
    finally:
        for_all.clear()
        for_all.update(saved)


def test_a_callable_that_draws_is_refused():
    dropout = torch.nn.Dropout(0.5)
    with pytest.raises(FunctionError, match="Dropout: expected a callable that gives .* the same"):
        F.pointwise(leaf(normal((4,))), dropout)


def test_a_callable_of_meta_and_fake_tensors():
    from torch._subclasses import FakeTensorMode

    F.pointwise(torch.ones(4, requires_grad=True), torch.tanh, bits=1)
    with FakeTensorMode():
        y = F.pointwise(torch.ones(4, requires_grad=True), torch.tanh, bits=1)
        y.sum().backward()
    x = torch.ones(4, device="meta", requires_grad=True)
    assert F.pointwise(x, torch.tanh, bits=1).is_meta
