"""Step functions over cells: where q must change, and what a given q costs.

A step function is ``(breaks, codes)``: M-1 ascending points and the level number of each of the M
pieces. The masses and means of f' over its pieces, and its error, come from the cells, those that
a break runs through being split first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Steps:
    """``breaks`` (M-1,), ``codes`` (M,), and ``slope_density`` (M-1,): w / |f''| at each break.

    The last is how fast mass changes sides when the threshold of f' moves; 0 where f' jumps.
    """

    breaks: np.ndarray
    codes: np.ndarray
    slope_density: np.ndarray


@dataclass(frozen=True)
class Totals:
    """Per level: the mass and the integral of f' w over its pieces; and the error of given levels."""

    mass: np.ndarray
    first: np.ndarray
    error: float


def nearest_steps(scape, cells, levels):
    """The step function that takes, at every x, the level nearest to f'(x)."""
    return threshold_steps(scape, cells, 0.5 * (levels[1:] + levels[:-1]))


def threshold_steps(scape, cells, thresholds):
    """The step function whose code at x is the number of ``thresholds`` (ascending) below f'(x).

    Where the weight is 0 between two cells, each side continues to the middle of the gap.
    """
    code_left = np.searchsorted(thresholds, cells.value_left, side="right")
    code_right = np.searchsorted(thresholds, cells.value_right, side="right")
    crossings = np.abs(code_right - code_left)
    cell = np.repeat(np.arange(len(cells)), crossings)
    rank = np.arange(len(cell)) - np.repeat(np.cumsum(crossings) - crossings, crossings)
    rising = code_right[cell] > code_left[cell]
    code_after = np.where(rising, code_left[cell] + rank + 1, code_left[cell] - rank - 1)
    threshold = thresholds[np.where(rising, code_after - 1, code_after)]
    at = crossing_points(scape, cells, cell, threshold)
    density = slope_density(scape, cells, cell, at)

    starts = cells.left.copy()
    starts[1:] = 0.5 * (cells.left[1:] + cells.right[:-1])
    order = np.argsort(np.concatenate([np.arange(len(cells)) - 0.5, cell]), kind="stable")
    points = np.concatenate([starts, at])[order]
    codes = np.concatenate([code_left, code_after])[order]
    density = np.concatenate([np.zeros(len(cells)), density])[order]
    changes = np.flatnonzero(codes[1:] != codes[:-1]) + 1
    return tidy(Steps(points[changes], codes[np.concatenate([[0], changes])], density[changes]))


def tidy(steps):
    """The same function with strictly ascending breaks: pieces that rounding emptied are dropped."""
    breaks, codes, density = steps.breaks, steps.codes, steps.slope_density
    while True:
        # Of several breaks at one point only the last piece after it is left of them.
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
    """``(steps, levels, fixed)`` without the levels that no piece uses, for levels in piece order.

    Neighboring pieces of equal level become one.
    """
    codes = steps.codes
    changed = levels[codes[1:]] != levels[codes[:-1]]
    codes = np.concatenate([codes[:1], codes[1:][changed]])
    used, codes = np.unique(codes, return_inverse=True)
    steps = Steps(steps.breaks[changed], codes, steps.slope_density[changed])
    return steps, levels[used], fixed[used]


def crossing_points(scape, cells, cell, threshold):
    """Where f' takes ``threshold`` inside each given cell: bracketed secant (Illinois) steps."""
    a, b = cells.left[cell], cells.right[cell]
    fa, fb = cells.value_left[cell] - threshold, cells.value_right[cell] - threshold
    best = np.where(np.abs(fa) < np.abs(fb), a, b)
    smallest = np.minimum(np.abs(fa), np.abs(fb))
    side = np.zeros(len(cell))
    for step in range(80):
        width = fb - fa
        secant = b - fb * (b - a) / np.where(width == 0, 1.0, width)
        middle = 0.5 * (a + b)
        # Every third step halves the bracket, whatever the shape of f'.
        inside = (secant > a) & (secant < b) & (width != 0) & (step % 3 != 2)
        x = np.where(inside, secant, middle)
        fx = scape.derivative(x) - threshold
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


def slope_density(scape, cells, cell, at):
    """W / |f''| at points inside cells, f'' by a difference that stays inside the cell."""
    left, right = cells.left[cell], cells.right[cell]
    step = np.minimum(1e-4 * np.maximum(1.0, np.abs(at)), 0.25 * (right - left))
    below, above = np.maximum(at - step, left), np.minimum(at + step, right)
    inside_below = np.where(below == left, np.nextafter(left, right), below)
    inside_above = np.where(above == right, np.nextafter(right, left), above)
    rise = np.abs(scape.derivative(inside_above) - scape.derivative(inside_below))
    curvature = rise / np.where(above > below, above - below, 1.0)
    weight = scape.density(at)
    return np.where(curvature > 0, weight / np.where(curvature > 0, curvature, 1.0), 0.0)


def totals(scape, cells, steps, levels):
    """Masses, first moments and the weighted squared error of ``levels[codes]`` (never cancelling)."""
    parts = scape.split(cells, steps.breaks)
    code = steps.codes[np.searchsorted(steps.breaks, 0.5 * (parts.left + parts.right))]
    count = len(levels)
    mass = np.bincount(code, parts.mass, count)
    first = np.bincount(code, parts.mass * parts.mean, count)
    deviation = parts.mean - levels[code]
    return Totals(mass, first, math.fsum(parts.mass * deviation * deviation + parts.spread))
