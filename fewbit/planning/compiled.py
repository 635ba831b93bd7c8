"""Models that torch.compile has compiled: `fit_` examines and changes the modules inside, whose code is then compiled anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def uncompiled(model):
    """Return the module that torch.compile has wrapped, else the argument. A model of `fewbit.compile` stays."""
    is_wrapped = hasattr(model, "_orig_mod") and type(model).__module__.startswith("torch.")
    return model._orig_mod if is_wrapped else model


@contextmanager
def in_eager_mode(model: nn.Module) -> Iterator[dict[nn.Module, object]]:
    """Return a context manager in which modules that `Module.compile` has compiled run in eager mode. It yields these."""
    before = {
        module: call
        for module in model.modules()
        if (call := module._compiled_call_impl) is not None and not hasattr(call, "is_from_fewbit")
    }
    try:
        for module in before:
            module._compiled_call_impl = None
        yield before
    finally:
        for module, call in before.items():
            module._compiled_call_impl = call
