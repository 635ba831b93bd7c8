"""Putting things back whatever ends what changed them: an interrupt may come at any bytecode, that of the clean-up too.

A generator's `finally` runs even if the interrupt comes between its `yield` and the `with` block around, or between the
block and `__exit__`: the generator is closed when nobody has it any more. What is put back is put back once more if
the first time was interrupted, so that it has to come out the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from functools import wraps

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode


@contextmanager
def afterwards(put_back: Callable[[], None]):
    """Calls put_back() when the block ends, and again if an interrupt comes meanwhile."""
    try:
        try:
            yield
        finally:
            put_back()
    except BaseException:
        put_back()
        raise


@contextmanager
def held(lock):
    """Holds a `threading.RLock`, which this thread does not hold yet."""

    def release():
        if lock._is_owned():
            lock.release()

    with afterwards(release):
        lock.acquire()
        yield


class ThreadState:
    """What torch has switched on or off in this thread: modes, hooks on saved tensors, gradients, autocast's cache."""

    def __init__(self):
        self._has_grad = torch.is_grad_enabled()
        self._overrides = torch._C._get_torch_function_state()
        self._cache = torch.is_autocast_cache_enabled()
        self._functions = _get_current_function_mode_stack()
        self._dispatch = _get_current_dispatch_mode_stack()
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def put_back(self) -> None:
        """All of it; of the hooks those on top of what there was are taken off."""
        torch.set_grad_enabled(self._has_grad)
        torch._C._set_torch_function_state(self._overrides)
        torch.set_autocast_cache_enabled(self._cache)
        if _get_current_function_mode_stack() != self._functions:
            while torch._C._len_torch_function_stack():
                torch._C._pop_torch_function_stack()
            for mode in self._functions:
                torch._C._push_on_torch_function_stack(mode)
        if _get_current_dispatch_mode_stack() != self._dispatch:
            while _get_current_dispatch_mode_stack():
                _pop_mode()
            for mode in self._dispatch:
                _push_mode(mode)
        autograd = torch._C._autograd
        while (top := autograd._top_saved_tensors_default_hooks(True)) and not _are_same(
            top, self._hooks
        ):
            autograd._pop_saved_tensors_default_hooks()


def _are_same(hooks, others) -> bool:
    return bool(others) and hooks[0] is others[0] and hooks[1] is others[1]


def leaves_nothing(function: Callable) -> Callable:
    """Have a function that is ended early leave torch's modes and switches in this thread as they were."""

    @wraps(function)
    def ended(*args, **kwargs):
        before = ThreadState()
        try:
            try:
                return function(*args, **kwargs)
            except BaseException:
                before.put_back()
                raise
        except BaseException:
            before.put_back()
            raise

    return ended
