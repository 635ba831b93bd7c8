"""Make the stand-in, a piecewise linear function v that replaces f', and find the levels y_k for objective "unbiased".

At run time, one of the two levels next to v(x) is drawn such that the mean of the draw is v(x). The expected squared error is

    E = integral of [(v - y_k)(y_{k+1} - v) + (f' - v)**2] w,   y_k <= v <= y_{k+1}.

For levels other than the first and the last,

    dE/dy_k = integral over (y_{k-1}, y_k) of (v - y_{k-1}) w - integral over (y_k, y_{k+1}) of (y_{k+1} - v) w.

ZipML (Zhang et al., ICML 2017) finds such levels in quadratic time. The costs are Monge (QUIVER, 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fewbit.solver.refine import RESIDUAL, ROUNDING
from fewbit.solver.steps import threshold_steps

# The largest error of the stand-in, divided by the average gap between levels.
_SHARE_OF_GAP = 2e-3
_MOST_KNOTS = 4096


@dataclass(frozen=True)
class StandIn:
    """A piecewise linear function v that replaces f'.

    Attributes:
        points: float64 (n,), the x of the corners, ascending; two equal points are a jump.
        values: float64 (n,), the values of v at the points.
        error: A bound on |f' - v|.
    """

    points: np.ndarray
    values: np.ndarray
    error: float

    def __call__(self, x):
        """Return v(x)."""
        i = np.clip(np.searchsorted(self.points, x, side="right") - 1, 0, len(self.points) - 2)
        width = self.points[i + 1] - self.points[i]
        slope = np.where(width > 0, self.values[i + 1] - self.values[i], 0.0)
        inner = self.values[i] + (x - self.points[i]) * (slope / np.where(width > 0, width, 1.0))
        # Clipping prevents values beyond those of the knots, which rounding could cause.
        low = np.minimum(self.values[i], self.values[i + 1])
        high = np.maximum(self.values[i], self.values[i + 1])
        return np.clip(np.where(width > 0, inner, self.values[i + 1]), low, high)


def with_tails(stand_in, slopes):
    """Return a stand-in that jumps to `slopes`, the limits of f', at the ends of the domain."""
    points, values = list(stand_in.points), list(stand_in.values)
    if values[0] != slopes[0]:
        points.insert(0, points[0])
        values.insert(0, slopes[0])
    if values[-1] != slopes[1]:
        points.append(points[-1])
        values.append(slopes[1])
    return StandIn(np.array(points), np.array(values), stand_in.error)


def build_stand_in(landscape, count):
    """Halve lines between values of f' until they are within a small share of the average gap between `count` levels."""
    derivative = landscape.derivative
    forced = np.unique(np.concatenate([landscape.domain, landscape.kinks, landscape.extrema]))
    left, right = forced[:-1], forced[1:]
    value_left, value_right = landscape.end_values(left, right)
    spread = max(value_left.max(), value_right.max()) - min(value_left.min(), value_right.min())
    tolerance = _SHARE_OF_GAP * spread / max(count - 1, 1)
    probe = np.linspace(0, 1, 33)[1:-1]
    done = []
    worst = 0.0
    while len(left):
        x = left[:, None] + (right - left)[:, None] * probe
        value = derivative(x)
        line = value_left[:, None] + (value_right - value_left)[:, None] * probe
        gap = np.abs(value - line).max(axis=1)
        narrow = right - left < 1e-9 * (1 + np.abs(left))
        finished = (gap <= tolerance) | narrow
        parts = (left, right, value_left, value_right)
        done.extend(zip(*(part[finished] for part in parts), strict=True))
        if finished.any():
            bend = _bend(value, line)
            worst = max(worst, float((gap + bend)[finished].max()))
        left, right = left[~finished], right[~finished]
        value_left, value_right = value_left[~finished], value_right[~finished]
        middle = 0.5 * (left + right)
        value_middle = derivative(middle)
        left, right = np.concatenate([left, middle]), np.concatenate([middle, right])
        value_left, value_right = (
            np.concatenate([value_left, value_middle]),
            np.concatenate([value_middle, value_right]),
        )
        if len(done) + len(left) > _MOST_KNOTS:
            tolerance = np.inf
    done.sort()
    points, values = [done[0][0]], [done[0][2]]
    for x0, x1, v0, v1 in done:
        if v0 != values[-1]:
            points.append(x0)
            values.append(v0)
        points.append(x1)
        values.append(v1)
    return StandIn(np.array(points), np.array(values), worst)


