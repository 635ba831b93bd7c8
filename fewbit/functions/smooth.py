"""Functions with exponentials: exponential linear units, gated functions, sigmoids, softplus."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fewbit.functions.erfcx import erfcx
from fewbit.functions.function import Function, domain_around, make_function, require

# exp(-t) underflows to zero beyond this t, and so do its products in the formulas below.
_EXP_END = 800.0
# exp(-t**2 / 2) underflows to zero beyond this t.
_GAUSS_END = 40.0
_SQRT_HALF = math.sqrt(0.5)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x)), accurate down to the smallest subnormal number."""
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1.0 + e)


def _sigmoid_slope(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return e / (1.0 + e) ** 2


def _log1p_exp(x: np.ndarray) -> np.ndarray:
    """Return log(1 + exp(x))."""
    return np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))


def _gauss(x: np.ndarray) -> np.ndarray:
    """Return exp(-x**2 / 2) for |x| <= 40.

    Rounding x**2 would cause a relative error of up to 1e-13 at large |x|. `head` has at most 18 bits, so head**2 and
    x - head are exact.
    """
    head = np.rint(x * 4096.0) / 4096.0
    return np.exp(-0.5 * head * head) * np.exp(-0.5 * (x - head) * (x + head))


def _normal_tail(x: np.ndarray) -> np.ndarray:
    """Return the normal distribution function at x, for -40 <= x <= 0."""
    return 0.5 * erfcx(-_SQRT_HALF * x) * _gauss(x)


def _gated(
    lower: Callable[[np.ndarray], np.ndarray], lower_slope: Callable[[np.ndarray], np.ndarray]
) -> tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]:
    """Return f and f' of f(x) = x g(x) with g(-x) = 1 - g(x), from formulas for x <= 0.

    For x > 0 it uses f(x) = x + f(-x) and f'(x) = 1 - f'(-x), which lose no accuracy.
    """

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
    """Return the function that `_gated` describes, with slopes 0 and 1."""
    return make_function(*_gated(lower, lower_slope), slopes=(0.0, 1.0), reference=reference)


def elu(alpha: float = 1.0) -> Function:
    """Return x for x > 0, `alpha` (exp(x) - 1) otherwise."""
    return make_function(
        lambda x: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0.0))),
        lambda x: np.where(x > 0, 1.0, alpha * np.exp(np.minimum(x, 0.0))),
        kinks=(0.0,),
        slopes=(0.0, 1.0),
        reference="torch.nn.ELU; Clevert et al., arXiv:1511.07289",
    )


def celu(alpha: float = 1.0) -> Function:
    """Return x for x > 0, `alpha` (exp(x / `alpha`) - 1) otherwise."""
    # torch also accepts a negative alpha. f' is then exp(|x / alpha|), which is useless as an activation.
    require(alpha > 0.0, "celu", "alpha > 0", alpha=alpha)
    return make_function(
        lambda x: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0.0) / alpha)),
        lambda x: np.where(x > 0, 1.0, np.exp(np.minimum(x, 0.0) / alpha)),
        kinks=(0.0,),
        slopes=(0.0, 1.0),
        domain=domain_around(reach=10.0 * alpha),
        reference="torch.nn.CELU; Barron, arXiv:1704.07483",
    )


def selu() -> Function:
    """Return a scaled `elu` with the constants of self-normalizing networks."""
    left = _SELU_SCALE * _SELU_ALPHA
    return make_function(
        lambda x: np.where(x > 0, _SELU_SCALE * x, left * np.expm1(np.minimum(x, 0.0))),
        lambda x: np.where(x > 0, _SELU_SCALE, left * np.exp(np.minimum(x, 0.0))),
        kinks=(0.0,),
        slopes=(0.0, _SELU_SCALE),
        reference="torch.nn.SELU; Klambauer et al., arXiv:1706.02515",
    )


def _gelu_lower(x: np.ndarray) -> np.ndarray:
    x = np.maximum(x, -_GAUSS_END)
    return x * _normal_tail(x)


def _gelu_lower_slope(x: np.ndarray) -> np.ndarray:
    x = np.maximum(x, -_GAUSS_END)
    return (0.5 * erfcx(-_SQRT_HALF * x) + _INV_SQRT_2PI * x) * _gauss(x)


def gelu() -> Function:
    """Return x times the normal distribution function."""
    return _gated_function(
        _gelu_lower, _gelu_lower_slope, "torch.nn.GELU; Hendrycks and Gimpel, arXiv:1606.08415"
    )


