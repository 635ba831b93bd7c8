"""Functions that format counts and sizes, and parse sizes."""

from __future__ import annotations

import re

from fewbit.errors import FewbitError
from fewbit.printable import shorten

MB, GB = 2**20, 2**30
LONGEST_SIZE = 60  # characters
_BITS = re.compile(r"\s*[\d.]+\s*([KMGT]i?)b\s*")
UNITS = {"B": 1, "KB": 2**10, "MB": MB, "GB": GB, "TB": 2**40}


def counted(count: float, noun: str) -> str:
    """Return a count with its noun, such as `1 module` or `1.5 bits`."""
    ending = "es" if noun.endswith(("ch", "s")) else "s"
    number = f"{count:g}" if isinstance(count, float) else count
    return f"{number} {noun}{ending * (count != 1)}"


def format_size(count: int) -> str:
    """Return bytes in a suitable unit, such as `32 GB`. Units are powers of 1024."""
    unit = max((name for name in UNITS if UNITS[name] <= count), key=UNITS.get, default="B")
    return f"{count / UNITS[unit]:.4g} {unit}"


def parse_size(text: str) -> int:
    """Parse a size such as `32GB`, `11264 mb` or `24GiB`, and return bytes, rounded down. Units are powers of 1024.

    Raises:
        FewbitError: The text has another form, counts bits, as Mb does, or the size is less than one byte.
    """
    match, hint = None, hint_of_bits(text)
    if len(text) <= LONGEST_SIZE and not hint:
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(b|[kmgt]i?b)", text.strip().lower())
    size = int(float(match[1]) * UNITS[match[2].upper().replace("I", "")]) if match else 0
    if size < 1:
        raise FewbitError(
            "expected a size such as 32GB or 11264MB (units are powers of 1024, GB as well as GiB), "
            f"got {shorten(text)}{hint}"
        )
    return size


def hint_of_bits(text) -> str:
    """Return the end of an error message if a text is a number of bits, such as `1 Mb`, else ""."""
    match = _BITS.fullmatch(text) if isinstance(text, str) else None
    return f"; {match[1]}b counts bits, write {match[1]}B for bytes" if match else ""
