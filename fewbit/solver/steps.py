"""Step functions over cells: the breaks of q for given levels or thresholds, and the error of a given q.

A threshold is a value of f' at which q changes from one level to the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Steps:
    """The pieces of a step function.

    Attributes:
        breaks: float64 (M-1,), ascending.
        codes: int64 (M,), the index of every piece's level.
        slope_density: float64 (M-1,), w / |f''| at the breaks, 0 at a jump of f': the mass that passes between pieces per unit
            by which a threshold changes.
    """

    breaks: np.ndarray
    codes: np.ndarray
    slope_density: np.ndarray


@dataclass(frozen=True)
class Totals:
    """Sums over the pieces of a step function.

    Attributes:
        mass: (K,), the integral of w over the pieces of every level.
        first: (K,), the same integral of f' w.
        error: The integral of (f' - q)**2 w.
    """

    mass: np.ndarray
    first: np.ndarray
    error: float


def nearest_steps(landscape, cells, levels):
    """Return the step function whose value is the level nearest to f'(x)."""
    return threshold_steps(landscape, cells, 0.5 * (levels[1:] + levels[:-1]))


def threshold_steps(landscape, cells, thresholds):
    """Return the step function whose code is the number of ascending thresholds below f'(x).

    A break where the weight is 0 is in the middle between the neighboring cells.
    """
    code_left = np.searchsorted(thresholds, cells.value_left, side="right")
    code_right = np.searchsorted(thresholds, cells.value_right, side="right")
    crossings = np.abs(code_right - code_left)
    cell = np.repeat(np.arange(len(cells)), crossings)
    rank = np.arange(len(cell)) - np.repeat(np.cumsum(crossings) - crossings, crossings)
    rising = code_right[cell] > code_left[cell]
    code_after = np.where(rising, code_left[cell] + rank + 1, code_left[cell] - rank - 1)
    threshold = thresholds[np.where(rising, code_after - 1, code_after)]
    at = crossing_points(landscape, cells, cell, threshold)
    density = slope_density(landscape, cells, cell, at)

    starts = cells.left.copy()
    starts[1:] = 0.5 * (cells.left[1:] + cells.right[:-1])
    order = np.argsort(np.concatenate([np.arange(len(cells)) - 0.5, cell]), kind="stable")
    points = np.concatenate([starts, at])[order]
    codes = np.concatenate([code_left, code_after])[order]
    density = np.concatenate([np.zeros(len(cells)), density])[order]
    changes = np.flatnonzero(codes[1:] != codes[:-1]) + 1
    return tidy(Steps(points[changes], codes[np.concatenate([[0], changes])], density[changes]))


def tidy(steps):
    """Drop empty pieces, and merge neighboring pieces of equal code."""
    breaks, codes, density = steps.breaks, steps.codes, steps.slope_density
    while True:
        # If several breaks are equal, only the last one remains.
        kept = np.ones(len(breaks), dtype=bool)
        kept[:-1] = breaks[1:] > breaks[:-1]
        breaks, density = breaks[kept], density[kept]
        codes = np.concatenate([codes[:1], codes[1:][kept]])
        changed = codes[1:] != codes[:-1]
        if kept.all() and changed.all():
            return Steps(breaks, codes, density)
        breaks, density = breaks[changed], density[changed]
        codes = np.concatenate([codes[:1], codes[1:][changed]])


def relabel(steps, levels, fixed):
    """Merge neighboring pieces of equal level, and drop unused levels. Return the new arguments.

    `levels` (K,) may be in any order, and `fixed`, bool (K,), marks pinned ones.
    """
    codes = steps.codes
    changed = levels[codes[1:]] != levels[codes[:-1]]
    codes = np.concatenate([codes[:1], codes[1:][changed]])
    used, codes = np.unique(codes, return_inverse=True)
    steps = Steps(steps.breaks[changed], codes, steps.slope_density[changed])
    return steps, levels[used], fixed[used]


def crossing_points(landscape, cells, cell, threshold):
    """Return float64 (n,), the x in each of the cells `cell` at which f' equals `threshold`, by the Illinois method."""
    a, b = cells.left[cell], cells.right[cell]
    fa, fb = cells.value_left[cell] - threshold, cells.value_right[cell] - threshold
    best = np.where(np.abs(fa) < np.abs(fb), a, b)
    smallest = np.minimum(np.abs(fa), np.abs(fb))
    side = np.zeros(len(cell))
    for step in range(80):
        width = fb - fa
        secant = b - fb * (b - a) / np.where(width == 0, 1.0, width)
        middle = 0.5 * (a + b)
        # Every third step halves the bracket, so that the method converges for every shape of f'.
        inside = (secant > a) & (secant < b) & (width != 0) & (step % 3 != 2)
        x = np.where(inside, secant, middle)
        fx = landscape.derivative(x) - threshold
        better = np.abs(fx) < smallest
        best, smallest = np.where(better, x, best), np.where(better, np.abs(fx), smallest)
        same_as_a = np.sign(fx) == np.sign(fa)
        halve_b = same_as_a & (side == 1)
        halve_a = ~same_as_a & (side == -1)
        a, fa = np.where(same_as_a, x, a), np.where(same_as_a, fx, np.where(halve_a, fa / 2, fa))
        b, fb = np.where(same_as_a, b, x), np.where(same_as_a, np.where(halve_b, fb / 2, fb), fx)
        side = np.where(same_as_a, 1.0, -1.0)
        if not ((smallest > 0) & (np.nextafter(a, b) < b)).any():
            break
    return best


def slope_density(landscape, cells, cell, at):
    """Return w / |f''| at points inside the cells `cell`, by a difference of f'."""
    left, right = cells.left[cell], cells.right[cell]
    step = np.minimum(1e-4 * np.maximum(1.0, np.abs(at)), 0.25 * (right - left))
    below, above = np.maximum(at - step, left), np.minimum(at + step, right)
    inside_below = np.where(below == left, np.nextafter(left, right), below)
    inside_above = np.where(above == right, np.nextafter(right, left), above)
    rise = np.abs(landscape.derivative(inside_above) - landscape.derivative(inside_below))
    curvature = rise / np.where(above > below, above - below, 1.0)
    weight = landscape.density(at)
    return np.where(curvature > 0, weight / np.where(curvature > 0, curvature, 1.0), 0.0)


def totals(landscape, cells, steps, levels):
    """Compute the `Totals` of a step function without cancellation."""
    parts = landscape.split(cells, steps.breaks)
    code = steps.codes[np.searchsorted(steps.breaks, 0.5 * (parts.left + parts.right))]
    count = len(levels)
    mass = np.bincount(code, parts.mass, count)
    first = np.bincount(code, parts.mass * parts.mean, count)
    deviation = parts.mean - levels[code]
    return Totals(mass, first, math.fsum(parts.mass * deviation * deviation + parts.spread))