def gelu_10() -> Function:
    """Return `gelu` clipped to [-10, 10]."""
    value, derivative = _gated(_gelu_lower, _gelu_lower_slope)
    return make_function(
        lambda x: np.minimum(value(x), 10.0),  # gelu is never as low as -10
        lambda x: np.where(x > 10.0, 0.0, derivative(x)),
        kinks=(10.0,),  # gelu(x) is 10 at 10 + 1e-22, which float64 rounds to 10
        slopes=(0.0, 0.0),
        reference="transformers gelu_10; Wu et al., arXiv:2004.09602",
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


def gelu_tanh() -> Function:
    """Return torch's approximation of `gelu` by tanh."""
    return _tanh_gelu(
        math.sqrt(2.0 / math.pi),
        "torch.nn.GELU(approximate='tanh'); Hendrycks and Gimpel, arXiv:1606.08415",
    )


def gelu_fast() -> Function:
    """Return `gelu_tanh` with sqrt(2 / pi) rounded to ten digits, which changes f' by up to 1e-12."""
    return _tanh_gelu(0.7978845608, "transformers gelu_fast; github.com/hendrycks/GELUs")


def _silu_lower(x: np.ndarray) -> np.ndarray:
    x = np.maximum(x, -_EXP_END)
    e = np.exp(x)
    return x * e / (1.0 + e)


def _silu_lower_slope(x: np.ndarray) -> np.ndarray:
    x = np.maximum(x, -_EXP_END)
    e = np.exp(x)
    return e / (1.0 + e) * (1.0 + x / (1.0 + e))


def silu() -> Function:
    """Return x sigmoid(x)."""
    return _gated_function(
        _silu_lower, _silu_lower_slope, "torch.nn.SiLU; Elfwing et al., arXiv:1702.03118"
    )


def quick_gelu() -> Function:
    """Return x sigmoid(1.702 x)."""
    return _gated_function(
        lambda x: _silu_lower(1.702 * np.maximum(x, -_EXP_END)) / 1.702,
        lambda x: _silu_lower_slope(1.702 * np.maximum(x, -_EXP_END)),
        "transformers quick_gelu; github.com/hendrycks/GELUs",
    )


def mish() -> Function:
    """Return x t with t = tanh(log(1 + e^x)) = w (w + 2) / (w (w + 2) + 2), w = e^x.

    For x > 0 the formulas use 1 / w, so that no exponential overflows.
    """

    def gate(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return t and its derivative."""
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


def sigmoid() -> Function:
    """Return 1 / (1 + exp(-x))."""
    return make_function(
        _sigmoid,
        _sigmoid_slope,
        slopes=(0.0, 0.0),
        even=True,
        reference="torch.nn.Sigmoid",
    )


def logsigmoid() -> Function:
    """Return log(sigmoid(x))."""
    return make_function(
        lambda x: -_log1p_exp(-x),
        lambda x: _sigmoid(-x),
        slopes=(1.0, 0.0),
        reference="torch.nn.LogSigmoid",
    )


def tanh() -> Function:
    """Return the hyperbolic tangent."""

    def derivative(x: np.ndarray) -> np.ndarray:
        e = np.exp(-np.abs(x))
        u = e * e
        return 4.0 * u / (1.0 + u) ** 2

    return make_function(
        np.tanh, derivative, slopes=(0.0, 0.0), even=True, reference="torch.nn.Tanh"
    )


def tanhshrink() -> Function:
    """Return x - tanh(x)."""
    return make_function(
        lambda x: x - np.tanh(x),
        lambda x: np.tanh(x) ** 2,
        slopes=(1.0, 1.0),
        even=True,
        reference="torch.nn.Tanhshrink",
    )


def softsign() -> Function:
    """Return x / (1 + |x|)."""

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


def laplace(mu: float = 0.707107, sigma: float = 0.282095) -> Function:
    """Return the normal distribution function with mean `mu` and standard deviation `sigma`."""
    require(sigma > 0.0, "laplace", "sigma > 0", sigma=sigma)

    def standard(x: np.ndarray) -> np.ndarray:
        return np.clip((x - mu) / sigma, -_GAUSS_END, _GAUSS_END)

    def value(x: np.ndarray) -> np.ndarray:
        z = standard(x)
        tail = _normal_tail(-np.abs(z))
        return np.where(z > 0, 1.0 - tail, tail)

    return make_function(
        value,
        lambda x: _INV_SQRT_2PI / sigma * _gauss(standard(x)),
        slopes=(0.0, 0.0),
        domain=domain_around(reach=abs(mu) + 8.0 * sigma),
        even=mu == 0.0,
        reference="transformers laplace; Ma et al., arXiv:2209.10655",
    )


def softplus(beta: float = 1.0, threshold: float = 20.0) -> Function:
    """Return log(1 + exp(`beta` x)) / `beta`, and x if `beta` x is above `threshold`, as torch does."""
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
    """Return the largest x for which torch's test, beta * x > threshold, is false."""
    x = threshold / beta
    near = (math.nextafter(x, -math.inf), x, math.nextafter(x, math.inf))
    return max((c for c in near if beta * c <= threshold), default=x)


def sqrtsoftplus() -> Function:
    """Return sqrt(softplus(x)) with torch's softplus, which switches to sqrt(x) at 20.

    softplus(x) underflows at -745, its root only at -1490. For x < 0 the factor e^(x / 2) is therefore taken out of the
    root, which avoids the 0 / 0 of torch's backward.
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
        domain=domain_around(),  # the switch does not widen it, as in softplus
        reference="transformers sqrtsoftplus",
    )
