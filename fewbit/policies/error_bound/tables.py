"""How many bits an activation's table needs for its largest error to be within a bound."""

from __future__ import annotations

from functools import lru_cache

from fewbit import functions
from fewbit.catalog import store
from fewbit.config import MAX_BITS, MIN_BITS
from fewbit.errors import FewbitError
from fewbit.policies.error_bound.formulas import largest_table_error
from fewbit.runtime.activations.tables import DEFAULT


def least_bits(function: str, parameters: tuple[float, ...], allowed: float) -> int | None:
    """The fewest bits with which the default table's largest error is at most `allowed`; None if there are none.

    Of bits that no table has been shipped for one is solved, once.
    """
    for bits in range(MIN_BITS, MAX_BITS + 1):
        if table_error(function, parameters, bits) <= allowed:
            return bits
    return None


@lru_cache(maxsize=1024)
def table_error(function: str, parameters: tuple[float, ...], bits: int) -> float:
    """max |q - f'| of the default table over its domain."""
    names = functions.get(function).parameters
    given = dict(zip(names, parameters, strict=True))
    table = store.load_table(function, bits, parameters=given, **DEFAULT)
    return largest_table_error(table, *table.domain)


def is_known(function: str, parameters: tuple[float, ...]) -> bool:
    """Whether there is a default table of that function."""
    try:
        # (With few bits: what has two slopes needs no more, and many take long to solve.)
        table_error(function, parameters, MIN_BITS)
    except FewbitError:
        return False
    return True
