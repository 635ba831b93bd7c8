"""An error or an interrupt leaves no mode, hook or half-made change behind, and the next step is right."""

import asyncio
import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from composed import Composed
from interrupted import at_each_line, check_nothing_is_left, gradients, state_of
from samples import normal
from torch import nn
from torch.nn import functional as torch_f
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.errors import InputError
from fewbit.runtime import backends
from fewbit.runtime.interop import original_functions
from fewbit.runtime.ops import activation_ops, quantizer_ops

ERRORS = [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, RuntimeError]
X = normal((4, 64), scale=1.0)


def small(between=lambda: None, bits=2):
    """Return a compressed model of layers, functions, a product and a recomputed region; `between` runs in its middle."""

    def forward(model, x):
        y = model.first(x)
        model.between()
        z = checkpoint(model.last, y, use_reentrant=False)
        return torch_f.silu(z) * y

    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    last = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    model = Composed(forward, first=first, last=last, between=between)
    if bits is not None:
        fewbit.compress_(model, bits, verbose=False)
    return model


def loss(model, batch):
    return model(batch).square().sum()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_an_error_in_a_forward_leaves_nothing(error):
    def stop():
        raise error

    model = small(stop)
    with pytest.raises(error):
        model(X)
    check_nothing_is_left()
    plain = nn.Linear(64, 8)  # a model that was never compressed
    assert plain(X).grad_fn.name() == "AddmmBackward0"
    with pytest.raises(error):
        model.train().first.register_forward_hook(lambda *_: stop())
        model(X)
    check_nothing_is_left()


def test_an_error_that_the_forward_catches():
    """The rest of the forward is compressed as without the error, by the settings of the running module."""

    def forward(model, x):
        for inner in (model.inner, model.left):
            with suppress(KeyboardInterrupt):
                inner(x)
        return torch_f.gelu(x)

    def stop(*_):
        raise KeyboardInterrupt

    model = Composed(forward, inner=small(stop), left=nn.Sequential(nn.Linear(64, 64)))
    fewbit.compress_(model, bits=2, exclude="left", verbose=False)
    model.left.register_forward_pre_hook(stop)
    y = model(X.clone().requires_grad_())
    assert y.grad_fn.name().endswith("ActivationBackward")
    check_nothing_is_left()


def test_an_error_in_the_backward_pass():
    model = small()
    twin = copy.deepcopy(model)
    calls = []

    def stop():
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    model.last.register_forward_pre_hook(lambda *_: stop())
    with pytest.raises(KeyboardInterrupt):  # in the region that is made again
        loss(model, X).backward()
    check_nothing_is_left()
    model.zero_grad()
    assert all(map(torch.equal, gradients(model, X), gradients(twin, X)))


def test_a_generator_that_is_closed():
    model = small()
    generator = (model(X) for _ in range(3))
    next(generator)
    generator.close()
    check_nothing_is_left()


def test_an_error_in_a_thread_is_nobody_elses():
    def stop():
        if threading.current_thread() is not threading.main_thread():
            raise KeyboardInterrupt

    def run():
        with pytest.raises(KeyboardInterrupt):
            model(X)
        check_nothing_is_left()

    model = small(stop)
    twin = copy.deepcopy(model)
    with ThreadPoolExecutor() as pool:
        pool.submit(run).result()
    assert all(map(torch.equal, gradients(model, X), gradients(twin, X)))


# -- an interrupt of a kernel or an operation ----------------------------------------------------------------

FEATURES = 32


def linear():
    return nn.Linear(FEATURES, FEATURES)


def attention():
    """Return a model with layers of one input, attention and activations as functions, and a product."""

    def forward(model, x):
        y = model.norm(x)
        q, k, v, gate = (layer(y) for layer in model.layers)
        y = torch_f.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return torch_f.gelu(y) * gate

    return Composed(
        forward, norm=nn.LayerNorm(FEATURES), layers=nn.ModuleList(linear() for _ in range(4))
    )


def again(reentrant):
    """Return a model with a region that the backward pass recomputes."""

    def forward(model, x):
        return checkpoint(model.block, model.first(x), use_reentrant=reentrant)

    return Composed(
        forward, first=linear(), block=nn.Sequential(linear(), nn.GELU(), nn.Dropout(0.5))
    )


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 4)
    )  # fmt: skip


