"""Numbers, sizes and paths as short text."""

from __future__ import annotations

import math
import re

from fewbit.sizes import counted

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def module_name(path: str) -> str:
    """Return a module's path, or "(model)" for ""."""
    return path or "(model)"


def module_pattern(path: str) -> str:
    """Return a module's path with * in place of numbers, such as `layers.*.fc`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module_name(path))


def bits_or_exact(bits: float | None) -> str:
    """Return `2 bits`, or `exact` for None."""
    return "exact" if bits is None else counted(float(f"{bits:.4g}"), "bit")


def unit_of(size: int, most: str = "GiB") -> tuple[str, int]:
    """Return the largest unit up to `most` that is not larger than `size` bytes, as (name, bytes)."""
    units = UNITS[[name for name, _ in UNITS].index(most) :]
    return next((unit for unit in units if size >= unit[1]), units[-1])


def amount(size: int, unit: tuple[str, int] | None = None) -> str:
    """Format bytes as `12.34 MiB`, or in the given unit, (name, bytes), as `12.34`."""
    name, scale = unit or unit_of(size)
    text = f"{size / scale:,.2f}" if scale > 1 else f"{size:,d}"
    return text if unit else f"{text} {name}"


def share(part: float, whole: float) -> str:
    """Format a part as `12.3%` of the whole; 0 of 0 is 0.0%."""
    percent = 100 * part / whole if whole else 0.0
    return "<0.1%" if 0 < percent < 0.05 else f"{percent:.1f}%"


def short(value: float) -> str:
    """Format a number of at least 0 in at most 7 characters: four decimals from 0.001 to 10, as in the paper."""
    if value == 0:
        return "0"
    if 1e-3 <= value < 10:
        return f"{value:.4f}"
    if 10 <= value < 1e5:
        return f"{value:.5g}"
    return exponential(value)


def digits(value: float) -> str:
    """Format a number with 3 significant digits, or 2 if 3 take more than 6 characters; "-" for infinity and NaN."""
    if not math.isfinite(value):
        return "-"
    text = f"{value:.3g}"
    return text if len(text) <= 6 and "e" not in text else short(float(f"{value:.1e}"))


def exponential(value: float) -> str:
    """Format a number with two digits and the shortest exponent: 1.2e-4."""
    return plain_exponent(f"{value:.1e}")


def plain_exponent(text: str) -> str:
    """Shorten the exponent of a formatted number: 1e-04 is 1e-4."""
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else text


def decimal(value: float) -> str:
    """Format a number with up to three decimals: 2.75."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def limit_text(limit: float) -> str:
    """Format 1 + e2, the limit of ErrorBound, so that a small e2 stays visible: 1 + 1e-05."""
    return f"{limit:.4g}" if limit >= 1.001 else f"1 + {limit - 1:.3g}"
