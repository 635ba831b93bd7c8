"""The levels of quantizers for standard normal numbers, from the shipped tables of the function `value`."""

from __future__ import annotations

import json
from functools import cache

from fewbit.catalog.store import tables_directory
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
    table = value_table(bits, "mse")
    half = 2 ** (bits - 1)
    return tuple(table["breaks"][half:]), tuple(table["levels"][half:])


@cache
def normal_error(bits: int) -> float:
    """Return the mean squared error of a standard normal number that is rounded to the levels of `normal_levels`.

    Args:
        bits: The bits of a code, 1 to 8.

    Raises:
        TableError: No table with this number of bits is shipped.
    """
    return float(value_table(bits, "mse")["error"])


@cache
def unbiased_levels(bits: int) -> tuple[tuple[float, ...], ...]:
    """Return the levels of the exactly unbiased code with shared randomness that has the least error for normal numbers.

    `fewbit.table.staircase` describes the code. It is unbiased for numbers in [-T, T], with T the mean of the last
    column. T depends on the bits, and is chosen for groups of 256 numbers whose unit is the root of their mean square,
    or as much more as is needed so that no number exceeds T units.

    Args:
        bits: The bits of a code, 1 to 8.

    Returns:
        A row of 2**bits ascending levels for each value of the shared random number.

    Raises:
        TableError: No table with this number of bits is shipped.
    """
    return tuple(tuple(row) for row in value_table(bits, "shared")["shared_levels"])


def value_table(bits: int, objective: str) -> dict:
    """Return the document of the shipped table of the function `value` with this number of bits and this objective.

    The document is not validated, to save time. Tests validate all shipped tables.

    Raises:
        TableError: No such table is shipped.
    """
    for document in _documents():
        if document["bits"] == bits and document["objective"] == objective:
            return document
    raise TableError(f"bits: expected 1 to 8, got {bits!r}")


@cache
def _documents() -> list[dict]:
    text = (tables_directory() / "value.json").read_text(encoding="utf-8")
    return json.loads(text)["tables"]
