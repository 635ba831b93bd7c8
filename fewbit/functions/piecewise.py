"""Piecewise linear and piecewise quadratic functions: ReLU and its variants, hard sigmoids, shrinkage."""

from __future__ import annotations

import math

import numpy as np

from fewbit.functions.function import Function, make_function, require


def _scaled(slope: float, x: np.ndarray) -> np.ndarray:
    """Return slope * x, and 0 for an infinite x if the slope is 0."""
    return slope * x if slope else np.zeros_like(x)


def identity() -> Function:
    """Return the identity, f(x) = x."""
    return make_function(
        lambda x: x,
        np.ones_like,
        slopes=(1.0, 1.0),
        even=True,
        reference="torch.nn.Identity",
    )


def _two_slopes(slope: float, reference: str) -> Function:
    """Return the function that is x for x > 0 and slope * x otherwise."""
    return make_function(
        lambda x: np.where(x > 0, x, _scaled(slope, x)),
        lambda x: np.where(x > 0, 1.0, slope),
        kinks=(0.0,),
        slopes=(slope, 1.0),
        reference=reference,
    )


def relu() -> Function:
    """Return max(x, 0)."""
    return _two_slopes(0.0, "torch.nn.ReLU; Nair and Hinton, ICML 2010")


def leaky_relu(negative_slope: float = 0.01) -> Function:
    """Return x for x > 0, `negative_slope` x otherwise."""
    return _two_slopes(negative_slope, "torch.nn.LeakyReLU; Maas, Hannun and Ng, ICML 2013")


def rrelu(lower: float = 1.0 / 8.0, upper: float = 1.0 / 3.0) -> Function:
    """Return the randomized ReLU of evaluation mode, whose negative slope is the mean of its bounds."""
    require(lower <= upper, "rrelu", "lower <= upper", lower=lower, upper=upper)
    return _two_slopes(
        (lower + upper) / 2.0, "torch.nn.RReLU in evaluation mode; Xu et al., arXiv:1505.00853"
    )


def threshold(threshold: float = 0.0, value: float = 0.0) -> Function:
    """Return x for x > `threshold`, `value` otherwise."""
    return make_function(
        lambda x: np.where(x > threshold, x, value),
        lambda x: np.where(x > threshold, 1.0, 0.0),
        kinks=(threshold,),
        slopes=(0.0, 1.0),
        reference="torch.nn.Threshold",
    )


def _clamp(low: float, high: float, reference: str) -> Function:
    """Return the function that clips x to [low, high]."""
    return make_function(
        lambda x: np.clip(x, low, high),
        lambda x: np.where((x > low) & (x < high), 1.0, 0.0),
        kinks=(low, high),
        slopes=(0.0, 0.0),
        even=low == -high,
        reference=reference,
    )


def relu6() -> Function:
    """Return x clipped to [0, 6]."""
    return _clamp(0.0, 6.0, "torch.nn.ReLU6; Krizhevsky, 2010")


def hardtanh(min_val: float = -1.0, max_val: float = 1.0) -> Function:
    """Return x clipped to [`min_val`, `max_val`]."""
    require(min_val < max_val, "hardtanh", "min_val < max_val", min_val=min_val, max_val=max_val)
    return _clamp(min_val, max_val, "torch.nn.Hardtanh")


def hardsigmoid() -> Function:
    """Return (x + 3) / 6 clipped to [0, 1]."""
    return make_function(
        lambda x: np.clip((x + 3.0) / 6.0, 0.0, 1.0),
        lambda x: np.where(np.abs(x) < 3.0, 1.0 / 6.0, 0.0),
        kinks=(-3.0, 3.0),
        slopes=(0.0, 0.0),
        even=True,
        reference="torch.nn.Hardsigmoid; Courbariaux et al., arXiv:1511.00363",
    )


def hardshrink(lambd: float = 0.5) -> Function:
    """Return x for |x| > `lambd`, 0 otherwise."""
    require(lambd >= 0.0, "hardshrink", "lambd >= 0", lambd=lambd)
    return make_function(
        lambda x: np.where(np.abs(x) > lambd, x, 0.0),
        lambda x: np.where(np.abs(x) > lambd, 1.0, 0.0),
        kinks=(-lambd, lambd),
        slopes=(1.0, 1.0),
        even=True,
        reference="torch.nn.Hardshrink",
    )


def softshrink(lambd: float = 0.5) -> Function:
    """Return x moved towards 0 by `lambd`, and 0 for |x| <= `lambd`."""
    require(lambd >= 0.0, "softshrink", "lambd >= 0", lambd=lambd)
    return make_function(
        lambda x: x - np.clip(x, -lambd, lambd),
        lambda x: np.where(np.abs(x) > lambd, 1.0, 0.0),
        kinks=(-lambd, lambd),
        slopes=(1.0, 1.0),
        even=True,
        reference="torch.nn.Softshrink",
    )


def hardswish() -> Function:
    """Return x times `hardsigmoid`."""

    def value(x: np.ndarray) -> np.ndarray:
        inner = np.clip(x, -3.0, 3.0)
        return np.where(x > 3.0, x, inner * (inner + 3.0) / 6.0)

    def derivative(x: np.ndarray) -> np.ndarray:
        inner = np.clip(x, -3.0, 3.0)
        return np.where(x <= -3.0, 0.0, np.where(x >= 3.0, 1.0, (2.0 * inner + 3.0) / 6.0))

    return make_function(
        value,
        derivative,
        kinks=(-3.0, 3.0),
        slopes=(0.0, 1.0),
        reference="torch.nn.Hardswish; Howard et al., arXiv:1905.02244",
    )


def relu_squared() -> Function:
    """Return max(x, 0)**2."""
    return make_function(
        lambda x: np.maximum(x, 0.0) ** 2,
        lambda x: 2.0 * np.maximum(x, 0.0),
        kinks=(0.0,),
        slopes=(0.0, math.inf),
        reference="transformers relu2; So et al., arXiv:2109.08668",
    )
