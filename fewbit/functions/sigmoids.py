"""Sigmoids, shrinkage, softplus and the identity."""

from __future__ import annotations

import math

import numpy as np

from fewbit.functions.erfcx import GAUSS_END, INV_SQRT_2PI, gauss, normal_tail
from fewbit.functions.function import Function, domain_around, make_function, named, require
from fewbit.functions.rectifiers import clamp


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x)), accurate down to the smallest subnormal number."""
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1.0 + e)


def _sigmoid_slope(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return e / (1.0 + e) ** 2


def _log1p_exp(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))


@named(module="Sigmoid")
def sigmoid() -> Function:
    """The function 1 / (1 + exp(-x))."""
    return make_function(
        _sigmoid,
        _sigmoid_slope,
        slopes=(0.0, 0.0),
        even=True,
        reference="torch.nn.Sigmoid",
    )


@named(module="Hardsigmoid")
def hardsigmoid() -> Function:
    """The function (x + 3) / 6, clipped to [0, 1]."""
    return make_function(
        lambda x: np.clip((x + 3.0) / 6.0, 0.0, 1.0),
        lambda x: np.where(np.abs(x) < 3.0, 1.0 / 6.0, 0.0),
        kinks=(-3.0, 3.0),
        slopes=(0.0, 0.0),
        even=True,
        reference="torch.nn.Hardsigmoid; Courbariaux et al., arXiv:1511.00363",
    )


@named(module="LogSigmoid")
def logsigmoid() -> Function:
    """The function log(sigmoid(x))."""
    return make_function(
        lambda x: -_log1p_exp(-x),
        lambda x: _sigmoid(-x),
        slopes=(1.0, 0.0),
        reference="torch.nn.LogSigmoid",
    )


@named(module="Laplace")
def laplace(mu: float = 0.707107, sigma: float = 0.282095) -> Function:
    """The normal distribution function with mean `mu` and standard deviation `sigma`."""
    require(sigma > 0.0, "laplace", "sigma > 0", sigma=sigma)

    def standard(x: np.ndarray) -> np.ndarray:
        return np.clip((x - mu) / sigma, -GAUSS_END, GAUSS_END)

    def value(x: np.ndarray) -> np.ndarray:
        z = standard(x)
        tail = normal_tail(-np.abs(z))
        return np.where(z > 0, 1.0 - tail, tail)

    return make_function(
        value,
        lambda x: INV_SQRT_2PI / sigma * gauss(standard(x)),
        slopes=(0.0, 0.0),
        domain=domain_around(reach=abs(mu) + 8.0 * sigma),
        even=mu == 0.0,
        reference="transformers laplace; Ma et al., arXiv:2209.10655",
    )


@named(module="Tanh")
def tanh() -> Function:
    """The hyperbolic tangent."""

    def derivative(x: np.ndarray) -> np.ndarray:
        e = np.exp(-np.abs(x))
        u = e * e
        return 4.0 * u / (1.0 + u) ** 2

    return make_function(
        np.tanh, derivative, slopes=(0.0, 0.0), even=True, reference="torch.nn.Tanh"
    )


@named(module="Hardtanh")
def hardtanh(min_val: float = -1.0, max_val: float = 1.0) -> Function:
    """The function x, clipped to [`min_val`, `max_val`]."""
    require(min_val < max_val, "hardtanh", "min_val < max_val", min_val=min_val, max_val=max_val)
    return clamp(min_val, max_val, "torch.nn.Hardtanh")


@named(module="Tanhshrink")
def tanhshrink() -> Function:
    """The function x - tanh(x)."""
    return make_function(
        lambda x: x - np.tanh(x),
        lambda x: np.tanh(x) ** 2,
        slopes=(1.0, 1.0),
        even=True,
        reference="torch.nn.Tanhshrink",
    )


@named(module="Hardshrink")
def hardshrink(lambd: float = 0.5) -> Function:
    """The function x for |x| > `lambd`, and 0 otherwise."""
    require(lambd >= 0.0, "hardshrink", "lambd >= 0", lambd=lambd)
    return make_function(
        lambda x: np.where(np.abs(x) > lambd, x, 0.0),
        lambda x: np.where(np.abs(x) > lambd, 1.0, 0.0),
        kinks=(-lambd, lambd),
        slopes=(1.0, 1.0),
        even=True,
        reference="torch.nn.Hardshrink",
    )


@named(module="Softshrink")
def softshrink(lambd: float = 0.5) -> Function:
    """The function x moved towards 0 by `lambd`, and 0 for |x| <= `lambd`."""
    require(lambd >= 0.0, "softshrink", "lambd >= 0", lambd=lambd)
    return make_function(
        lambda x: x - np.clip(x, -lambd, lambd),
        lambda x: np.where(np.abs(x) > lambd, 1.0, 0.0),
        kinks=(-lambd, lambd),
        slopes=(1.0, 1.0),
        even=True,
        reference="torch.nn.Softshrink",
    )


@named(module="Softsign")
def softsign() -> Function:
    """The function x / (1 + |x|)."""

    def value(x: np.ndarray) -> np.ndarray:
        x = np.clip(x, -1e18, 1e18)  # the result is already -1 or 1 there; inf / inf would be nan
        return x / (1.0 + np.abs(x))

    return make_function(
        value,
        lambda x: (1.0 / (1.0 + np.abs(x))) ** 2,
        kinks=(0.0,),
        slopes=(0.0, 0.0),
        even=True,
        reference="torch.nn.Softsign; Turian et al., NAACL 2009",
    )


@named(module="Softplus")
def softplus(beta: float = 1.0, threshold: float = 20.0) -> Function:
    """The function x if `beta` * x > `threshold`, and log(1 + exp(`beta` * x)) / `beta` otherwise."""
    require(beta > 0.0, "softplus", "beta > 0", beta=beta)
    switch = _last_below(threshold, beta)
    return make_function(
        lambda x: np.where(x > switch, x, _log1p_exp(beta * x) / beta),
        lambda x: np.where(x > switch, 1.0, _sigmoid(beta * x)),
        kinks=(switch,),
        slopes=(0.0, 1.0),
        # The switch to x is numerical (at 20 it changes f' by 2e-9), so it does not widen the domain.
        domain=domain_around(reach=10.0 / beta),
        reference="torch.nn.Softplus; Dugas et al., NIPS 2000",
    )


def _last_below(threshold: float, beta: float) -> float:
    """Return the largest x for which beta * x > threshold is false."""
    x = threshold / beta
    near = (math.nextafter(x, -math.inf), x, math.nextafter(x, math.inf))
    return max((c for c in near if beta * c <= threshold), default=x)


@named(module="SqrtSoftplus")
def sqrtsoftplus() -> Function:
    """The function sqrt(softplus(x)), which is sqrt(x) for x > 20, as with torch's softplus.

    For x < 0 the factor e^(x / 2) is taken out of the root: softplus(x) underflows below -745, its root only below -1490.
    """

    def lower(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return e^x, e^(x / 2) and sqrt(softplus(x)) / e^(x / 2), for x <= 0."""
        e = np.exp(x)
        ratio = np.log1p(np.maximum(e, 1e-300)) / np.maximum(e, 1e-300)
        return e, np.exp(0.5 * x), np.sqrt(ratio)

    def upper(x: np.ndarray) -> np.ndarray:
        return np.sqrt(np.where(x > 20.0, x, _log1p_exp(np.clip(x, 0.0, 20.0))))

    def value(x: np.ndarray) -> np.ndarray:
        _, half, ratio = lower(np.minimum(x, 0.0))
        return np.where(x < 0, half * ratio, upper(x))

    def derivative(x: np.ndarray) -> np.ndarray:
        e, half, ratio = lower(np.minimum(x, 0.0))
        below = 0.5 * half / ((1.0 + e) * ratio)
        above = 0.5 * np.where(x > 20.0, 1.0, _sigmoid(x)) / upper(x)
        return np.where(x < 0, below, above)

    return make_function(
        value,
        derivative,
        kinks=(20.0,),
        slopes=(0.0, 0.0),
        domain=domain_around(),  # as in softplus, the switch does not widen the domain
        reference="transformers sqrtsoftplus",
    )


@named(module=None)
def identity() -> Function:
    """The identity, f(x) = x."""
    return make_function(
        lambda x: x,
        np.ones_like,
        slopes=(1.0, 1.0),
        even=True,
        reference="torch.nn.Identity",
    )
