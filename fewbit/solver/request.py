"""Determine the number of levels and the domain of a requested table."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fewbit.errors import SolveError
from fewbit.printable import shorten
from fewbit.sizes import counted
from fewbit.table import FORMS, OBJECTIVES, TAILS
from fewbit.table.checks import NARROWEST

_FARTHEST = 1e30
_LEAST_WIDTH = float(np.finfo(np.float32).tiny)


def count_levels(bits, levels):
    """Return the largest number of levels and the number of bits of a table.

    `bits` is 1 to 8, or None for as few as `levels` needs; `levels` is 2 to 256, or None for 2**bits. Raises SolveError for others.
    """
    if bits is None and levels is None:
        raise SolveError("bits: expected 1 to 8 (or levels from 2 to 256), got neither")
    if bits is not None and not (is_integer(bits) and 1 <= bits <= 8):
        raise SolveError(f"bits: expected an integer from 1 to 8, got {bits!r}")
    if levels is None:
        return 2**bits, int(bits)
    if not (is_integer(levels) and 2 <= levels <= 256):
        raise SolveError(f"levels: expected an integer from 2 to 256, got {levels!r}")
    needed = int(levels - 1).bit_length()
    if bits is not None and bits < needed:
        raise SolveError(
            f"levels: expected at most {2**bits} with {counted(bits, 'bit')}, got {levels}"
        )
    return int(levels), int(bits) if bits is not None else needed


def check_choice(name, value, choices):
    """Raise SolveError if the argument `name` is not in `choices`."""
    if not (isinstance(value, str) and value in choices):
        raise SolveError(f"{name}: expected {' or '.join(choices)}, got {value!r}")


def check_request(form, objective, tails, parameters):
    """Raise SolveError if form, objective or tails is unknown, or `parameters` is no mapping."""
    check_choice("form", form, FORMS)
    check_choice("objective", objective, OBJECTIVES)
    check_choice("tails", tails, TAILS)
    if parameters is not None and not isinstance(parameters, Mapping):
        raise SolveError(f"parameters: expected a mapping of names to numbers, got {parameters!r}")


def is_integer(value):
    """Return whether the value is an integer, and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def checked_domain(domain):
    """Return a domain as two floats, or None. Raise SolveError if it is invalid."""
    if domain is None:
        return None
    try:
        low, high = (float(end) for end in domain)
    except (TypeError, ValueError, OverflowError):
        raise SolveError(f"domain: expected two numbers A < B, got {shorten(domain)}") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise SolveError(f"domain: expected two finite numbers A < B, got {low:g} {high:g}")
    problem = check_extent(low, high)
    if problem:
        raise SolveError(f"domain: {problem}")
    return low, high


def check_extent(low, high):
    """Return what is wrong with the interval as a domain, or None."""
    if max(-low, high) > _FARTHEST:
        return f"expected numbers within {_FARTHEST:g}, got {low:g} to {high:g}"
    # Quadrature and plots need floats between the ends.
    least = max(NARROWEST * max(-low, high), _LEAST_WIDTH)
    if not high - low >= least:
        return f"expected a range that is at least {least:.3g} wide, got {low:.17g} to {high:.17g}"
    return None


def domain_of(f, weight, asked):
    """Return the domain of a table: the one `asked` for, else the weight's, else the function's.

    The function's domain is extended to 8 standard deviations around the mean of a normal weight, and to the largest standard
    deviation around 0 for the weight "scales".

    Raises:
        SolveError: The solver cannot use the domain of the function or the weight.
    """
    if asked is not None:
        return tuple(asked)
    if weight.domain is not None:
        return weight.domain
    low, high = f.domain
    document = weight.document()
    if document["kind"] == "scales":
        low, high = min(low, -document["high"]), max(high, document["high"])
    if document["kind"] == "normal":
        mean, reach = document["mean"], 8 * document["std"]
        low, high = min(low, mean - reach), max(high, mean + reach)
    problem = check_extent(float(low), float(high))
    if problem:
        raise SolveError(f"domain of {f.name} and the weight: {problem}; give a domain")
    return float(low), float(high)
