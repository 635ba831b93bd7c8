"""What all error bounds have in common: the gradient error that is allowed, and its equal shares.

Values are floats, or float64 tensors of one value a channel; both kinds come back as what they were.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fewbit.errors import InputError


def tolerance(e2: float, v2: float) -> float:
    """e2 V2, the squared gradient error that is allowed: (6) of AC-GC; 0 where one of them is. InputError below 0."""
    e2, v2 = square("e2", e2), square("v2", v2)
    return e2 * v2 if e2 and v2 else 0.0


def square(name: str, value: float) -> float:
    """A number of 0 or more, as a float; InputError otherwise."""
    value = float(value)
    if not value >= 0:
        raise InputError(f"expected {name} of 0 or more, got {value}")
    return value


def squares(name: str, value) -> float | Tensor:
    """A number of 0 or more, or a vector of such, which comes back in float64; InputError otherwise."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return square(name, value)
    value = value.detach().double()
    if value.dim() != 1 or not (value >= 0).all():
        raise InputError(f"expected {name} as one number or a vector, of 0 or more, got {value}")
    return value


def whole(name: str, value: int, least: int = 1) -> int:
    """An integer of at least `least`; InputError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"expected an integer of {least} or more for {name}, got {value!r}")
    return value


def quotient(allowed: float, cost) -> float | Tensor:
    """allowed / cost; infinite where cost is 0, as nothing that is kept matters there; 0 where cost is infinite."""
    if isinstance(cost, Tensor):
        infinite = torch.full_like(cost, math.inf)
        return torch.where(cost > 0, allowed / cost, infinite).masked_fill(cost == math.inf, 0.0)
    if cost == math.inf:
        return 0.0
    return allowed / cost if cost > 0 else math.inf


def root(value) -> float | Tensor:
    """The square root of a float or of a tensor's elements."""
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)


def polynomial_error(allowed: float, first, second) -> float | Tensor:
    """dx2 with (first dx + second dx2)^2 = allowed, dx being its root; infinite where both are 0.

    first, second: 0 or more. In the form that loses no digits where second is small.
    """
    target = math.sqrt(allowed)
    if target in (0.0, math.inf):
        return quotient(target, first + second)
    denominator = first + root(first * first + 4.0 * target * second)
    dx = quotient(2.0 * target, denominator)
    return dx * dx
