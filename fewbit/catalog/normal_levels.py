"""The levels of quantizers for standard normal numbers, from the shipped tables of the function `value`."""

from __future__ import annotations

import json
from functools import cache

from fewbit.catalog.store import tables_directory
from fewbit.errors import TableError


@cache
def normal_levels(bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the 2**(bits-1) - 1 positive breaks and the 2**(bits-1) positive levels of the best quantizer of a standard normal number.

    The negatives, and the break 0, complete it (Lloyd, 1982; Max, 1960).
    """
    table = value_table(bits)
    half = 2 ** (bits - 1)
    return tuple(table["breaks"][half:]), tuple(table["levels"][half:])


_GREATEST = (1, 10, 88, 104, 511, 2011, 7902, 32699)
"""The greatest level of `rotated_levels` in units, for 1 to 8 bits; of all numbers up to 127 (2 to 4 bits) or 2**(2 * bits - 1) - 1 (5 to
8 bits), the one with the least error.
"""
_UNITS = (1, 8, 32, 32, 128, 512, 2048, 8192)
"""The units in 1, for 1 to 8 bits."""


@cache
def rotated_levels(bits: int) -> tuple[float, ...]:
    """Return the 2**(bits-1) positive levels of rotated copies: those of `normal_levels`, scaled and rounded to multiples of a power of two.

    Only ratios matter, since every group has a scale. Sums of such multiples, by which a group is restored, are exact in any order (with up to
    4 bits). Rounding adds at most 0.11 % to the variance of the copy's error.
    """
    _, levels = normal_levels(bits)
    factor = _GREATEST[bits - 1] / levels[-1]
    return tuple(round(level * factor) / _UNITS[bits - 1] for level in levels)


@cache
def normal_error(bits: int) -> float:
    """Return the mean squared error of a standard normal number rounded to these levels."""
    return float(value_table(bits)["error"])


def value_table(bits: int) -> dict:
    """Return the unvalidated document of the shipped table of the function `value`. Raise TableError if none is shipped."""
    for document in _documents():
        if document["bits"] == bits:
            return document
    raise TableError(f"bits: expected 1 to 8, got {bits!r}")


@cache
def _documents() -> list[dict]:
    text = (tables_directory() / "value.json").read_text(encoding="utf-8")
    return json.loads(text)["tables"]
