"""The table of an activation: the one that the user gave, or the default one for the function and `bits`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from struct import pack, unpack

import numpy as np
import torch

from fewbit import functions
from fewbit.catalog import store
from fewbit.config import check_bits
from fewbit.errors import TableError
from fewbit.runtime.format.encoding import Encoding
from fewbit.runtime.interop.compiler_tracing import constant
from fewbit.table import Table, describe, describe_function

DEFAULT = {"weight": "uniform", "objective": "mse", "tails": "free", "form": "levels"}
"""The settings with which the solver designs default tables (docs/decisions/0005)."""


@lru_cache(maxsize=1024)
def encoding_of(
    function: str, parameters: tuple, bits: int, table: Table | None, dtype: torch.dtype
) -> Encoding:
    """Return the encoding of a named function's table, for inputs of `dtype` and settings that `check_choice` accepts.

    Raises:
        FunctionError, SolveError, TableError: there is no such table.
    """
    if table is None and function in _COMPARED and dtype != torch.float64:
        parameters = tuple(unpack("f", pack("f", number))[0] for number in parameters)
    names = functions.get(function).parameters
    wanted = functions.get(function, dict(zip(names, parameters, strict=True)))
    if table is None:
        if function in _SHRINKS and parameters == (0.0,):
            return _AT_ZERO
        table = store.load_table(function, bits, parameters=dict(wanted.parameters), **DEFAULT)
    elif (table.function, table.parameters) != (wanted.name, dict(wanted.parameters)):
        expected = describe(wanted.name, wanted.parameters)
        raise TableError(
            f"table: expected a table of {expected}, got one of {describe_function(table)}"
        )
    return Encoding.of(table)


@constant
def encoding_text(
    function: str, parameters: tuple, bits: int, table: Table | None, dtype: torch.dtype
) -> str:
    """Return the text of `encoding_of`, after `check_choice`."""
    check_choice(bits, table)
    return encoding_of(function, parameters, bits, table, dtype).text


# Unless the input is float64, torch compares elements with parameters of threshold and hardtanh that it has rounded to float32,
# so the table is made for the rounded numbers. The two shrinks round lambd to the dtype of the input. For an input of 16 bits,
# the table is wrong at one value of |x| if that dtype cannot represent lambd.
_COMPARED = {"threshold", "hardtanh", "hardshrink", "softshrink"}

# With lambd=0, the derivative of torch's shrinks is 0 at x = 0, and 1 everywhere else. The solver cannot represent a
# single point, so this table is written by hand. Its second break is the smallest number above 0, also in float32.
_SHRINKS = ("hardshrink", "softshrink")
_AT_ZERO = Encoding(
    bits=1,
    levels=np.array([0.0, 1.0]),
    breaks=np.array([0.0, np.nextafter(0.0, 1.0)]),
    codes=np.array([1, 0, 1]),
    closed=("left", "left"),
)


@lru_cache(maxsize=256)
def text_of(table) -> str:
    """Return the text of a table's encoding."""
    return Encoding.of(table).text


def check_choice(bits, table) -> None:
    """Raise InputError for invalid `bits`, and TableError unless `table` is a table or None."""
    check_bits(bits)
    if table is not None and not isinstance(table, Table):
        advice = "a table is a constant and takes no gradient"
        if isinstance(table, str | Path):
            advice = f"fewbit.Table.load({str(table)!r}) reads a file"
        raise TableError(f"table: expected a fewbit.Table, got {type(table).__name__}; {advice}")
