"""Switch off oneDNN for a while, unlike `torch.backends.mkldnn.flags` without a warning about options of GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Switch:
    """The switch of oneDNN, which all threads share. It is off as long as one of them needs it off."""

    def __init__(self):
        self._lock, self._users, self._before = threading.RLock(), set(), True

    def turn_off(self, user: object) -> None:
        with self._lock:
            if not self._users:
                self._before = torch._C._get_mkldnn_enabled()
            self._users.add(user)
            torch._C._set_mkldnn_enabled(False)

    def turn_back(self, user: object) -> None:
        with self._lock:
            if user in self._users:
                self._users.remove(user)
                if not self._users:
                    torch._C._set_mkldnn_enabled(self._before)


_switch = _Switch()


@contextmanager
def without_one_dnn() -> Iterator[None]:
    """Return a context manager in whose block torch does not use oneDNN, in all threads."""
    user = object()
    _switch.turn_off(user)
    try:
        yield
    finally:
        _switch.turn_back(user)
