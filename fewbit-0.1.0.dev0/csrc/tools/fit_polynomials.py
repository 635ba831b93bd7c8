"""Fits the polynomials of csrc/common/math.h and prints them as C++.

    python csrc/tools/fit_polynomials.py            the arrays
    python csrc/tools/fit_polynomials.py --report   their errors before and after rounding

Each fit minimizes the largest weighted error on Chebyshev nodes (Lawson's iteratively reweighted
least squares, which converges to the minimax polynomial), then rounds the coefficients from the lowest order up and refits the rest each time, so that later ones absorb earlier roundings.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.polynomial import chebyshev, polynomial
from scipy.special import log_ndtr

_LN2 = math.log(2.0)
_NODES = 500
_ROUNDS = 60


@dataclass(frozen=True)
class Fit:
    """f(x) ~ sum of c[k] x**k on an interval; `tolerance` is the error of f that counts as one."""

    name: str
    about: str
    f: Callable[[np.ndarray], np.ndarray]
    tolerance: Callable[[np.ndarray], np.ndarray]
    degree: int
    interval: tuple[float, float]
    dtype: type = np.float32  # of the coefficients and of the arithmetic


def _lawson(fit: Fit, fixed: list[float]) -> np.ndarray:
    """All coefficients (float64), the lowest of them as given."""
    low, high = fit.interval
    middle, half = (low + high) / 2.0, (high - low) / 2.0
    node = np.cos(math.pi * (np.arange(_NODES) + 0.5) / _NODES)
    x = middle + half * node
    weight = 1.0 / fit.tolerance(x)
    target = (fit.f(x) - (polynomial.polyval(x, fixed) if fixed else 0.0)) * weight
    basis = chebyshev.chebvander(node, fit.degree - len(fixed))
    basis *= (x ** len(fixed) * weight)[:, None]
    best, best_error, share = None, math.inf, np.full(_NODES, 1.0 / _NODES)
    for _ in range(_ROUNDS):
        root = np.sqrt(share)
        c = np.linalg.lstsq(basis * root[:, None], target * root, rcond=None)[0]
        error = np.abs(basis @ c - target)
        if error.max() < best_error:
            best, best_error = c, error.max()
        share *= error / error.max()
        share = share / share.sum() + 1e-14 / _NODES
    in_x = np.zeros(1)
    for c in chebyshev.cheb2poly(best)[::-1]:  # Horner in (x - middle) / half
        in_x = polynomial.polyadd(polynomial.polymul(in_x, [-middle / half, 1.0 / half]), [c])
    return np.concatenate([fixed, in_x[: fit.degree - len(fixed) + 1]])


def coefficients(fit: Fit) -> np.ndarray:
    """c[0..degree], each rounded to the dtype before the next are fitted."""
    done = []
    while len(done) <= fit.degree:
        done.append(float(fit.dtype(_lawson(fit, done)[len(done)])))
    return np.array(done, dtype=fit.dtype)


def horner(c: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The polynomial in the dtype of c, with fused multiply-adds (emulated in float64)."""
    q = np.full_like(x, c[-1])
    for k in c[-2::-1]:
        q = (q.astype(np.float64) * x + np.float64(k)).astype(c.dtype)
    return q


def _gate(t: np.ndarray) -> np.ndarray:
    return np.exp(log_ndtr(-t))


def _gelu(name: str, about: str, degree: int, end: float, relative: float) -> Fit:
    """log2(2 Phi(-t)) / t: then Phi(-t) = 2**(t q(t) - 1).

    An error d of q makes Phi(-t) wrong by the factor 1 + t ln(2) d. What counts as one is an
    absolute error of 2e-8 in Phi, a quarter of float32's ulp(1), or `relative` where that is less.
    """
    return Fit(
        name,
        about,
        lambda t: (log_ndtr(-t) / _LN2 + 1.0) / t,
        lambda t: np.minimum(2e-8 / _gate(t), relative) / (t * _LN2),
        degree,
        (1e-6, end),
    )


