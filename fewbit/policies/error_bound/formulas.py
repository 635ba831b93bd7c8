"""The largest error of a saved tensor within AC-GC's bound e2 V^2 (docs/concepts/theory/ac_gc.md)."""

from __future__ import annotations

import math

from fewbit.errors import InputError


def tolerance(e2: float, v2: float) -> float:
    """Return e2 V^2, which AC-GC's formula (6) allows as a squared gradient error; 0 if a factor is 0."""
    e2, v2 = square("e2", e2), square("v2", v2)
    return e2 * v2 if e2 and v2 else 0.0


def square(name: str, value: float) -> float:
    """Return the value as a float. Raise InputError if it is negative or NaN."""
    value = float(value)
    if not value >= 0:
        raise InputError(f"expected {name} of 0 or more, got {value}")
    return value


def quotient(allowed: float, cost: float) -> float:
    """Return allowed / cost; infinity if `cost` is 0."""
    if cost == math.inf:
        return 0.0
    return allowed / cost if cost > 0 else math.inf


def polynomial_error(allowed: float, first: float, second: float) -> float:
    """Solve (first dx + second dx^2)^2 = allowed for dx, and return dx^2; infinity if both coefficients are 0."""
    target = math.sqrt(allowed)
    if target in (0.0, math.inf):
        return quotient(target, first + second)
    dx = quotient(2.0 * target, first + math.sqrt(first * first + 4.0 * target * second))
    return dx * dx
