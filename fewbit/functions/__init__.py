"""The activation functions fewbit knows: f and f' in float64, with kinks, slopes, parity and domain.

Every derivative is within 1e-14 of the exact one (absolute, for |x| <= 1e3), and within 1e-12
relative in tails that decay to zero, as long as f' is a normal float64. The formulas are written
so that nothing cancels there: each tail is computed from a quantity that is small in that tail.

At a kink, `derivative` returns what torch's own backward returns there.

PReLU and xIELU are left out because their shape is learned, GLU and softmax because they are not
pointwise: no fixed function of one number stands behind any of them.
"""

import difflib
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from fewbit.errors import FunctionError
from fewbit.functions.erfcx import erfcx

__all__ = ["Function", "aliases", "canonical", "get", "names"]

# exp(-t) is exactly zero beyond this t, and so is any product with it that we take.
_EXP_END = 800.0
# The same for exp(-t**2 / 2).
_GAUSS_END = 40.0

_SQRT_HALF = math.sqrt(0.5)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)

_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


@dataclass(frozen=True, eq=False)
class Function:
    """A pointwise function, its derivative, and what a solver has to know about them.

    `value` and `derivative` take a float or an array of any shape and return float64 of the same
    shape; NaN gives NaN, an infinity gives the limit. Two Functions are equal when they are the
    same object.
    """

    name: str
    parameters: Mapping[str, float]  # torch's names, defaults filled in
    value: Callable[[np.ndarray], np.ndarray]
    derivative: Callable[[np.ndarray], np.ndarray]  # torch's backward value at a kink
    kinks: tuple[float, ...]  # ascending; where f' jumps or is not smooth
    slopes: tuple[
        float, float
    ]  # f'(-inf), f'(+inf); infinite if f' has no bound, nan if no limit is known
    domain: tuple[float, float]  # the range that matters
    reference: str  # where f is defined
    even_derivative: bool  # f'(-x) == f'(x)
    accuracy: float = 0.0  # the largest error of `derivative` on the domain; 0 for a formula
    panels: tuple[
        float, ...
    ] = ()  # for a callable: points between which f' was resolved as a polynomial


def names() -> tuple[str, ...]:
    """The canonical names, related functions next to each other."""
    return tuple(_BUILDERS)


def aliases() -> Mapping[str, str]:
    """Other names that `get` accepts, and the canonical name of each."""
    return MappingProxyType(_ALIASES)


def canonical(name: str) -> str:
    """The canonical name of a function; FunctionError for a name that is not known."""
    if not isinstance(name, str):
        raise FunctionError(f"expected the name of a function, got {type(name).__name__}")
    if name in _BUILDERS:
        return name
    if name in _ALIASES:
        return _ALIASES[name]
    close = difflib.get_close_matches(name.lower(), [*_BUILDERS, *_ALIASES], n=4)
    hint = (
        f"did you mean {', '.join(close)}?" if close else f"expected one of {', '.join(_BUILDERS)}"
    )
    raise FunctionError(f"unknown function {name!r}: {hint}")


def get(name: str, parameters: Mapping[str, float] | None = None) -> Function:
    """The function of that name or alias; parameters not given take torch's defaults.

    `threshold` has no defaults in torch; here they are threshold=0, value=0, which is relu.
    """
    name = canonical(name)
    return _BUILDERS[name](**_resolved(name, parameters or {}))


def _resolved(name: str, given: Mapping[str, float]) -> dict[str, float]:
    defaults = _DEFAULTS.get(name, {})
    for key, number in given.items():
        if key not in defaults:
            expected = ", ".join(defaults) or "none"
            raise FunctionError(f"{name} has no parameter {key!r}; expected: {expected}")
        if (
            not isinstance(number, numbers.Real)
            or isinstance(number, bool)
            or not math.isfinite(number)
        ):
            raise FunctionError(f"{name}: expected a finite number for {key}, got {number!r}")
    return {key: float(given.get(key, default)) for key, default in defaults.items()}


def _require(condition: bool, name: str, expected: str, **got: float) -> None:
    if not condition:
        came = ", ".join(f"{key}={number!r}" for key, number in got.items())
        raise FunctionError(f"{name}: expected {expected}, got {came}")


# --- pieces shared by several functions ---------------------------------------------------------


