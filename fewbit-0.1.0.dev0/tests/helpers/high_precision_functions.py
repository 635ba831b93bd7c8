"""Functions that are written once for NumPy and for mpmath, which computes the oracle in 40 digits."""

import mpmath
import numpy as np
from scipy import special


class Floats:
    """The elementary functions on float64 arrays."""

    exp, log1p, sin, cos, tanh, arctan, sqrt = (
        np.exp, np.log1p, np.sin, np.cos, np.tanh, np.arctan, np.sqrt,
    )  # fmt: skip
    erf, abs, maximum, where = special.erf, np.abs, np.maximum, np.where
    expm1, arcsinh, expit = np.expm1, np.arcsinh, special.expit

    @staticmethod
    def softplus(x):
        return np.logaddexp(0.0, x)


class Digits:
    """The elementary functions on mpmath's numbers."""

    exp, log1p, sin, cos, tanh, arctan, sqrt = (
        mpmath.exp, mpmath.log1p, mpmath.sin, mpmath.cos, mpmath.tanh, mpmath.atan, mpmath.sqrt,
    )  # fmt: skip
    erf, abs, maximum, expm1, arcsinh = mpmath.erf, abs, max, mpmath.expm1, mpmath.asinh

    @staticmethod
    def where(condition, yes, no):
        return yes if condition else no

    @staticmethod
    def expit(x):
        return 1 / (1 + mpmath.exp(-x))

    @staticmethod
    def softplus(x):
        return max(x, 0) + mpmath.log1p(mpmath.exp(-abs(x)))


def exact_slopes(f, points):
    """Return f' at float64 points, computed in 40 digits and rounded once. f takes a namespace and a number."""
    with mpmath.workdps(60):
        return np.array([float(mpmath.diff(lambda x: f(Digits, x), mpmath.mpf(p))) for p in points])
