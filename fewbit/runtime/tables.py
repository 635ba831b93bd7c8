"""Which table a layer uses: the one it was given, or the default for its function and bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from numbers import Real
from typing import NamedTuple

import numpy as np
import torch

from fewbit import functions, store
from fewbit.errors import FunctionError, InputError, TableError
from fewbit.runtime.constant import constant
from fewbit.runtime.encoding import Encoding
from fewbit.runtime.exact import exactly
from fewbit.runtime.plain import is_abstract
from fewbit.table import Table, describe, describe_function

DEFAULT = {"weight": "uniform", "objective": "mse", "tails": "free", "form": "levels"}
"""How default tables are designed (docs/decisions/0005)."""


@constant
def encoding_text(function: str, parameters: tuple, bits: int, table: Table | None = None) -> str:
    """The text of the encoding for a named function; parameters in the order of `fewbit.functions`.

    Raises FunctionError, SolveError or TableError, one line each, if there is no such table.
    """
    check_choice(bits, table)
    if table is None:
        return _default(function, parameters, bits)
    return _given(function, parameters, table)


@constant
def callable_encoding_text(function, bits: int, table: Table | None, device, dtype) -> str:
    """The same for a callable on tensors of that device and dtype.

    Without a table one is solved, and again if the callable, called with a few numbers, no longer gives what it gave.
    While a CUDA graph is captured values cannot be compared: the table that there is serves.
    """
    check_choice(bits, table)
    key = id(function), bits, device, dtype
    found = _solved.get(key)
    if found is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _text(found.table if table is None else table)
    values = _probe(function, device, dtype)
    if table is not None:
        return _text(table)
    if found is None or not _are_equal(found.values, values):
        _check_steady(function, values, device, dtype)
        found = _Solved(function, values, store.load_table(function, bits, **DEFAULT))
        _solved.pop(key, None)
        while len(_solved) >= _MOST_SOLVED:
            del _solved[next(iter(_solved))]
        _solved[key] = found
    return _text(found.table)


class _Solved(NamedTuple):
    """The table of a callable and the values it was solved for. Holding the callable keeps its id from being reused."""

    function: Callable
    values: torch.Tensor
    table: Table


_solved: dict[tuple, _Solved] = {}
_MOST_SOLVED = 256
_POINTS = 64


def _probe(function, device, dtype) -> torch.Tensor:
    """Return function at 64 numbers between -10 and 10. FunctionError if a parameter of the callable needs a gradient."""
    points = torch.linspace(-9.7, 9.9, _POINTS, dtype=dtype, device=device)
    with torch.enable_grad(), exactly():
        values = function(points)
    if not isinstance(values, torch.Tensor):
        raise FunctionError(
            f"{_name_of(function)}: expected a callable that returns a tensor, got {type(values).__name__}"
        )
    if values.requires_grad:
        raise FunctionError(
            f"{_name_of(function)}: expected a callable whose parameters need no gradient, got one that holds some; "
            "a table is a constant: freeze them, or train them with torch's own"
        )
    return values


def _check_steady(function, values, device, dtype) -> None:
    if not _are_equal(_probe(function, device, dtype), values):
        raise FunctionError(
            f"{_name_of(function)}: expected a callable that gives finite values, the same at every call, got others"
        )


def _are_equal(values, others) -> bool:
    """Return whether values are equal; True for meta and fake tensors, which have none."""
    return is_abstract(values) or is_abstract(others) or torch.equal(values, others)


def _name_of(function) -> str:
    return getattr(function, "__name__", type(function).__name__)


# The derivative of torch's shrinks with lambd=0: 1, except 0 at x = 0. The solver cannot represent a single point, so
# the table is written by hand; the second break is the smallest number above 0, also in float32.
_SHRINKS = ("hardshrink", "softshrink")
_AT_ZERO = Encoding(
    bits=1,
    levels=np.array([0.0, 1.0]),
    breaks=np.array([0.0, np.nextafter(0.0, 1.0)]),
    codes=np.array([1, 0, 1]),
    closed=("left", "left"),
)


@lru_cache(maxsize=256)
def _default(function, parameters, bits) -> str:
    named = _function(function, parameters)
    if function in _SHRINKS and parameters == (0.0,):
        return _AT_ZERO.text
    return _text(store.load_table(function, bits, parameters=dict(named.parameters), **DEFAULT))


@lru_cache(maxsize=256)
def _given(function, parameters, table) -> str:
    wanted = _function(function, parameters)
    if (table.function, table.parameters) != (wanted.name, dict(wanted.parameters)):
        expected = describe(wanted.name, wanted.parameters)
        raise TableError(f"expected a table of {expected}, got one of {describe_function(table)}")
    return _text(table)


@lru_cache(maxsize=256)
def _text(table) -> str:
    return Encoding.of(table).text


def plain_number(value):
    """A number of any type (4.0, numpy.int64(4)) as an int, or a float where it is not whole; else as it is."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if value == value // 1 else float(value)


def check_bits(bits, name: str = "bits") -> None:
    """Raises InputError if `bits` is not a whole number from 1 to 8."""
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 8:
        raise InputError(f"expected a whole number from 1 to 8 for {name}, got {bits!r}")


def check_average(bits, name: str = "bits") -> None:
    """Raises InputError if `bits` is not a number from 1 to 8."""
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not 1 <= bits <= 8:
        raise InputError(f"expected a number from 1 to 8 for {name}, got {bits!r}")


def check_choice(bits, table) -> None:
    """Raises InputError or TableError if `bits` is not a whole number from 1 to 8, or `table` no table."""
    check_bits(bits)
    if table is not None and not isinstance(table, Table):
        raise TableError(
            f"expected a fewbit.Table for table=, got {type(table).__name__}; "
            "a table is a constant and takes no gradient"
        )


def _function(function, parameters) -> functions.Function:
    names = functions.get(function).parameters
    return functions.get(function, dict(zip(names, parameters, strict=True)))