def _elementwise(f: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """f on float64 arrays of any shape, NaN kept.

    Underflow to zero and overflow of results that exceed float64 are the right answers here, so
    neither is reported; the formulas divide by nothing that can be zero and form no inf - inf.
    """

    def call(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, dtype=np.float64)
        missing = np.isnan(x)
        with np.errstate(over="ignore", under="ignore"):
            y = f(np.where(missing, 0.0, x))
        return np.where(missing, np.nan, y)[()]

    return call


def _function(
    name: str,
    value: Callable[[np.ndarray], np.ndarray],
    derivative: Callable[[np.ndarray], np.ndarray],
    *,
    slopes: tuple[float, float],
    reference: str,
    parameters: Mapping[str, float] | None = None,
    kinks: tuple[float, ...] = (),
    domain: tuple[float, float] | None = None,
    even: bool = False,
) -> Function:
    kinks = tuple(sorted({kink + 0.0 for kink in kinks}))  # + 0.0 turns -0.0 into 0.0
    domain = domain or _domain(*kinks)
    _require(
        all(map(math.isfinite, (*kinks, *domain))),
        name,
        "parameters of moderate size",
        **(parameters or {}),
    )
    return Function(
        name=name,
        parameters=dict(parameters or {}),
        value=_elementwise(value),
        derivative=_elementwise(derivative),
        kinks=kinks,
        slopes=slopes,
        domain=domain,
        reference=reference,
        even_derivative=even,
    )


def _domain(*points: float, reach: float = 10.0) -> tuple[float, float]:
    """(-10, 10), or as much more as it takes to hold the points with a fifth to spare."""
    half = max(10.0, reach, *(1.2 * abs(point) for point in points))
    return (-half, half)


def _scaled(slope: float, x: np.ndarray) -> np.ndarray:
    """slope * x, where a zero slope also wins against an infinite x."""
    return slope * x if slope else np.zeros_like(x)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), accurate down to the last subnormal."""
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1.0 + e)


def _sigmoid_slope(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return e / (1.0 + e) ** 2


def _log1p_exp(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x))."""
    return np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))


def _gauss(x: np.ndarray) -> np.ndarray:
    """exp(-x**2 / 2) for |x| <= 40.

    Rounding x**2 alone would cost up to 1e-13 relative far out. `head` has at most 18 bits, so its
    square is exact, and so is x - head.
    """
    head = np.rint(x * 4096.0) / 4096.0
    return np.exp(-0.5 * head * head) * np.exp(-0.5 * (x - head) * (x + head))


def _normal_tail(x: np.ndarray) -> np.ndarray:
    """The normal distribution function at x, for -40 <= x <= 0."""
    return 0.5 * erfcx(-_SQRT_HALF * x) * _gauss(x)


def _gated(
    lower: Callable[[np.ndarray], np.ndarray], lower_slope: Callable[[np.ndarray], np.ndarray]
) -> tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]:
    """f and f' of f(x) = x g(x) with g(-x) = 1 - g(x), from their formulas for x <= 0.

    Then f(x) = x + f(-x) and f'(x) = 1 - f'(-x), so the other half costs no accuracy.
    """

    def value(x: np.ndarray) -> np.ndarray:
        return np.maximum(x, 0.0) + lower(-np.abs(x))

    def derivative(x: np.ndarray) -> np.ndarray:
        slope = lower_slope(-np.abs(x))
        return np.where(x > 0, 1.0 - slope, slope)

    return value, derivative


# --- piecewise linear ---------------------------------------------------------------------------


def _identity() -> Function:
    return _function(
        "identity",
        lambda x: x,
        np.ones_like,
        slopes=(1.0, 1.0),
        even=True,
        reference="torch.nn.Identity",
    )


def _two_slopes(
    name: str, slope: float, reference: str, parameters: Mapping[str, float] | None = None
) -> Function:
    """x for x > 0, slope * x otherwise."""
    return _function(
        name,
        lambda x: np.where(x > 0, x, _scaled(slope, x)),
        lambda x: np.where(x > 0, 1.0, slope),
        parameters=parameters,
        kinks=(0.0,),
        slopes=(slope, 1.0),
        reference=reference,
    )


def _relu() -> Function:
    return _two_slopes("relu", 0.0, "torch.nn.ReLU; Nair and Hinton, ICML 2010")


def _leaky_relu(negative_slope: float) -> Function:
    return _two_slopes(
        "leaky_relu",
        negative_slope,
        "torch.nn.LeakyReLU; Maas, Hannun and Ng, ICML 2013",
        {"negative_slope": negative_slope},
    )


