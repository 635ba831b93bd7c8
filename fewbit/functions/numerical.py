"""The numerical derivative f' of a user's function f, the limits of f', and whether f' is even."""

from __future__ import annotations

import math

import numpy as np

from fewbit.errors import FunctionError
from fewbit.functions.adapters import Flat, quiet
from fewbit.functions.kinks import wide_mesh
from fewbit.functions.panels import RESOLUTION, Panels, slope_within

ACCURACY = 1e-10
"""Largest estimated error of a numerical f', relative to max |f'|."""
_EPS = float(np.finfo(np.float64).eps)
# The change of f between two samples may differ from that of a line by this many rounding errors of f and the line.
_ROUNDINGS = 8.0


def numerical_derivative(f: Flat, panels: Panels, domain: tuple[float, float]) -> Flat:
    """Return a function that computes f' as the derivative of the polynomials that approximate f.

    Outside the domain, f' is the slope of a polynomial around the point, whose error is not estimated.
    """
    low, high = domain
    slopes = panels.derivative()

    def slope(x: np.ndarray) -> np.ndarray:
        found = slopes(np.clip(x, low, high))
        beyond = (x < low) | (x > high)
        if beyond.any():
            far = x[beyond]
            reach = np.maximum(0.25, np.abs(far) / 16.0)
            start = np.where(far > high, np.maximum(high, far - reach), far - reach)
            end = np.where(far < low, np.minimum(low, far + reach), far + reach)
            with quiet():
                found[beyond] = slope_within(f, start, end, far)
        return found

    return slope


def with_flat_pieces(
    value: Flat, slope: Flat, panels: Panels, pieces: list[tuple[float, float]]
) -> tuple[Flat, float]:
    """Return (f', its estimated largest error), with f' constant on every interval of `pieces` on which f is a straight line."""
    flat = []
    accuracy = panels.error
    largest = panels.derivative().largest()
    points = panels.points(32)
    for left, right in pieces:
        x = points[(points >= left) & (points <= right)]
        sample, size = slope(x), np.abs(value(x)).max() + np.abs(x).max()
        level = float(np.median(sample))
        # The largest error that rounding of f causes in the slope of a polynomial, at the ends of its panel.
        rounding = 16384.0 * _EPS * max(float(size) / (right - left), abs(level))
        if np.abs(sample - level).max() <= min(accuracy, rounding, ACCURACY * largest):
            ends = np.array([left, right])
            level = _short(float(np.diff(value(ends))[0] / (right - left)), rounding)
            if _is_straight(value, level, left, right):
                flat.append((left, right, level))
    if not flat:
        return slope, accuracy

    def cleaned(x: np.ndarray) -> np.ndarray:
        found = slope(x)
        for left, right, level in flat:
            # A piece ends one float before the kink at its right end. The kink itself gets the limit from the left.
            end = right if right == pieces[-1][1] else math.nextafter(right, math.inf)
            found = np.where((x >= left) & (x <= end), level, found)
        return found

    return cleaned, accuracy if len(flat) < len(pieces) else 0.0


def _is_straight(value: Flat, level: float, left: float, right: float) -> bool:
    near = np.geomspace(1e-12, max(-left, right), 1025)
    x = np.concatenate([np.linspace(left, right, RESOLUTION), -near, near])
    x = np.unique(x[(x >= left) & (x <= right)])
    y, line = value(x), level * x
    size = np.abs(y) + np.abs(line)
    # An end may be a kink, whose place is known only up to rounding errors of the largest |f|.
    size[[0, -1]] = size.max()
    change = np.abs(np.diff(y - line))
    return bool((change <= _ROUNDINGS * _EPS * (size[1:] + size[:-1])).all())


def limit_of_slope(value: Flat, slope: Flat, sign: float) -> float:
    """Return the limit of f' at sign * infinity, estimated from f' at sign times 1e3, 1e4, 1e5 and 1e6.

    It is infinite if these values keep growing, and nan if neither they nor their Aitken extrapolations settle.
    """
    x = sign * np.array([1e3, 1e4, 1e5, 1e6])
    between = sign * 1e5 * np.sqrt([3.0, 19.0, 61.0, 211.0, 1117.0])
    try:
        g, y, others = slope(x), value(x), slope(between)
    except FunctionError:  # f need not accept such large numbers
        return math.nan
    if np.isinf(g[0]) or np.isinf(y[0]):
        return float(g[0]) if np.isinf(g[0]) else float(sign * y[0])
    if not np.isfinite(g).all():
        return math.nan
    steps, scale = np.diff(g), max(1.0, abs(float(g[-1])))
    limit = math.nan
    if np.all(np.abs(steps[1:]) <= 1e-9 * scale):
        limit = _short(float(g[-1]), 1e-9)
    elif np.all(np.abs(steps[1:]) <= 0.5 * np.abs(steps[:-1])):
        limits = g[2:] - steps[1:] ** 2 / (steps[1:] - steps[:-1])
        if abs(limits[1] - limits[0]) <= 1e-6 * scale:
            limit = _short(float(limits[1]), 1e-9)
    if np.all(np.abs(others - limit) <= abs(g[2] - limit) + 1e-9 * scale):
        return limit
    same_way = np.all(steps * steps[0] > 0) and abs(g[-1]) > abs(g[0])
    if same_way and np.all(np.abs(steps[1:]) >= 0.9 * np.abs(steps[:-1])):
        return math.copysign(math.inf, g[-1])
    return math.nan


def _short(x: float, within: float) -> float:
    return round(x, 6) + 0.0 if abs(round(x, 6) - x) <= within else x


def is_even(slope: Flat, kinks: list[float], domain: tuple[float, float], accuracy: float) -> bool:
    """Return whether f'(-x) equals f'(x) on a mesh of the domain without the kinks, up to twice `accuracy`."""
    if domain[0] != -domain[1] or kinks != sorted(-kink + 0.0 for kink in kinks):
        return False
    x = np.setdiff1d(wide_mesh(0.0, domain[1]), np.abs(kinks))
    right, left = slope(x), slope(-x)
    allowed = max(1e-12 * float(np.max(np.abs(right))), 2.0 * accuracy)
    return bool(np.max(np.abs(right - left)) <= allowed)
