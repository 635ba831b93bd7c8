"""ReLU and its variants, and exponential linear units."""

from __future__ import annotations

import math

import numpy as np

from fewbit.functions.function import Function, domain_around, make_function, named, require

_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


def _scaled(slope: float, x: np.ndarray) -> np.ndarray:
    """Return slope * x, and 0 for an infinite x if the slope is 0."""
    return slope * x if slope else np.zeros_like(x)


def _two_slopes(slope: float, reference: str) -> Function:
    return make_function(
        lambda x: np.where(x > 0, x, _scaled(slope, x)),
        lambda x: np.where(x > 0, 1.0, slope),
        kinks=(0.0,),
        slopes=(slope, 1.0),
        reference=reference,
    )


def clamp(low: float, high: float, reference: str) -> Function:
    """The function x, clipped to [low, high]."""
    return make_function(
        lambda x: np.clip(x, low, high),
        lambda x: np.where((x > low) & (x < high), 1.0, 0.0),
        kinks=(low, high),
        slopes=(0.0, 0.0),
        even=low == -high,
        reference=reference,
    )


@named(module="ReLU")
def relu() -> Function:
    """The function max(x, 0)."""
    return _two_slopes(0.0, "torch.nn.ReLU; Nair and Hinton, ICML 2010")


@named(module="ReLU6")
def relu6() -> Function:
    """The function x, clipped to [0, 6]."""
    return clamp(0.0, 6.0, "torch.nn.ReLU6; Krizhevsky, 2010")


@named(module="LeakyReLU")
def leaky_relu(negative_slope: float = 0.01) -> Function:
    """The function x for x > 0, and `negative_slope` * x otherwise."""
    return _two_slopes(negative_slope, "torch.nn.LeakyReLU; Maas, Hannun and Ng, ICML 2013")


@named(module="RReLU")
def rrelu(lower: float = 1.0 / 8.0, upper: float = 1.0 / 3.0) -> Function:
    """The randomized ReLU in evaluation mode, whose slope for x < 0 is the mean of `lower` and `upper`."""
    require(lower <= upper, "rrelu", "lower <= upper", lower=lower, upper=upper)
    return _two_slopes(
        (lower + upper) / 2.0, "torch.nn.RReLU in evaluation mode; Xu et al., arXiv:1505.00853"
    )


@named(module="Threshold")
def threshold(threshold: float = 0.0, value: float = 0.0) -> Function:
    """The function x for x > `threshold`, and `value` otherwise."""
    return make_function(
        lambda x: np.where(x > threshold, x, value),
        lambda x: np.where(x > threshold, 1.0, 0.0),
        kinks=(threshold,),
        slopes=(0.0, 1.0),
        reference="torch.nn.Threshold",
    )


@named(module="ReLUSquared")
def relu_squared() -> Function:
    """The function max(x, 0)**2."""
    return make_function(
        lambda x: np.maximum(x, 0.0) ** 2,
        lambda x: 2.0 * np.maximum(x, 0.0),
        kinks=(0.0,),
        slopes=(0.0, math.inf),
        reference="transformers relu2; So et al., arXiv:2109.08668",
    )


@named(module="ELU")
def elu(alpha: float = 1.0) -> Function:
    """The function x for x > 0, and `alpha` * (exp(x) - 1) otherwise."""
    return make_function(
        lambda x: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0.0))),
        lambda x: np.where(x > 0, 1.0, alpha * np.exp(np.minimum(x, 0.0))),
        kinks=(0.0,),
        slopes=(0.0, 1.0),
        reference="torch.nn.ELU; Clevert et al., arXiv:1511.07289",
    )


@named(module="CELU")
def celu(alpha: float = 1.0) -> Function:
    """The function x for x > 0, and `alpha` * (exp(x / `alpha`) - 1) otherwise."""
    # torch also accepts a negative alpha. For x < 0 f' is then exp(|x / alpha|), so f is useless as an activation.
    require(alpha > 0.0, "celu", "alpha > 0", alpha=alpha)
    return make_function(
        lambda x: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0.0) / alpha)),
        lambda x: np.where(x > 0, 1.0, np.exp(np.minimum(x, 0.0) / alpha)),
        kinks=(0.0,),
        slopes=(0.0, 1.0),
        domain=domain_around(reach=10.0 * alpha),
        reference="torch.nn.CELU; Barron, arXiv:1704.07483",
    )


@named(module="SELU")
def selu() -> Function:
    """A scaled `elu`, with the two constants of self-normalizing networks."""
    left = _SELU_SCALE * _SELU_ALPHA
    return make_function(
        lambda x: np.where(x > 0, _SELU_SCALE * x, left * np.expm1(np.minimum(x, 0.0))),
        lambda x: np.where(x > 0, _SELU_SCALE, left * np.exp(np.minimum(x, 0.0))),
        kinks=(0.0,),
        slopes=(0.0, _SELU_SCALE),
        reference="torch.nn.SELU; Klambauer et al., arXiv:1706.02515",
    )
