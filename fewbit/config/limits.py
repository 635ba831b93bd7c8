"""The limits of settings, and the checks of single values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

from fewbit.errors import InputError
from fewbit.printable import shorten

MIN_BITS, MAX_BITS = 1, 8
"""The least and the most bits of a quantized element."""
DEFAULT_BITS = 4
"""The bits of quantized inputs by default (docs/decisions/0017)."""
ACTIVATION_BITS = 3
"""The bits of few-bit activations by default (docs/decisions/0017)."""
GROUP_SIZE, LARGEST_GROUP, LARGEST_ROTATED_GROUP = 256, 1 << 16, 256
"""The default and the largest size of a group (ActNN, section 4.1), and the largest in a rotated copy."""
BLOCK = 32
"""The number of elements whose codes are packed together."""
UNIFORM, ROTATED, MASKED = "uniform", "rotated", "masked"
KINDS = (ROTATED, UNIFORM, MASKED)
KIND_NUMBERS = {UNIFORM: 0, ROTATED: 1, MASKED: 2}
"""Their numbers in calls of kernels and ops."""
QUANTIZERS = (ROTATED, UNIFORM)
"""The kinds that a user can choose, the default first (docs/concepts/quantizer.md)."""


def plain_number(value):
    """Return a real number as an int if it is whole, else as a float, and any other value unchanged."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    try:
        return int(value) if value == value // 1 else float(value)
    except OverflowError:  # a fraction beyond the range of floats
        return value


def check_bits(bits, name: str = "bits") -> None:
    """Raise InputError unless `bits` is a whole number from 1 to 8."""
    require(is_whole(bits, MIN_BITS, MAX_BITS), "a whole number from 1 to 8", name, bits)


def check_average(bits, name: str = "bits") -> None:
    """Raise InputError unless `bits` is a number from 1 to 8."""
    is_number = isinstance(bits, int | float) and not isinstance(bits, bool)
    require(is_number and MIN_BITS <= bits <= MAX_BITS, "a number from 1 to 8", name, bits)


def check_group_size(group_size, name: str = "group_size") -> int:
    """Return the group size. Raise InputError unless it is a multiple of 32 from 32 to 65536."""
    is_multiple = is_whole(group_size, BLOCK, LARGEST_GROUP) and group_size % BLOCK == 0
    expected = f"a multiple of {BLOCK} from {BLOCK} to {LARGEST_GROUP}"
    return require(is_multiple, expected, name, group_size)


def check_copies(copies, name: str = "copies") -> int:
    """Return `copies`. Raise InputError unless it is 1 or 2."""
    return require(is_whole(copies, 1, 2), "1 or 2", name, copies)


def check_quantizer(quantizer, name: str = "quantizer") -> str:
    """Return `quantizer`. Raise InputError unless it is "rotated" or "uniform"."""
    is_known = isinstance(quantizer, str) and quantizer in QUANTIZERS
    return require(is_known, "rotated or uniform", name, quantizer)


def check_rotated_size(kind, group_size) -> None:
    """Raise InputError if groups of a rotated copy are too large."""
    if group_size > LARGEST_ROTATED_GROUP and kind in KINDS and kind != UNIFORM:
        expected = f"at most {LARGEST_ROTATED_GROUP}"
        require(False, expected, f"group_size with {kind} copies", group_size)


def usual_kind(usual: str, group_size: int) -> str:
    """Return the default kind of copies: `usual` (docs/decisions/0016), or "uniform" if groups are too large."""
    return usual if group_size <= LARGEST_ROTATED_GROUP else UNIFORM


def name_of_class(cls: type) -> str:
    """Return "module.Class"."""
    return f"{cls.__module__}.{cls.__qualname__}"


def autograd_functions(value, name: str) -> dict[str, list[int]]:
    """Check {autograd Function or its name: positions}. Return it with names as keys."""
    expected = "a mapping of autograd Functions, or their names, to lists of positions from 0"
    require(isinstance(value, Mapping), expected, name, value)
    found = {}
    for function, positions in value.items():
        require(isinstance(function, str | type), expected, name, value)
        require(isinstance(positions, list | tuple) and len(positions) > 0, expected, name, value)
        for position in positions:
            require(is_whole(position, 0), expected, name, value)
        function = name_of_class(function) if isinstance(function, type) else function
        is_own = function.startswith("fewbit.")
        require(not is_own, "Functions that fewbit does not define", name, function)
        found[function] = list(positions)
    return found


def check_verbose(verbose, name: str = "verbose") -> None:
    """Raise InputError unless `verbose` is True or False, or 1 or 0."""
    require(isinstance(verbose, int) and verbose in (0, 1), "True or False", name, verbose)


def require(is_good: bool, expected: str, name: str, value):
    """Return the field's `value`. Raise InputError if `is_good` is False."""
    if not is_good:
        raise InputError(f"{name}: expected {expected}, got {shorten(value)}")
    return value


def is_whole(value, least: int, most: float = math.inf) -> bool:
    """Return whether `value` is a whole number from `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
