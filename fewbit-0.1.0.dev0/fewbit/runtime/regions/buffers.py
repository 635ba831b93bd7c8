"""Which tensors the modules of a region hold as buffers: the second run leaves these attributes as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType

from torch import nn

from fewbit.runtime.interop.interrupts import undo_after


class Buffers:
    """The buffers of a region's modules, some of which the region replaces by new tensors.

    Args:
        function: the region: a module, a method of a module, or a `functools.partial` of these.
    """

    def __init__(self, function):
        self._modules = [module for module in _modules_of(function) if module._buffers]
        self._replaced = []  # (module, its buffers before the first run)

    @contextmanager
    def watched(self):
        """Return a context manager for the first run, which remembers the buffers that the region replaces."""
        before = [(module, dict(module._buffers)) for module in self._modules]
        yield
        self._replaced = [
            (module, buffers)
            for module, buffers in before
            if any(buffers.get(name) is not value for name, value in module._buffers.items())
        ]

    @contextmanager
    def earlier(self):
        """Return a context manager for the second run, in whose block the buffers are those of the first run."""
        now = [(module, dict(module._buffers)) for module in self._modules]

        def put_back():
            for module, buffers in now:
                module._buffers.update(buffers)

        with undo_after(put_back):
            for module, buffers in self._replaced:
                module._buffers.update(buffers)
            yield


def _modules_of(function) -> Iterator[nn.Module]:
    """Yield the modules that run if a function is called, as far as the function's type tells."""
    if isinstance(function, nn.Module):
        yield from function.modules()
    elif isinstance(function, MethodType):
        yield from _modules_of(function.__self__)
    elif isinstance(function, partial):
        for part in (function.func, *function.args):
            yield from _modules_of(part)