def _bend(value, line):
    """Bound how much larger |f' - line| can be between samples, by second differences of `value` - `line`, (n, m)."""
    error = np.concatenate(
        [np.zeros((len(value), 1)), value - line, np.zeros((len(value), 1))], axis=1
    )
    return np.abs(np.diff(error, 2, axis=1)).max(axis=1)


def refine_unbiased(landscape, cells, levels, fixed, most_steps=100):
    """Improve the levels (K,) that are not `fixed`, by Newton's method. The error never rises.

    Returns:
        The levels, and the residual: the largest |dE/dy_k| of the levels that may move, minus what their rounding can cause.
    """
    state = _evaluate(landscape, cells, levels)
    mass = cells.mass.sum()
    for _ in range(most_steps):
        free = ~fixed & ~state.held
        if state.residual(levels, free) < 1e-3 * RESIDUAL * min(1.0, mass):
            break
        step = np.zeros_like(levels)
        # The error may not be convex: along an axis of negative curvature the step is reversed.
        curvature, axes = np.linalg.eigh(state.hessian[np.ix_(free, free)])
        curvature = np.maximum(np.abs(curvature), 1e-12 * np.abs(curvature).max(initial=1e-300))
        step[free] = -axes @ ((axes.T @ state.gradient[free]) / curvature)
        for share in (1.0, 0.5, 0.1, 0.01):
            moved = levels + share * step
            if (np.diff(moved) <= 0).any():
                continue
            tried = _evaluate(landscape, cells, moved)
            calmer = tried.residual(moved, free) < state.residual(levels, free)
            unchanged = tried.error <= state.error * (1 + ROUNDING)
            if tried.error < state.error or (unchanged and calmer):
                levels, state = moved, tried
                break
        else:
            break
    return levels, state.residual(levels, ~fixed & ~state.held)


@dataclass(frozen=True)
class _State:
    error: float
    gradient: np.ndarray
    hessian: np.ndarray
    held: np.ndarray

    def residual(self, levels, free):
        rounding = 4 * np.diag(self.hessian) * np.spacing(np.abs(levels))
        return float((np.abs(self.gradient) - rounding)[free].max(initial=0.0))


def variance(landscape, cells, levels):
    """Return the integral of (v - y_k)(y_{k+1} - v) w."""
    return _evaluate(landscape, cells, levels).error


def _evaluate(landscape, cells, levels):
    count = len(levels)
    if count < 2:
        deviation = cells.mean - levels[0]
        error = math.fsum(cells.mass * deviation**2 + cells.spread)
        return _State(error, np.zeros(1), np.eye(1), np.ones(1, bool))
    steps = threshold_steps(landscape, cells, levels[1:-1])
    parts = landscape.split(cells, steps.breaks)
    code = steps.codes[np.searchsorted(steps.breaks, 0.5 * (parts.left + parts.right))]
    above = parts.mean - levels[code]
    below = levels[code + 1] - parts.mean
    # The variance of v inside a cell enters (v - y_k)(y_{k+1} - v) with a minus sign.
    error = math.fsum(np.maximum(parts.mass * above * below - parts.spread, 0.0))
    rising = np.bincount(code, parts.mass * above, count - 1)
    falling = np.bincount(code, parts.mass * below, count - 1)
    mass = np.bincount(code, parts.mass, count - 1)
    gradient = np.zeros(count)
    gradient[1:-1] = rising[:-1] - falling[1:]
    density = np.zeros(count)
    for lower, upper, share in zip(
        steps.codes[:-1], steps.codes[1:], steps.slope_density, strict=True
    ):
        density[max(lower, upper)] += share
    hessian = np.zeros((count, count))
    k = np.arange(1, count - 1)
    hessian[k, k] = (levels[2:] - levels[:-2]) * density[1:-1]
    k = np.arange(count - 1)
    hessian[k, k + 1] = hessian[k + 1, k] = -mass
    return _State(error, gradient, hessian, _held(cells, levels, gradient))


def _held(cells, levels, gradient):
    """Return the inner levels, bool (K,), that equal f' on an interval, at which the gradient jumps up through 0."""
    flat = cells.lowest == cells.highest
    held = np.zeros(len(levels), dtype=bool)
    for k in range(1, len(levels) - 1):
        atom = cells.mass[flat & (cells.lowest == levels[k])].sum()
        # The gradient includes the mass of these intervals as if f' were above the level.
        held[k] = atom > 0 and gradient[k] <= 0 <= gradient[k] + atom * (
            levels[k + 1] - levels[k - 1]
        )
    return held
