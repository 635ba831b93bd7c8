"""Which tensors the modules of a region hold as buffers: the second run leaves these attributes as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType

import torch
from torch import nn

from fewbit.runtime.activations.callable_state import contents
from fewbit.runtime.interop.checkpoint import outside_dispatch_modes
from fewbit.runtime.interop.interrupts import undo_after
from fewbit.runtime.interop.tensor_kinds import has_memory


class Buffers:
    """The buffers of a region's modules, some of which the region replaces by other tensors, or gives other memory.

    Args:
        function: the region.
    """

    def __init__(self, function):
        self._modules = [module for module in _modules_of(function) if module._buffers]
        self._replaced = []  # (module, {name: the buffer before the first run})

    @contextmanager
    def watched(self):
        """Return a context manager for the first run, which remembers the buffers that the region replaces."""
        before = [(module, dict(module._buffers)) for module in self._modules]
        with outside_dispatch_modes(), torch._C.DisableTorchFunction():
            views = [_views(buffers) for _, buffers in before]
        yield
        for (module, buffers), earlier in zip(before, views, strict=True):
            replaced = {
                name: earlier[name]
                for name, value in buffers.items()
                if module._buffers.get(name) is not value or not _is_same(value, earlier[name])
            }
            if replaced:
                self._replaced.append((module, replaced))

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


def _views(buffers) -> dict:
    """Return {name: a view of the whole buffer}. The view keeps its memory if the buffer gets another."""
    return {name: x.detach() if has_memory(x) else x for name, x in buffers.items()}


def _is_same(buffer, view) -> bool:
    """Return whether a buffer has the memory of its earlier view."""
    if not has_memory(buffer):
        return True
    with torch._C.DisableTorchFunction():
        return buffer.untyped_storage()._cdata == view.untyped_storage()._cdata


def _modules_of(function) -> Iterator[nn.Module]:
    """Yield the modules that a function is, holds or encloses, or finds among its globals."""
    waiting, seen = [function], {}
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, nn.Module):
            yield from part.modules()
        elif isinstance(part, partial):
            waiting += [part.func, *part.args, *part.keywords.values()]
        elif isinstance(part, MethodType):
            owner = part.__self__
            waiting += [owner, *getattr(owner, "__dict__", {}).values(), part.__func__]
        elif isinstance(part, FunctionType):
            names = [part.__globals__.get(name) for name in part.__code__.co_names]
            waiting += [value for value in names if isinstance(value, nn.Module)]
            waiting += [*contents(part), *(part.__defaults__ or ())]
        elif isinstance(part, list | tuple):
            waiting += part
