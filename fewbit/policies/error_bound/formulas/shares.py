"""Arithmetic that all error bounds share: the gradient error that is allowed, and checks of values.

Values are floats, or float64 tensors with one value for each channel. Functions return the kind that they were given.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fewbit.errors import InputError


def tolerance(e2: float, v2: float) -> float:
    """Return e2 V2, the squared gradient error that is allowed by (6) of AC-GC.

    Args:
        e2: the relative error that is allowed.
        v2: the squared norm of the exact gradient.

    Returns:
        The product; 0 if either factor is 0.

    Raises:
        InputError: a factor is negative.
    """
    e2, v2 = square("e2", e2), square("v2", v2)
    return e2 * v2 if e2 and v2 else 0.0


def square(name: str, value: float) -> float:
    """Return a number as a float. Raise InputError if it is below 0."""
    value = float(value)
    if not value >= 0:
        raise InputError(f"expected {name} of 0 or more, got {value}")
    return value


def squares(name: str, value) -> float | Tensor:
    """Return a number as a float, or a vector in float64. Raise InputError for entries below 0 and other shapes."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return square(name, value)
    value = value.detach().double()
    if value.dim() != 1 or not (value >= 0).all():
        raise InputError(f"expected {name} as one number or a vector, of 0 or more, got {value}")
    return value


def whole(name: str, value: int, least: int = 1) -> int:
    """Return an integer. Raise InputError if it is none, or below `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"expected an integer of {least} or more for {name}, got {value!r}")
    return value


def quotient(allowed: float, cost) -> float | Tensor:
    """Return allowed / cost: infinite if the cost is 0, because errors then do not matter; 0 if it is infinite."""
    if isinstance(cost, Tensor):
        infinite = torch.full_like(cost, math.inf)
        return torch.where(cost > 0, allowed / cost, infinite).masked_fill(cost == math.inf, 0.0)
    if cost == math.inf:
        return 0.0
    return allowed / cost if cost > 0 else math.inf


def root(value) -> float | Tensor:
    """Return the square root of a float or of a tensor's elements."""
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)


def polynomial_error(allowed: float, first, second) -> float | Tensor:
    """Return dx2 with (first dx + second dx2)^2 = allowed, where dx is its root.

    The formula loses no digits if `second` is small.

    Args:
        allowed: the squared gradient error that is allowed.
        first: the coefficient of dx, 0 or more; a float, or a tensor with one value for each channel.
        second: the coefficient of dx2, alike.

    Returns:
        dx2; infinite if both coefficients are 0.
    """
    target = math.sqrt(allowed)
    if target in (0.0, math.inf):
        return quotient(target, first + second)
    denominator = first + root(first * first + 4.0 * target * second)
    dx = quotient(2.0 * target, denominator)
    return dx * dx
