"""Nothing is left behind when a call ends at any place for any reason: no mode, hook, call or half-made change."""

import asyncio
import copy
import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import _GeneratorContextManager, suppress

import pytest
import torch
from composed import Composed
from interrupted import (
    check_nothing_is_left,
    exhaustively,
    gradients,
    state_of,
)
from samples import normal
from torch import nn
from torch.nn import functional as torch_f
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.errors import InputError
from fewbit.runtime.interop.interrupts import hold

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


# -- at every line --------------------------------------------------------------------------------------------


class InTorch:
    """A context that raises KeyboardInterrupt at one trace event in torch's code that removes a mode for torch's own call."""

    def __init__(self, kind, at):
        self.kind, self.at, self.seen = kind, at, 0

    def __call__(self, frame, event, argument):
        is_enter = frame.f_code is _GeneratorContextManager.__enter__.__code__
        if not is_enter or frame.f_back.f_code.co_name != "handle_torch_function":
            return None
        frame.f_trace_opcodes = True
        del frame  # which the traceback would keep
        return self.step

    def step(self, frame, event, argument):
        if event == self.kind:
            if self.seen == self.at:
                del frame, argument
                sys.settrace(None)
                raise KeyboardInterrupt
            self.seen += 1
        return self.step


def counting():
    """Return a model that calls len(x) through Python, where torch takes modes off in a generator."""
    model = Composed(lambda model, x: (len(x), model.linear(x))[1], linear=nn.Linear(64, 8))
    fewbit.compress_(model, verbose=False)
    return model


def interrupted_in_torch(model, kind, at) -> bool:
    before = sys.gettrace()
    sys.settrace(InTorch(kind, at))
    try:
        model(X)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.slow
def test_an_interrupt_where_torch_takes_a_mode_off():
    """torch's generator restores the mode when the traceback is freed, which is after fewbit's clean-up."""
    model, at = counting(), 0
    while interrupted_in_torch(model, "opcode", at):
        gc.collect()
        check_nothing_is_left()
        at += 1
    assert at > 5


def test_a_mode_that_was_left_behind_goes_with_the_next_forward():
    model = counting()
    (mode,) = model.linear.quantizer.context.contexts
    mode.__enter__()
    plain = nn.Linear(64, 8)
    assert torch_f.gelu(plain(X)).grad_fn.name() == "GeluBackward0"
    model(X).sum().backward()
    check_nothing_is_left()


CLEANING = (
    "calls.py", "context.py", "cache.py", "checkpoints.py", "module_calls.py", "bypass.py", "functions.py",
    "interrupts.py",
)  # fmt: skip


@pytest.mark.slow
def test_an_interrupt_of_the_clean_up_of_another_error():
    """One error ends the forward, and another one is raised at every line of the clean-up."""

    def stop():
        raise RuntimeError

    def run():
        with suppress(RuntimeError):
            model(X)

    model = small(stop)
    for _ in exhaustively(run, files=CLEANING):
        check_nothing_is_left()
    model.between = lambda: None
    assert gradients(model, X)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_lock_that_the_thread_holds_already(depth):
    """A finalizer can take a lock that its thread holds. An error in the finalizer must not release the outer lock."""
    lock = threading.RLock()

    def within(depth):
        with hold(lock):
            assert lock._is_owned()
            if depth:
                with pytest.raises(KeyboardInterrupt):
                    within(depth - 1)
                assert lock._is_owned()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        within(depth)
    assert not lock._is_owned() and lock.acquire(blocking=False)


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

    files = "swap.py", "module_calls.py", "undo.py", "functions.py", "kinds.py"
    for _ in exhaustively(run, per_line=1, files=files):
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
