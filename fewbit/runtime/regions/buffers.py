"""The buffers of modules that a region replaces: the second run leaves these attributes as they were."""

from __future__ import annotations

import threading
from contextlib import contextmanager

from torch.nn.modules.module import register_module_buffer_registration_hook

_MISSING = object()


class Buffers:
    """The buffers that a region replaces, by an assignment to the attribute of a module or by `register_buffer`."""

    def __init__(self):
        self._before = {}  # {(number of a module, name): (the module, the buffer before its first change)}

    @contextmanager
    def watched(self):
        """Remember the buffers that the block, the first run, replaces."""
        outer = _watchers.active
        _watchers.active = *outer, self
        try:
            yield
        finally:
            _watchers.active = outer

    @contextmanager
    def earlier(self):
        """Run the block, the second run, with the buffers from before the first run."""
        changed = Buffers()
        try:
            with changed.watched():
                for (_, name), (module, _) in self._before.items():
                    changed.note(module, name)
                self._put_back()
                yield
        finally:
            changed._put_back()

    def note(self, module, name: str) -> None:
        self._before.setdefault((id(module), name), (module, module._buffers.get(name, _MISSING)))

    def _put_back(self) -> None:
        for (_, name), (module, buffer) in self._before.items():
            if buffer is _MISSING:
                module._buffers.pop(name, None)
            else:
                module._buffers[name] = buffer


class _Watchers(threading.local):
    """The objects that watch this thread, one for each region that it runs, the outermost first."""

    active = ()


_watchers = _Watchers()


def _note(module, name, _) -> None:
    for watcher in _watchers.active:
        watcher.note(module, name)


register_module_buffer_registration_hook(_note)
