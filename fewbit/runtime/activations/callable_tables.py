"""The table of a user's callable, which the solver makes when the callable is first used."""

from __future__ import annotations

import contextvars
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from fewbit.catalog import store
from fewbit.errors import FunctionError, TableError
from fewbit.printable import one_line
from fewbit.runtime.activations.tables import DEFAULT, text_of
from fewbit.runtime.interop.bypass import bypass
from fewbit.runtime.interop.compiler_tracing import constant
from fewbit.runtime.interop.tensor_kinds import is_abstract
from fewbit.table import Table, describe_function


@constant
def callable_encoding_text(
    function, bits: int, table: Table | None, device, dtype, is_plain: bool
) -> str:
    """Return the text of the encoding of a callable's table, for tensors of the given device and dtype.

    `table` is the user's, or None for one that the solver makes. If not `is_plain`, the callable is called every time,
    to check that no parameter needs a gradient; for plain tensors `apply_callable` does so.
    """
    key = _identity(function), bits if table is None else table, device, dtype
    solved = _solved.get(key)
    if solved is None:
        if table is None:
            table = _apart(device, _solve, function, bits, device, dtype)
        else:
            _apart(device, _check, function, table, device, dtype)
        solved = _Solved(function, _used(function), table)
        _remember(key, solved)
    elif not is_plain:
        _apart(device, _probe, function, device, dtype)
    return text_of(solved.table)


def _solve(function, bits, device, dtype) -> Table:
    values, again = (_probe(function, device, dtype) for _ in range(2))
    if not (is_abstract(values) or is_abstract(again) or torch.equal(again, values)):
        raise FunctionError(
            f"{name_of(function)}: expected a callable that gives finite values, the same at every call, got others"
        )
    return store.load_table(function, bits, **DEFAULT)


def check_table(function, table: Table) -> None:
    """Raise TableError if a table is known to be that of another function."""
    first = next(iter(function.parameters()), None) if isinstance(function, nn.Module) else None
    device, dtype = (_CPU, torch.float32) if first is None else (first.device, first.dtype)
    try:
        _apart(device, _check, function, table, device, dtype)
    except TableError:
        raise
    except Exception:  # such as that of a callable whose tensors are on a GPU
        return


def _check(function, table: Table, device, dtype) -> None:
    values = _probe(function, device, dtype)
    if table.activation is None or is_abstract(values):
        return
    found = values.detach().cpu().double().numpy()
    expected = table.activation.value(_points(device, dtype).cpu().double().numpy())
    difference = found - expected
    is_known = np.isfinite(difference)
    limit = _TOLERANCE * (1 + np.abs(expected[is_known]))
    difference = difference[is_known]
    if difference.size and (np.abs(difference - np.median(difference)) > limit).any():
        raise TableError(
            f"table: expected a table of {name_of(function)}, got one of {describe_function(table)}"
        )


def _apart(device: torch.device, function, *args):
    """Return function(*args), called in a new thread, without the caller's modes, transforms, hooks, autocast and locks.

    On a GPU it computes in the caller's stream.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def call():
        with torch.cuda.stream(stream):
            return function(*args)

    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(contextvars.copy_context().run, call).result()
    finally:
        pool.shutdown(wait=False)  # so that Ctrl-C ends the call at once


def name_of(function) -> str:
    """Return the name of a callable for messages."""
    return getattr(function, "__name__", type(function).__name__)


def check_result(function, result) -> None:
    """Raise FunctionError unless the callable's result is a tensor that needs no gradient."""
    if not isinstance(result, torch.Tensor):
        raise FunctionError(
            f"{name_of(function)}: expected a callable that returns a tensor, got {type(result).__name__}"
        )
    if result.requires_grad:
        raise FunctionError(
            f"{name_of(function)}: expected a callable whose parameters need no gradient, got one that holds some; "
            "a table is a constant: freeze them, or train them with torch's own"
        )


class _Solved(NamedTuple):
    """The table of a callable. The references to the callable and to what it uses keep Python from reusing their ids."""

    function: Callable
    used: tuple
    table: Table


_solved: dict[tuple, _Solved] = {}
_lock = threading.Lock()
_MOST_SOLVED = 256
_POINTS = 64
_CPU = torch.device("cpu")
_TOLERANCE = 0.02
"""The relative difference up to which functions are the same, such as GELU and its approximation by tanh in bfloat16."""


def _identity(function) -> tuple:
    if isinstance(function, types.MethodType):
        return id(function.__self__), id(function.__func__)
    if isinstance(function, types.FunctionType):
        return (id(function.__code__), id(function.__globals__), *map(_key_of, _used(function)))
    return (id(function),)


def _used(function) -> tuple:
    if not isinstance(function, types.FunctionType):
        return ()
    keywords = function.__kwdefaults__ or {}
    enclosed = map(_content, function.__closure__ or ())
    return (*enclosed, *(function.__defaults__ or ()), *keywords.values())


def _content(cell):
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def _key_of(value):
    """Return a number itself, so that lambdas with equal numbers get equal keys, or another value's id."""
    return value if type(value) in (int, float, bool) else (id(value),)


def _remember(key, solved: _Solved) -> None:
    with _lock:
        _solved.pop(key, None)
        while len(_solved) >= _MOST_SOLVED:
            del _solved[next(iter(_solved))]
        _solved[key] = solved


def _probe(function, device, dtype) -> torch.Tensor:
    with torch.enable_grad(), bypass():
        try:
            values = function(_points(device, dtype))
        except (TypeError, ValueError) as error:
            raise FunctionError(
                f"{name_of(function)}: expected a callable of tensors, got one that raises {one_line(error)}"
            ) from error
    check_result(function, values)
    return values


def _points(device, dtype) -> torch.Tensor:
    return torch.linspace(-9.7, 9.9, _POINTS, dtype=dtype, device=device)
