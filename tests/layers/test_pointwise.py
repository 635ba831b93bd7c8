"""fewbit.functional.pointwise: a table that is solved for a callable, and follows its values."""

import contextvars
import functools
import threading

import numpy as np
import pytest
import torch
from layers import bytes_by, relative, saved_by
from samples import DTYPES, gradient, load_table, normal, same

import fewbit
import fewbit.functional as F
from fewbit.catalog import store
from fewbit.errors import FunctionError
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
    table = load_table("relu", 1)
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
    """A callable with a NumPy array, which has no version counter that shows changes, and a lock, which has no attributes."""

    def __init__(self, beta):
        self.lock, self.beta = threading.RLock(), np.full(1, beta)

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


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHANGES)
def test_the_table_of_a_callable_follows_its_values(kind):
    make, change = CHANGES[kind]
    function, x = make(1.0), leaf(normal((2000,)))

    def error(function):
        ours = torch.autograd.grad(F.pointwise(x, function, bits=2).sum(), x)[0]
        theirs = torch.autograd.grad(function(x).sum(), x)[0]
        return float((ours - theirs).norm() / theirs.norm())

    assert error(function) < 0.3
    change(function, -3.0)
    assert error(function) < 0.3
    assert error(make(1.0)) < 0.3  # also of another object, which may compare equal


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
