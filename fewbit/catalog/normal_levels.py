"""The optimal levels for numbers with the standard normal distribution, from the shipped tables of the function `value`."""

from __future__ import annotations

from functools import cache

from fewbit.catalog.store import shipped_tables
from fewbit.errors import TableError


@cache
def normal_levels(bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the positive half of the quantizer with the least squared error for a standard normal number.

    The whole quantizer is symmetric: its levels are these and their negatives, and its breaks are these, 0 and their
    negatives (Lloyd, 1982; Max, 1960).

    Args:
        bits: The bits of a code, 1 to 8.

    Returns:
        The 2**(bits-1) - 1 positive breaks and the 2**(bits-1) positive levels, both ascending.

    Raises:
        TableError: No table with this number of bits is shipped.
    """
    table = _table(bits)
    half = 2 ** (bits - 1)
    return tuple(table.breaks[half:].tolist()), tuple(table.levels[half:].tolist())


@cache
def normal_error(bits: int) -> float:
    """Return the mean squared error of a standard normal number that is rounded to the levels of `normal_levels`.

    Args:
        bits: The bits of a code, 1 to 8.

    Raises:
        TableError: No table with this number of bits is shipped.
    """
    return float(_table(bits).error)


def _table(bits: int):
    table = next((t for t in shipped_tables("value") if t.bits == bits), None)
    if table is None:
        raise TableError(f"bits: expected 1 to 8, got {bits!r}")
    return table