def _rrelu(lower: float, upper: float) -> Function:
    _require(lower <= upper, "rrelu", "lower <= upper", lower=lower, upper=upper)
    return _two_slopes(
        "rrelu",
        (lower + upper) / 2.0,
        "torch.nn.RReLU in evaluation mode; Xu et al., arXiv:1505.00853",
        {"lower": lower, "upper": upper},
    )


def _threshold(threshold: float, value: float) -> Function:
    return _function(
        "threshold",
        lambda x: np.where(x > threshold, x, value),
        lambda x: np.where(x > threshold, 1.0, 0.0),
        parameters={"threshold": threshold, "value": value},
        kinks=(threshold,),
        slopes=(0.0, 1.0),
        reference="torch.nn.Threshold",
    )


def _clamp(
    name: str,
    low: float,
    high: float,
    reference: str,
    parameters: Mapping[str, float] | None = None,
) -> Function:
    """x cut off at low and high."""
    return _function(
        name,
        lambda x: np.clip(x, low, high),
        lambda x: np.where((x > low) & (x < high), 1.0, 0.0),
        parameters=parameters,
        kinks=(low, high),
        slopes=(0.0, 0.0),
        even=low == -high,
        reference=reference,
    )


def _relu6() -> Function:
    return _clamp("relu6", 0.0, 6.0, "torch.nn.ReLU6; Krizhevsky, 2010")


def _hardtanh(min_val: float, max_val: float) -> Function:
    _require(min_val < max_val, "hardtanh", "min_val < max_val", min_val=min_val, max_val=max_val)
    return _clamp(
        "hardtanh", min_val, max_val, "torch.nn.Hardtanh", {"min_val": min_val, "max_val": max_val}
    )


def _hardsigmoid() -> Function:
    return _function(
        "hardsigmoid",
        lambda x: np.clip((x + 3.0) / 6.0, 0.0, 1.0),
        lambda x: np.where(np.abs(x) < 3.0, 1.0 / 6.0, 0.0),
        kinks=(-3.0, 3.0),
        slopes=(0.0, 0.0),
        even=True,
        reference="torch.nn.Hardsigmoid; Courbariaux et al., arXiv:1511.00363",
    )


def _hardshrink(lambd: float) -> Function:
    _require(lambd >= 0.0, "hardshrink", "lambd >= 0", lambd=lambd)
    return _function(
        "hardshrink",
        lambda x: np.where(np.abs(x) > lambd, x, 0.0),
        lambda x: np.where(np.abs(x) > lambd, 1.0, 0.0),
        parameters={"lambd": lambd},
        kinks=(-lambd, lambd),
        slopes=(1.0, 1.0),
        even=True,
        reference="torch.nn.Hardshrink",
    )


def _softshrink(lambd: float) -> Function:
    _require(lambd >= 0.0, "softshrink", "lambd >= 0", lambd=lambd)
    return _function(
        "softshrink",
        lambda x: x - np.clip(x, -lambd, lambd),
        lambda x: np.where(np.abs(x) > lambd, 1.0, 0.0),
        parameters={"lambd": lambd},
        kinks=(-lambd, lambd),
        slopes=(1.0, 1.0),
        even=True,
        reference="torch.nn.Softshrink",
    )


# --- piecewise quadratic ------------------------------------------------------------------------


def _hardswish() -> Function:
    def value(x: np.ndarray) -> np.ndarray:
        inner = np.clip(x, -3.0, 3.0)
        return np.where(x > 3.0, x, inner * (inner + 3.0) / 6.0)

    def derivative(x: np.ndarray) -> np.ndarray:
        inner = np.clip(x, -3.0, 3.0)
        return np.where(x <= -3.0, 0.0, np.where(x >= 3.0, 1.0, (2.0 * inner + 3.0) / 6.0))

    return _function(
        "hardswish",
        value,
        derivative,
        kinks=(-3.0, 3.0),
        slopes=(0.0, 1.0),
        reference="torch.nn.Hardswish; Howard et al., arXiv:1905.02244",
    )


def _relu_squared() -> Function:
    return _function(
        "relu_squared",
        lambda x: np.maximum(x, 0.0) ** 2,
        lambda x: 2.0 * np.maximum(x, 0.0),
        kinks=(0.0,),
        slopes=(0.0, math.inf),
        reference="transformers relu2; So et al., arXiv:2109.08668",
    )