def _exp2(name: str, about: str, degree: int, tolerance: float, dtype: type) -> Fit:
    return Fit(
        name,
        about,
        lambda f: np.expm1(f * _LN2) / f,
        lambda f: tolerance * np.expm1(f * _LN2) / f,
        degree,
        (-0.5, 0.5),
        dtype,
    )


def _second_order(r: np.ndarray) -> np.ndarray:
    return (np.expm1(r) - r) / (r * r)


def _log1p(name: str, about: str, middle: float, degree: int, tolerance: float, dtype: type) -> Fit:
    """In v = e - middle: around the middle, the rounding errors of the higher terms are damped."""
    return Fit(
        name,
        about,
        lambda v: (np.log1p(v + middle) / (v + middle) - 1.0) / (v + middle),
        lambda v: tolerance * np.log1p(v + middle) / (v + middle) / np.maximum(v + middle, 1e-3),
        degree,
        (1e-4 - middle, 1.0 - middle),
        dtype,
    )


FITS = (
    _exp2("kExp2", "(2^f - 1) / f for |f| <= 1/2", 5, 2.0**-26, np.float32),
    _exp2("kExp2Double", "the same in double", 7, 2.0**-39, np.float64),
    Fit(
        "kExpm1",
        "(e^r - 1 - r) / r^2 for |r| <= log(2) / 2, devices",
        lambda r: np.where(np.abs(r) < 1e-3, 0.5 + r / 6.0 + r * r / 24.0, _second_order(r)),
        lambda r: 2.0**-26 * np.expm1(r) / (r * np.maximum(np.abs(r), 1e-2)),
        4,
        (-0.35, 0.35),
    ),
    _log1p(
        "kLog1p",
        "(log(1 + e) / e - 1) / e in e - 1/2, for 0 <= e <= 1, devices",
        0.5,
        8,
        2.0**-26,
        np.float32,
    ),
    _log1p(
        "kLog1pDouble",
        "(log(1 + e) / e - 1) / e for 0 <= e <= 1, hosts",
        0.0,
        11,
        2.0**-35,
        np.float64,
    ),
    Fit(
        "kTanh",
        "(tanh(x) / x - 1) / s in s = x^2, for |x| <= 0.65, devices",
        lambda s: (np.tanh(np.sqrt(s)) / np.sqrt(s) - 1.0) / s,
        lambda s: 2.0**-26 * np.tanh(np.sqrt(s)) / np.sqrt(s) / s,
        4,
        (1e-4, 0.65**2),
    ),
    _gelu("kGelu", "log2(2 Phi(-t)) / t for 0 <= t <= 11, hosts", 11, 11.0, 1e-4),
    _gelu("kGeluShort", "log2(2 Phi(-t)) / t for 0 <= t <= 5.5, devices", 7, 5.5, 4e-3),
)


def render() -> str:
    """The arrays as they stand in math.h."""
    lines = []
    for fit in FITS:
        c = coefficients(fit)
        kind, suffix = ("float", "f") if fit.dtype is np.float32 else ("double", "")
        lines.append(f"// {fit.about}")
        lines.append(f"constexpr {kind} {fit.name}[{len(c)}] = {{")
        lines += [f"    {v:.{9 if suffix else 17}g}{suffix}," for v in c.astype(np.float64)]
        lines.append("};")
    return "\n".join(lines)


def report() -> str:
    """Largest errors in units of the tolerance: ideal, with rounded coefficients, rounded Horner."""
    lines = []
    for fit in FITS:
        c = coefficients(fit)
        x = np.linspace(*fit.interval, 200000).astype(fit.dtype)
        wide = x.astype(np.float64)
        tolerance = fit.tolerance(wide)

        values = (
            polynomial.polyval(wide, _lawson(fit, [])),
            polynomial.polyval(wide, c.astype(np.float64)),
            horner(c, x).astype(np.float64),
        )
        worst = [np.max(np.abs(value - fit.f(wide)) / tolerance) for value in values]
        lines.append(
            f"{fit.name:12s} degree {fit.degree:2d}  " + "  ".join(f"{w:.3f}" for w in worst)
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="print errors instead of the arrays")
    print(report() if parser.parse_args().report else render())
