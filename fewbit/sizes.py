"""Counts, and numbers of bytes, as people write them."""

from __future__ import annotations

import re

from fewbit.errors import FewbitError

MB, GB = 2**20, 2**30
UNITS = {"B": 1, "KB": 2**10, "MB": MB, "GB": GB, "TB": 2**40}


def counted(count: float, noun: str) -> str:
    """`1 module`, `2 modules`, `3 batches`, `1.5 bits`."""
    ending = "es" if noun.endswith(("ch", "s")) else "s"
    number = f"{count:g}" if isinstance(count, float) else count
    return f"{number} {noun}{ending * (count != 1)}"


def parse_size(text: str) -> int:
    """``32GB``, ``11264 MB``, ``24GiB`` in bytes; units are powers of 1024. Raises FewbitError."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip().lower())
    unit = match and match[2].upper().replace("I", "")
    if not match or unit not in UNITS or float(match[1]) <= 0:
        raise FewbitError(f"expected a size such as 32GB or 11264MB, got {text!r}")
    return int(float(match[1]) * UNITS[unit])