# --- exponential linear units -------------------------------------------------------------------


def _elu(alpha: float) -> Function:
    return _function(
        "elu",
        lambda x: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0.0))),
        lambda x: np.where(x > 0, 1.0, alpha * np.exp(np.minimum(x, 0.0))),
        parameters={"alpha": alpha},
        kinks=(0.0,),
        slopes=(0.0, 1.0),
        reference="torch.nn.ELU; Clevert et al., arXiv:1511.07289",
    )


def _celu(alpha: float) -> Function:
    # torch also takes a negative alpha; f' is then exp(|x / alpha|), of no use as an activation.
    _require(alpha > 0.0, "celu", "alpha > 0", alpha=alpha)
    return _function(
        "celu",
        lambda x: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0.0) / alpha)),
        lambda x: np.where(x > 0, 1.0, np.exp(np.minimum(x, 0.0) / alpha)),
        parameters={"alpha": alpha},
        kinks=(0.0,),
        slopes=(0.0, 1.0),
        domain=_domain(reach=10.0 * alpha),
        reference="torch.nn.CELU; Barron, arXiv:1704.07483",
    )


def _selu() -> Function:
    left = _SELU_SCALE * _SELU_ALPHA
    return _function(
        "selu",
        lambda x: np.where(x > 0, _SELU_SCALE * x, left * np.expm1(np.minimum(x, 0.0))),
        lambda x: np.where(x > 0, _SELU_SCALE, left * np.exp(np.minimum(x, 0.0))),
        kinks=(0.0,),
        slopes=(0.0, _SELU_SCALE),
        reference="torch.nn.SELU; Klambauer et al., arXiv:1706.02515",
    )


# --- x times a smooth gate ----------------------------------------------------------------------


def _gelu_lower(x: np.ndarray) -> np.ndarray:
    x = np.maximum(x, -_GAUSS_END)
    return x * _normal_tail(x)


def _gelu_lower_slope(x: np.ndarray) -> np.ndarray:
    x = np.maximum(x, -_GAUSS_END)
    return (0.5 * erfcx(-_SQRT_HALF * x) + _INV_SQRT_2PI * x) * _gauss(x)


def _gelu() -> Function:
    value, derivative = _gated(_gelu_lower, _gelu_lower_slope)
    return _function(
        "gelu",
        value,
        derivative,
        slopes=(0.0, 1.0),
        reference="torch.nn.GELU; Hendrycks and Gimpel, arXiv:1606.08415",
    )


def _gelu_10() -> Function:
    value, derivative = _gated(_gelu_lower, _gelu_lower_slope)
    return _function(
        "gelu_10",
        lambda x: np.minimum(value(x), 10.0),  # gelu never comes near the lower bound of -10
        lambda x: np.where(x > 10.0, 0.0, derivative(x)),
        kinks=(10.0,),  # gelu(x) = 10 at 10 + 1e-22, which is 10 in float64
        slopes=(0.0, 0.0),
        reference="transformers gelu_10; Wu et al., arXiv:2004.09602",
    )


