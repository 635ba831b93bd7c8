"""Functions f(x) = x g(x) with a gate g between 0 and 1: GELU, SiLU and similar functions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fewbit.functions.erfcx import GAUSS_END, INV_SQRT_2PI, SQRT_HALF, erfcx, gauss, normal_tail
from fewbit.functions.function import Function, make_function, named

# exp(-t) underflows to zero beyond this t, and so do its products in the formulas below.
_EXP_END = 800.0


def _gated(
    lower: Callable[[np.ndarray], np.ndarray], lower_slope: Callable[[np.ndarray], np.ndarray]
) -> tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]:
    """Return f and f' from their formulas for x <= 0, if g(-x) = 1 - g(x): f(x) = x + f(-x) and f'(x) = 1 - f'(-x)."""

    def value(x: np.ndarray) -> np.ndarray:
        return np.maximum(x, 0.0) + lower(-np.abs(x))

    def derivative(x: np.ndarray) -> np.ndarray:
        slope = lower_slope(-np.abs(x))
        return np.where(x > 0, 1.0 - slope, slope)

    return value, derivative


def _gated_function(
    lower: Callable[[np.ndarray], np.ndarray],
    lower_slope: Callable[[np.ndarray], np.ndarray],
    reference: str,
) -> Function:
    return make_function(*_gated(lower, lower_slope), slopes=(0.0, 1.0), reference=reference)


def _gelu_lower(x: np.ndarray) -> np.ndarray:
    x = np.maximum(x, -GAUSS_END)
    return x * normal_tail(x)


def _gelu_lower_slope(x: np.ndarray) -> np.ndarray:
    x = np.maximum(x, -GAUSS_END)
    return (0.5 * erfcx(-SQRT_HALF * x) + INV_SQRT_2PI * x) * gauss(x)


@named(module="GELU")
def gelu() -> Function:
    """The function x times the standard normal distribution function."""
    return _gated_function(
        _gelu_lower, _gelu_lower_slope, "torch.nn.GELU; Hendrycks and Gimpel, arXiv:1606.08415"
    )


def _tanh_gelu(scale: float, reference: str) -> Function:
    """Return x (1 + tanh(u)) / 2 = x sigmoid(2 u), with u = scale (x + 0.044715 x**3)."""

    def gate(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = np.maximum(x, -30.0)  # sigmoid(2 u) underflows at -21.6
        return x, np.exp(2.0 * scale * x * (1.0 + 0.044715 * x * x))

    def lower(x: np.ndarray) -> np.ndarray:
        x, e = gate(x)
        return x * e / (1.0 + e)

    def lower_slope(x: np.ndarray) -> np.ndarray:
        x, e = gate(x)
        return e / (1.0 + e) * (1.0 + 2.0 * scale * x * (1.0 + 0.134145 * x * x) / (1.0 + e))

    return _gated_function(lower, lower_slope, reference)


@named(module=None)
def gelu_tanh() -> Function:
    """Torch's approximation of `gelu` by tanh."""
    return _tanh_gelu(
        math.sqrt(2.0 / math.pi),
        "torch.nn.GELU(approximate='tanh'); Hendrycks and Gimpel, arXiv:1606.08415",
    )


@named(module="FastGELU")
def gelu_fast() -> Function:
    """The function `gelu_tanh` with sqrt(2 / pi) rounded to ten digits, which changes f' by up to 1e-12."""
    return _tanh_gelu(0.7978845608, "transformers gelu_fast; github.com/hendrycks/GELUs")


@named(module="ClippedGELU")
def gelu_10() -> Function:
    """The function `gelu`, clipped to [-10, 10]."""
    value, derivative = _gated(_gelu_lower, _gelu_lower_slope)
    return make_function(
        lambda x: np.minimum(value(x), 10.0),  # gelu is never as low as -10
        lambda x: np.where(x > 10.0, 0.0, derivative(x)),
        kinks=(10.0,),  # gelu(x) is 10 at 10 + 1e-22, which float64 rounds to 10
        slopes=(0.0, 0.0),
        reference="transformers gelu_10; Wu et al., arXiv:2004.09602",
    )


def _silu_lower(x: np.ndarray) -> np.ndarray:
    x = np.maximum(x, -_EXP_END)
    e = np.exp(x)
    return x * e / (1.0 + e)


def _silu_lower_slope(x: np.ndarray) -> np.ndarray:
    x = np.maximum(x, -_EXP_END)
    e = np.exp(x)
    return e / (1.0 + e) * (1.0 + x / (1.0 + e))


@named(module="QuickGELU")
def quick_gelu() -> Function:
    """The function x sigmoid(1.702 x)."""
    return _gated_function(
        lambda x: _silu_lower(1.702 * np.maximum(x, -_EXP_END)) / 1.702,
        lambda x: _silu_lower_slope(1.702 * np.maximum(x, -_EXP_END)),
        "transformers quick_gelu; github.com/hendrycks/GELUs",
    )


@named(module="SiLU")
def silu() -> Function:
    """The function x sigmoid(x)."""
    return _gated_function(
        _silu_lower, _silu_lower_slope, "torch.nn.SiLU; Elfwing et al., arXiv:1702.03118"
    )


@named(module="Hardswish")
def hardswish() -> Function:
    """The function x hardsigmoid(x)."""

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


@named(module="Mish")
def mish() -> Function:
    """The function x t(x), with t = tanh(log(1 + w)) = w (w + 2) / (w (w + 2) + 2) and w = e^x; 1 / w for x > 0, against overflow."""

    def gate(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        e = np.exp(-np.abs(x))
        below = e * (e + 2.0) + 2.0
        above = 1.0 + 2.0 * e * (1.0 + e)
        t = np.where(x < 0, e * (e + 2.0) / below, (1.0 + 2.0 * e) / above)
        slope = np.where(x < 0, 4.0 * e * (1.0 + e) / below**2, 4.0 * e * e * (1.0 + e) / above**2)
        return t, slope

    def value(x: np.ndarray) -> np.ndarray:
        t, _ = gate(x)
        return np.maximum(x, -_EXP_END) * t

    def derivative(x: np.ndarray) -> np.ndarray:
        t, slope = gate(x)
        return t + np.clip(x, -_EXP_END, _EXP_END) * slope

    return make_function(
        value,
        derivative,
        slopes=(0.0, 1.0),
        reference="torch.nn.Mish; Misra, arXiv:1908.08681",
    )
