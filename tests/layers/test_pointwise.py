"""fewbit.functional.pointwise: a table that is solved for a callable, and follows its values."""

import contextvars
import functools
import math

import numpy as np
import pytest
import torch
from layers import bytes_by, relative, saved_by
from samples import DTYPES, gradient, load_table, normal, same
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fewbit
import fewbit.functional as F
from fewbit.catalog import store
from fewbit.errors import FunctionError, InputError, TableError
from fewbit.runtime.activations import callable_tables


def leaf(x):
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_()


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
    table = store.load_table("hardtanh", 1, parameters={"min_val": -10.0, "max_val": 10.0})
    x = leaf(normal((40,), device=device))
    y = F.pointwise(x, lambda x: x, table=table)
    assert y is not x and same(y, x)
    y.sum().backward()
    assert same(x.grad, gradient(table, x, torch.ones_like(x)))


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


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("gelu", InputError, "function: expected a callable that takes a tensor, .*, got 'gelu'$"),
        (nn.GELU, InputError, "function: expected a callable that takes a tensor, .*GELU"),
        (math.tanh, FunctionError, "tanh: expected a callable of tensors, got one that raises"),
    ],
)
def test_what_is_no_callable_of_tensors_is_refused(function, error, message):
    with pytest.raises(error, match=message):
        fewbit.Pointwise(function, bits=3)(normal((8,)).requires_grad_())


def test_the_table_of_another_function_is_refused():
    x, gelu = leaf(normal((50,))), torch.nn.functional.gelu
    with pytest.raises(TableError, match="^table: expected a table of gelu, got one of silu$"):
        F.pointwise(x, gelu, table=load_table("silu", 3))
    with pytest.raises(TableError, match="^table: expected a table of gelu, got one of silu$"):
        fewbit.Pointwise(gelu, table=load_table("silu", 3))
    # One cannot be called with one tensor, and the parameter of the other may be frozen later.
    for function in (torch.add, Swish(1.0, True)):
        fewbit.Pointwise(function, table=load_table("silu", 3))
    for function, dtype in (
        (gelu, torch.bfloat16),
        (lambda x: gelu(x, approximate="tanh") + 1, x.dtype),
    ):
        F.pointwise(leaf(x.to(dtype)), function, table=load_table("gelu", 3))


@pytest.mark.slow
def test_the_table_of_a_callable_stays_as_it_is(solutions):
    module, x = Swish(1.0), leaf(normal((200,)))

    def slope(function):
        return torch.autograd.grad(F.pointwise(x, function, bits=4).sum(), x)[0]

    before = slope(module)
    with torch.no_grad():
        module.beta.fill_(-3.0)
    assert same(slope(module), before) and len(solutions) == 1
    exact = torch.autograd.grad(module(x).sum(), x)[0]
    assert relative(slope(functools.partial(module)), exact) < 0.1 and len(solutions) == 2
    assert (
        relative(slope(swish_of(-3.0)), exact) < 0.1
        and relative(slope(swish_of(1.0)), before) < 0.1
    )
    assert len(solutions) == 4


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


def test_a_table_of_a_callable_in_and_outside_of_autocast(solutions):
    weight = torch.tensor([[2.0]])

    def function(x):
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


@pytest.mark.slow
def test_a_callable_of_meta_and_fake_tensors():
    from torch._subclasses import FakeTensorMode

    F.pointwise(torch.ones(4, requires_grad=True), torch.tanh, bits=1)
    with FakeTensorMode():
        y = F.pointwise(torch.ones(4, requires_grad=True), torch.tanh, bits=1)
        y.sum().backward()
    x = torch.ones(4, device="meta", requires_grad=True)
    assert F.pointwise(x, torch.tanh, bits=1).is_meta


SCALE = contextvars.ContextVar("scale", default=1.0)


@pytest.mark.slow
def test_a_callable_that_reads_a_context_variable():
    token = SCALE.set(2.0)
    x = normal((32, 64), scale=1.0).requires_grad_()
    F.pointwise(x, lambda x: torch.tanh(SCALE.get() * x), bits=4).sum().backward()
    SCALE.reset(token)
    assert relative(x.grad, 2 * (1 - torch.tanh(2 * x.detach()).square())) < 0.1


def test_a_callable_whose_enclosed_value_changes_is_another_one(solutions):
    scale = np.float64(1.0)

    def function(x):
        return torch.tanh(x * float(scale))

    x = torch.zeros(4, requires_grad=True)
    for value in (1.0, 3.0):
        scale = np.float64(value)
        slope = torch.autograd.grad(F.pointwise(x, function, bits=6).sum(), x)[0]
        assert relative(slope, torch.full((4,), value)) < 0.05
    assert len(solutions) == 2


def test_a_trace_is_the_same_every_time():
    """Nothing of the callable's own table is traced."""
    x = torch.randn(8, requires_grad=True)

    def traced():
        graph = make_fx(lambda x: F.pointwise(x, torch.tanh, bits=2))(x).graph
        return [str(node.target) for node in graph.nodes]

    assert traced() == traced()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_input_is_refused(dtype):
    x = torch.ones(4, dtype=dtype, requires_grad=True)
    with pytest.raises(fewbit.InputError, match="expected a float32, .* tensor, got torch.complex"):
        F.pointwise(x, torch.sin, table=fewbit.load_table("gelu", 3))