def _tanh_gelu(name: str, scale: float, reference: str) -> Function:
    """x (1 + tanh(u)) / 2 = x sigmoid(2 u), with u = scale (x + 0.044715 x**3)."""

    def gate(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = np.maximum(x, -30.0)  # sigmoid(2 u) underflows at -21.6
        return x, np.exp(2.0 * scale * x * (1.0 + 0.044715 * x * x))

    def lower(x: np.ndarray) -> np.ndarray:
        x, e = gate(x)
        return x * e / (1.0 + e)

    def lower_slope(x: np.ndarray) -> np.ndarray:
        x, e = gate(x)
        return e / (1.0 + e) * (1.0 + 2.0 * scale * x * (1.0 + 0.134145 * x * x) / (1.0 + e))

    value, derivative = _gated(lower, lower_slope)
    return _function(name, value, derivative, slopes=(0.0, 1.0), reference=reference)


def _gelu_tanh() -> Function:
    return _tanh_gelu(
        "gelu_tanh",
        math.sqrt(2.0 / math.pi),
        "torch.nn.GELU(approximate='tanh'); Hendrycks and Gimpel, arXiv:1606.08415",
    )


def _gelu_fast() -> Function:
    # The same formula with sqrt(2 / pi) cut after ten digits: f' differs by up to 1e-12.
    return _tanh_gelu(
        "gelu_fast", 0.7978845608, "transformers gelu_fast; github.com/hendrycks/GELUs"
    )


def _silu_lower(x: np.ndarray) -> np.ndarray:
    x = np.maximum(x, -_EXP_END)
    e = np.exp(x)
    return x * e / (1.0 + e)


def _silu_lower_slope(x: np.ndarray) -> np.ndarray:
    x = np.maximum(x, -_EXP_END)
    e = np.exp(x)
    return e / (1.0 + e) * (1.0 + x / (1.0 + e))


def _silu() -> Function:
    value, derivative = _gated(_silu_lower, _silu_lower_slope)
    return _function(
        "silu",
        value,
        derivative,
        slopes=(0.0, 1.0),
        reference="torch.nn.SiLU; Elfwing et al., arXiv:1702.03118",
    )


def _quick_gelu() -> Function:
    value, derivative = _gated(
        lambda x: _silu_lower(1.702 * np.maximum(x, -_EXP_END)) / 1.702,
        lambda x: _silu_lower_slope(1.702 * np.maximum(x, -_EXP_END)),
    )
    return _function(
        "quick_gelu",
        value,
        derivative,
        slopes=(0.0, 1.0),
        reference="transformers quick_gelu; github.com/hendrycks/GELUs",
    )


def _mish() -> Function:
    """x t with t = tanh(log(1 + e^x)) = w (w + 2) / (w (w + 2) + 2), w = e^x.

    Below zero w is small; above, everything is written in v = e^-x.
    """

    def gate(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """t and its derivative."""
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

    return _function(
        "mish",
        value,
        derivative,
        slopes=(0.0, 1.0),
        reference="torch.nn.Mish; Misra, arXiv:1908.08681",
    )


# --- sigmoids -----------------------------------------------------------------------------------


def _sigmoid_function() -> Function:
    return _function(
        "sigmoid",
        _sigmoid,
        _sigmoid_slope,
        slopes=(0.0, 0.0),
        even=True,
        reference="torch.nn.Sigmoid",
    )


def _logsigmoid() -> Function:
    return _function(
        "logsigmoid",
        lambda x: -_log1p_exp(-x),
        lambda x: _sigmoid(-x),
        slopes=(1.0, 0.0),
        reference="torch.nn.LogSigmoid",
    )


def _tanh() -> Function:
    def derivative(x: np.ndarray) -> np.ndarray:
        e = np.exp(-np.abs(x))
        u = e * e
        return 4.0 * u / (1.0 + u) ** 2

    return _function(
        "tanh", np.tanh, derivative, slopes=(0.0, 0.0), even=True, reference="torch.nn.Tanh"
    )


def _tanhshrink() -> Function:
    return _function(
        "tanhshrink",
        lambda x: x - np.tanh(x),
        lambda x: np.tanh(x) ** 2,
        slopes=(1.0, 1.0),
        even=True,
        reference="torch.nn.Tanhshrink",
    )


def _softsign() -> Function:
    def value(x: np.ndarray) -> np.ndarray:
        x = np.clip(x, -1e18, 1e18)  # the result is +-1 well before, and inf / inf is not
        return x / (1.0 + np.abs(x))

    return _function(
        "softsign",
        value,
        lambda x: (1.0 / (1.0 + np.abs(x))) ** 2,
        kinks=(0.0,),
        slopes=(0.0, 0.0),
        even=True,
        reference="torch.nn.Softsign; Turian et al., NAACL 2009",
    )


def _laplace(mu: float, sigma: float) -> Function:
    _require(sigma > 0.0, "laplace", "sigma > 0", sigma=sigma)

    def standard(x: np.ndarray) -> np.ndarray:
        return np.clip((x - mu) / sigma, -_GAUSS_END, _GAUSS_END)

    def value(x: np.ndarray) -> np.ndarray:
        z = standard(x)
        tail = _normal_tail(-np.abs(z))
        return np.where(z > 0, 1.0 - tail, tail)

    return _function(
        "laplace",
        value,
        lambda x: _INV_SQRT_2PI / sigma * _gauss(standard(x)),
        parameters={"mu": mu, "sigma": sigma},
        slopes=(0.0, 0.0),
        domain=_domain(reach=abs(mu) + 8.0 * sigma),
        even=mu == 0.0,
        reference="transformers laplace; Ma et al., arXiv:2209.10655",
    )


# --- softplus -----------------------------------------------------------------------------------


def _softplus(beta: float, threshold: float) -> Function:
    _require(beta > 0.0, "softplus", "beta > 0", beta=beta)
    switch = _last_below(threshold, beta)
    return _function(
        "softplus",
        lambda x: np.where(x > switch, x, _log1p_exp(beta * x) / beta),
        lambda x: np.where(x > switch, 1.0, _sigmoid(beta * x)),
        parameters={"beta": beta, "threshold": threshold},
        kinks=(switch,),
        slopes=(0.0, 1.0),
        # The switch is a numerical shortcut (at 20 it moves f' by 2e-9), not a reason to look further.
        domain=_domain(reach=10.0 / beta),
        reference="torch.nn.Softplus; Dugas et al., NIPS 2000",
    )


def _last_below(threshold: float, beta: float) -> float:
    """The last x for which torch's test, beta * x > threshold, still fails."""
    x = threshold / beta
    near = (math.nextafter(x, -math.inf), x, math.nextafter(x, math.inf))
    return max((c for c in near if beta * c <= threshold), default=x)


def _sqrtsoftplus() -> Function:
    """sqrt(softplus(x)) with torch's softplus, hence its switch to sqrt(x) at 20.

    softplus(x) itself underflows at -745, its root only at twice that: below zero e^(x / 2) is
    taken out of the root, and torch's 0 / 0 in the backward pass never arises.
    """

    def lower(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """e^x, e^(x / 2) and sqrt(softplus(x)) / e^(x / 2), for x <= 0."""
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

    return _function(
        "sqrtsoftplus",
        value,
        derivative,
        kinks=(20.0,),
        slopes=(0.0, 0.0),
        domain=_domain(),  # as for softplus, the switch does not widen it
        reference="transformers sqrtsoftplus",
    )


# --- the register -------------------------------------------------------------------------------

_BUILDERS: dict[str, Callable[..., Function]] = {
    "relu": _relu,
    "relu6": _relu6,
    "leaky_relu": _leaky_relu,
    "rrelu": _rrelu,
    "threshold": _threshold,
    "relu_squared": _relu_squared,
    "elu": _elu,
    "celu": _celu,
    "selu": _selu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_fast": _gelu_fast,
    "gelu_10": _gelu_10,
    "quick_gelu": _quick_gelu,
    "silu": _silu,
    "hardswish": _hardswish,
    "mish": _mish,
    "sigmoid": _sigmoid_function,
    "hardsigmoid": _hardsigmoid,
    "logsigmoid": _logsigmoid,
    "laplace": _laplace,
    "tanh": _tanh,
    "hardtanh": _hardtanh,
    "tanhshrink": _tanhshrink,
    "hardshrink": _hardshrink,
    "softshrink": _softshrink,
    "softsign": _softsign,
    "softplus": _softplus,
    "sqrtsoftplus": _sqrtsoftplus,
    "identity": _identity,
}

_DEFAULTS: dict[str, dict[str, float]] = {
    "leaky_relu": {"negative_slope": 0.01},
    "rrelu": {"lower": 1.0 / 8.0, "upper": 1.0 / 3.0},
    "threshold": {"threshold": 0.0, "value": 0.0},
    "elu": {"alpha": 1.0},
    "celu": {"alpha": 1.0},
    "laplace": {"mu": 0.707107, "sigma": 0.282095},
    "hardtanh": {"min_val": -1.0, "max_val": 1.0},
    "hardshrink": {"lambd": 0.5},
    "softshrink": {"lambd": 0.5},
    "softplus": {"beta": 1.0, "threshold": 20.0},
}

_ALIASES: dict[str, str] = {
    "relu2": "relu_squared",
    "leakyrelu": "leaky_relu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quickgelu": "quick_gelu",
    "swish": "silu",
    "hard_swish": "hardswish",
    "hard_sigmoid": "hardsigmoid",
    "log_sigmoid": "logsigmoid",
    "hard_tanh": "hardtanh",
    "hard_shrink": "hardshrink",
    "soft_shrink": "softshrink",
    "soft_sign": "softsign",
    "soft_plus": "softplus",
    "sqrt_softplus": "sqrtsoftplus",
    "linear": "identity",
}
