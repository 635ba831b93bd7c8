"""Undo changes after any exception, even after an interrupt that comes at any bytecode or during the clean-up itself.

Python closes a generator when the last reference to the generator is gone. A generator's `finally` therefore runs even
if the interrupt comes between the generator's `yield` and the `with` block, or between the block and `__exit__`. After
an exception the clean-up runs twice, in case the first run was interrupted, so a clean-up must be idempotent.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import _GeneratorContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


@contextmanager
def undo_after(put_back: Callable[[], None]):
    """Call put_back() when the block ends; after an exception call it twice, in case the first call was interrupted."""
    try:
        try:
            yield
        finally:
            put_back()
    except BaseException:
        put_back()
        raise


@contextmanager
def hold(lock):
    """Hold a `threading.RLock` during the block. If the thread holds the lock already, the outer block releases it."""
    # A finalizer or signal handler may run within a block that holds the lock. Only that block may release the lock.
    if lock._is_owned():
        yield
        return

    def release():
        if lock._is_owned():
            lock.release()

    with undo_after(release):
        lock.acquire()
        yield


class ThreadState:
    """A snapshot of torch's state in this thread: modes, hooks on saved tensors, grad mode, autocast's cache."""

    def __init__(self):
        self._has_grad = torch.is_grad_enabled()
        self._overrides = torch._C._get_torch_function_state()
        self._cache = torch.is_autocast_cache_enabled()
        self._functions = _get_current_function_mode_stack()
        self._dispatch = _get_current_dispatch_mode_stack()
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def put_back(self) -> None:
        """Restore the state. Hooks on saved tensors that were pushed after the snapshot are popped."""
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


_ENTER = _GeneratorContextManager.__enter__.__code__
_PACKAGE = str(Path(__file__).parents[2])


def close_suspended(error: BaseException) -> None:
    """Close the context managers that were entered but not exited when the error was raised.

    A context manager that is written as a generator stays suspended at its `yield` in two cases: an error ends
    `__enter__` after the `yield` was reached, or an interrupt comes between the end of the `with` block and `__exit__`.
    The traceback keeps the frames alive that hold such generators. When the traceback is freed later, the generators
    would run the code after the `yield`, which changes torch's state again after the clean-up. This function therefore
    clears these frames now, before the clean-up.

    Args:
        error: the error whose traceback is searched. If the error is an interrupt, and so no `Exception`, the frames of
            all functions of fewbit in the traceback are cleared too.
    """
    is_interrupt = not isinstance(error, Exception)
    # The first frame is that of the caller, which still runs.
    traceback = error.__traceback__.tb_next
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code is _ENTER or (is_interrupt and code.co_filename.startswith(_PACKAGE)):
            traceback.tb_frame.clear()
        traceback = traceback.tb_next


def _are_same(hooks, others) -> bool:
    return bool(others) and hooks[0] is others[0] and hooks[1] is others[1]


def take_off_hooks(hooks: tuple) -> None:
    """Pop the given saved-tensor hooks if they are on this thread's stack. Hooks that were pushed on top of them stay."""
    autograd, above, found = torch._C._autograd, [], False
    try:
        while not found and (top := autograd._top_saved_tensors_default_hooks(True)):
            found = top[0] is hooks[0]
            if not found:
                above.append(top)
            autograd._pop_saved_tensors_default_hooks()
    finally:
        for pair in reversed(above):
            autograd._push_saved_tensors_default_hooks(*pair)


def undone_if_it_raises(
    snapshot: Callable,
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Return a decorator that restores a snapshot if the decorated function raises.

    Args:
        snapshot: a function that is called before each call of the decorated function, with the same arguments. It
            returns an object with a method `put_back()`. That method is called twice, in case an interrupt stops the
            first call.
    """

    def decorator(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @wraps(function)
        def undone(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            before = snapshot(*args, **kwargs)
            try:
                try:
                    return function(*args, **kwargs)
                except BaseException as error:
                    close_suspended(error)
                    before.put_back()
                    raise
            except BaseException:
                before.put_back()
                raise

        return undone

    return decorator


leaves_nothing = undone_if_it_raises(lambda *args, **kwargs: ThreadState())
"""Decorator: if the function raises, torch's modes and switches in this thread are restored."""
