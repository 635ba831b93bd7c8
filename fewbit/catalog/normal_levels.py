"""The levels of quantizers for standard normal numbers, from the shipped tables of the function `value`."""

from __future__ import annotations

import json
from functools import cache

from fewbit.catalog.store import tables_directory
from fewbit.errors import TableError


@cache
def normal_levels(bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the 2**(bits-1) - 1 positive breaks and the 2**(bits-1) positive levels of the best quantizer of a standard normal number.

    The quantizer is symmetric (Lloyd, 1982; Max, 1960): the negatives, and the break 0, complete it.

    Raises:
        TableError: No table with this number of bits is shipped.
    """
    table = value_table(bits)
    half = 2 ** (bits - 1)
    return tuple(table["breaks"][half:]), tuple(table["levels"][half:])


_GREATEST = (1, 10, 88, 104, 511, 2011, 7902, 32699)
"""The greatest level of `rotated_levels` in units, for 1 to 8 bits.

Each number has the least error of all numbers up to 127 (for 2 to 4 bits) or up to 2**(2 * bits - 1) - 1 (for 5 to 8
bits).
"""
_UNITS = (1, 8, 32, 32, 128, 512, 2048, 8192)
"""The units in 1, for 1 to 8 bits: a level of `rotated_levels` is a whole number divided by this number."""


@cache
def rotated_levels(bits: int) -> tuple[float, ...]:
    """Return the 2**(bits-1) positive levels of rotated copies: those of `normal_levels`, scaled and rounded to multiples of a power of two.

    Every group of a rotated copy has a scale of its own, so only the ratios of the levels matter. The transform that restores a group then
    computes exact sums in any order (with up to 4 bits, below 2**15 units). Rounding adds at most 0.11 % to the variance of the copy's error. The
    factor is between 0.8 and 1.3, so a group's scale is similar to its standard deviation.

    Raises:
        TableError: No table with this number of bits is shipped.
    """
    _, levels = normal_levels(bits)
    factor = _GREATEST[bits - 1] / levels[-1]
    return tuple(round(level * factor) / _UNITS[bits - 1] for level in levels)


@cache
def normal_error(bits: int) -> float:
    """Return the mean squared error of a standard normal number that is rounded to the levels of `normal_levels`.

    Args:
        bits: The bits of a code, 1 to 8.

    Raises:
        TableError: No table with this number of bits is shipped.
    """
    return float(value_table(bits)["error"])


def value_table(bits: int) -> dict:
    """Return the document of the shipped table of the function `value` with this number of bits.

    The document is not validated, to save time. Tests validate all shipped tables.

    Raises:
        TableError: No such table is shipped.
    """
    for document in _documents():
        if document["bits"] == bits:
            return document
    raise TableError(f"bits: expected 1 to 8, got {bits!r}")


@cache
def _documents() -> list[dict]:
    text = (tables_directory() / "value.json").read_text(encoding="utf-8")
    return json.loads(text)["tables"]
