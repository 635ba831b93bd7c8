"""Oracles of every named function in arbitrary precision. Only f has a formula; f' is computed numerically."""

import mpmath
from mpmath import mpf


def mp_sigmoid(x):
    return 1 / (1 + mpmath.exp(-x))


def mp_softplus(x, beta=1, threshold=20):
    return x if beta * x > threshold else mpmath.log1p(mpmath.exp(beta * x)) / beta


def mp_normal_cdf(x):
    return mpmath.erfc(-x / mpmath.sqrt(2)) / 2


def mp_tanh_gelu(x, scale):
    # sigmoid(2 u) equals (1 + tanh u) / 2 without the cancellation at -inf.
    return x * mp_sigmoid(2 * scale * (x + mpf("0.044715") * x**3))


def mp_selu(x):
    alpha = mpf("1.6732632423543772848170429916717")
    return mpf("1.0507009873554804934193349852946") * (x if x > 0 else alpha * mpmath.expm1(x))


def clamp(x, low, high):
    return min(max(x, mpf(low)), mpf(high))


ORACLE = {
    "identity": lambda x: x,
    "relu": lambda x: max(x, mpf(0)),
    "relu6": lambda x: clamp(x, 0, 6),
    "leaky_relu": lambda x, negative_slope=0.01: x if x > 0 else negative_slope * x,
    "rrelu": lambda x, lower=1 / 8, upper=1 / 3: x if x > 0 else (mpf(lower) + upper) / 2 * x,
    "threshold": lambda x, threshold=0.0, value=0.0: x if x > threshold else mpf(value),
    "relu_squared": lambda x: max(x, mpf(0)) ** 2,
    "elu": lambda x, alpha=1.0: x if x > 0 else alpha * mpmath.expm1(x),
    "celu": lambda x, alpha=1.0: x if x > 0 else alpha * mpmath.expm1(x / alpha),
    "selu": mp_selu,
    "gelu": lambda x: x * mp_normal_cdf(x),
    "gelu_10": lambda x: clamp(x * mp_normal_cdf(x), -10, 10),
    "gelu_tanh": lambda x: mp_tanh_gelu(x, mpmath.sqrt(2 / mpmath.pi)),
    "gelu_fast": lambda x: mp_tanh_gelu(x, mpf("0.7978845608")),
    "quick_gelu": lambda x: x * mp_sigmoid(mpf("1.702") * x),
    "silu": lambda x: x * mp_sigmoid(x),
    "hardswish": lambda x: x * clamp(x + 3, 0, 6) / 6,
    "mish": lambda x: x * mpmath.tanh(mpmath.log1p(mpmath.exp(x))),
    "sigmoid": mp_sigmoid,
    "hardsigmoid": lambda x: clamp(x + 3, 0, 6) / 6,
    "logsigmoid": lambda x: -mpmath.log1p(mpmath.exp(-x)),
    "laplace": lambda x, mu=0.707107, sigma=0.282095: mp_normal_cdf((x - mu) / sigma),
    "tanh": mpmath.tanh,
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0: clamp(x, min_val, max_val),
    "tanhshrink": lambda x: x - mpmath.tanh(x),
    "hardshrink": lambda x, lambd=0.5: x if abs(x) > lambd else mpf(0),
    "softshrink": lambda x, lambd=0.5: mpmath.sign(x) * max(abs(x) - lambd, mpf(0)),
    "softsign": lambda x: x / (1 + abs(x)),
    "softplus": mp_softplus,
    "sqrtsoftplus": lambda x: mpmath.sqrt(mp_softplus(x)),
}


def oracle(name, parameters, x, side, digits):
    """Return f and f' at x. The difference quotient steps to `side` only, so it crosses no kink."""
    with mpmath.workdps(digits):
        x, step = mpf(x), side * mpf("1e-30")
        f0, f1, f2 = (ORACLE[name](x + k * step, **parameters) for k in range(3))
        return f0, (4 * f1 - 3 * f0 - f2) / (2 * step)  # The error is step**2 f''' / 3.