def nested():
    """Return a model that calls another compressed model, which is not its part."""
    inner = [attention()]
    fewbit.compress_(inner[0], 2, verbose=False)
    return Composed(lambda model, x: torch_f.silu(inner[0](model.linear(x))), linear=linear())


MODELS = {
    "functions": (attention, {}),
    "convolutions": (convolutions, {}),
    "again": (lambda: again(False), {}),
    "again, reentrant": (lambda: again(True), {}),
    "nested": (nested, {}),
    "samples": (attention, {"bits": fewbit.SampleBits()}),
    "observed": (attention, {"bits": fewbit.AdaptiveBits(2.5, interval=1)}),
    "bound": (attention, {"bits": fewbit.ErrorBound(interval=1)}),
    "excluded": (lambda: nn.Sequential(attention(), attention()), {"exclude": ["1.norm", "0.layers.2"]}),
    "fused": (convolutions, {"bits": fewbit.PreActivationBits()}),
}  # fmt: skip
LEARNING = "observed", "bound"
"""Whose bits follow from the steps before."""
OPERATIONS = (
    (backends.on[torch.device("cpu")], "quantize"), (quantizer_ops, "dequantize"), (activation_ops, "activation"),
    (original_functions.functional, "linear"), (original_functions.functional, "scaled_dot_product_attention"),
)  # fmt: skip


def step(model):
    torch.manual_seed(0)
    x = normal((4, FEATURES), scale=1.0).requires_grad_()
    model(x).square().sum().backward()


@pytest.mark.parametrize("name", MODELS)
def test_an_interrupt_of_an_operation(name, monkeypatch):
    """A step is interrupted in each operation of its forward and its backward pass in turn. The next step is right."""
    torch.manual_seed(0)
    make, options = MODELS[name]
    model = make()
    fewbit.compress_(model, verbose=False, **{"bits": 2, **options})
    step(model)
    count, at = 0, None

    def interrupting(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == at:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return call

    x = normal((4, FEATURES), scale=1.0)
    expected, before = gradients(model, x), state_of(model)
    with monkeypatch.context() as patch:
        for holder, operation in OPERATIONS:
            patch.setattr(holder, operation, interrupting(getattr(holder, operation)))
        step(model)
        numbers = range(1, count + 1, max(1, count // 8))
        for number in numbers:
            count, at = 0, number
            with pytest.raises(KeyboardInterrupt):
                step(model)
            check_nothing_is_left()
    assert len(numbers) >= 4
    model.zero_grad()
    assert state_of(model) == before
    found = gradients(model, x)
    if name in LEARNING:
        assert all(bool(gradient.isfinite().all()) for gradient in found)
    else:
        assert all(map(torch.equal, found, expected))
    check_nothing_is_left()


# -- calls that change a model --------------------------------------------------------------------------------


def unchanged_or_converted(model, before, exact):
    """Check that the model is unchanged, or is converted and can be restored."""
    if state_of(model) != before:
        assert any(module.__class__.__module__.startswith("fewbit") for module in model.modules())
        fewbit.restore_(model)
        assert state_of(model) == before
    assert all(map(torch.equal, gradients(model, X), exact))


@pytest.mark.slow
def test_a_conversion_that_is_interrupted_changes_nothing():
    model = small(bits=None)
    before, exact = state_of(model), gradients(model, X)
    model.zero_grad()

    def run():
        fewbit.compress_(model, bits=2, exclude="last.1", verbose=False)
        fewbit.restore_(model)

    for _ in at_each_line(run, files=("swap.py", "module_calls.py", "functions.py", "kinds.py")):
        unchanged_or_converted(model, before, exact)
        model.zero_grad()


def test_settings_that_fail_change_nothing():
    model = small(bits=4)
    before = state_of(model)

    def fails(path, module):
        if path == "last.0":
            raise ZeroDivisionError
        return True

    for options in ({"include": fails}, {"sample": torch.ones(2, 3)}):
        with pytest.raises((ZeroDivisionError, InputError)):
            fewbit.compress_(model, bits=2, verbose=False, **options)
        assert state_of(model) == before
