"""The bits that an activation's table needs so that its largest error is within a bound."""

from __future__ import annotations

from functools import lru_cache

from fewbit import functions
from fewbit.catalog import store
from fewbit.config import MAX_BITS, MIN_BITS
from fewbit.errors import FewbitError
from fewbit.policies.error_bound.formulas import largest_table_error
from fewbit.runtime.activations.tables import DEFAULT


def least_bits(function: str, parameters: tuple[float, ...], allowed: float) -> int | None:
    """Return the fewest bits with which the default table's largest error is at most `allowed`.

    A table that is not shipped is solved once.

    Args:
        function: a name in `fewbit.functions`.
        parameters: the function's parameters.
        allowed: the largest |q - f'|.

    Returns:
        The bits, or None if 8 bits are not enough.
    """
    for bits in range(MIN_BITS, MAX_BITS + 1):
        if table_error(function, parameters, bits) <= allowed:
            return bits
    return None


@lru_cache(maxsize=1024)
def table_error(function: str, parameters: tuple[float, ...], bits: int) -> float:
    """Return max |q - f'| of the default table over its domain."""
    names = functions.get(function).parameters
    given = dict(zip(names, parameters, strict=True))
    table = store.load_table(function, bits, parameters=given, **DEFAULT)
    return largest_table_error(table, *table.domain)


def is_known(function: str, parameters: tuple[float, ...]) -> bool:
    """Return whether there is a default table of the function."""
    try:
        # With few bits, because a function with two slopes needs no more, and larger tables take long to solve.
        table_error(function, parameters, MIN_BITS)
    except FewbitError:
        return False
    return True
