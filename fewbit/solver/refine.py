"""Move the levels of a step function to a stationary point of the error L(y), the integral of (f' - q)^2 w (Few-bit Backward, eq. 4).

If the pieces are optimal for the levels y, dL/dy_k = 2 (y_k M_k - S_k), with M_k and S_k the integrals of w and of f' w over the
pieces of level k. A break between levels l and r is at f' = (y_l + y_r) / 2 and moves with them. So, with unit vectors e_k,

    H = 2 diag(M) - 1/2 sum over breaks of (w / |f''|) |y_r - y_l| (e_l + e_r)(e_l + e_r)^T.

Newton steps are tried first, then Lloyd's step, which cannot raise the error. A step has to lower the error, or the
gradient at equal errors up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fewbit.solver.steps import Steps, crossing_points, nearest_steps, slope_density, tidy, totals

_MOST_STEPS = 200
RESIDUAL = 1e-10
"""Largest absolute entry of the gradient at which the levels count as stationary."""
ROUNDING = 1e-15
"""Relative change of an error that rounding can cause."""


@dataclass(frozen=True)
class Solution:
    """A step function and its error.

    Attributes:
        levels: float64 (K,).
        error: The integral of (f' - q)**2 w.
        residual: The largest |dL/dy_k| over the levels that are not pinned.
    """

    levels: np.ndarray
    steps: Steps
    error: float
    residual: float


class NearestPieces:
    """The pieces of a table of form "levels": each x belongs to the level nearest to f'(x)."""

    def __init__(self, landscape, cells):
        self.landscape, self.cells = landscape, cells

    def steps(self, levels, _previous):
        """Return the pieces, or None if the levels do not ascend strictly."""
        if (np.diff(levels) <= 0).any():
            return None
        return nearest_steps(self.landscape, self.cells, levels)


class ContiguousPieces:
    """The pieces of a table of form "intervals", in which every piece has its own level."""

    def __init__(self, landscape, cells):
        self.landscape, self.cells = landscape, cells

    def steps(self, levels, previous):
        """Return the pieces, found by moving the previous breaks downhill, or None if breaks become equal."""
        cells = self.cells
        breaks, density = previous.breaks.copy(), np.zeros(len(previous.breaks))
        codes = previous.codes
        floor = -np.inf
        for i, at in enumerate(breaks):
            lower, upper = levels[codes[i]], levels[codes[i + 1]]
            ceiling = breaks[i + 1] if i + 1 < len(breaks) else np.inf
            at, density[i] = self._settle(at, lower, upper, floor, ceiling)
            breaks[i] = floor = at
        if (np.diff(breaks) <= 0).any() or len(cells) == 0:
            return None
        return Steps(breaks, codes, density)

    def _settle(self, at, lower, upper, floor, ceiling):
        """Move a break from `at` to the next local minimum of the error in (floor, ceiling); return (x, w / |f''| there)."""
        cells, threshold = self.cells, 0.5 * (lower + upper)
        sign = np.sign(upper - lower)
        # `ends` is positive at points that have a smaller error in the piece on the right.
        ends = sign * (np.stack([cells.value_left, cells.value_right], axis=1).ravel() - threshold)
        minima = np.flatnonzero((ends[:-1] <= 0) & (ends[1:] > 0))
        i = int(np.clip(np.searchsorted(cells.left, at, side="right") - 1, 0, len(cells) - 1))
        here = ends[2 * i]
        if at > cells.left[i]:
            here = sign * (self.landscape.derivative(np.array([at]))[0] - threshold)
        rank = np.searchsorted(minima, 2 * i, side="right" if here > 0 else "left")
        rank -= here > 0
        if not 0 <= rank < len(minima):
            return at, 0.0
        cell, between = divmod(int(minima[rank]), 2)
        if between:
            found, density = 0.5 * (cells.right[cell] + cells.left[cell + 1]), 0.0
        else:
            which = np.array([cell])
            point = crossing_points(self.landscape, cells, which, np.array([threshold]))
            found, density = point[0], slope_density(self.landscape, cells, which, point)[0]
        return (float(found), float(density)) if floor < found < ceiling else (at, 0.0)


def refine(pieces, levels, steps, fixed, *, most_steps=_MOST_STEPS):
    """Improve levels until the error is stationary.

    `pieces` is a `NearestPieces` or `ContiguousPieces`. The search starts with `levels` (K,) and `steps`; `fixed`, bool (K,), are the
    pinned levels.
    """
    landscape, cells = pieces.landscape, pieces.cells
    free = ~fixed
    best = totals(landscape, cells, steps, levels)
    for _ in range(most_steps):
        if _residual(levels, best, free) < 1e-3 * RESIDUAL * min(1.0, best.mass.sum()):
            break
        for proposal in _proposals(levels, steps, best, free):
            if not np.isfinite(proposal).all():
                continue
            moved = pieces.steps(proposal, steps)
            if moved is None:
                continue
            total = totals(landscape, cells, moved, proposal)
            if total.error < best.error or (
                total.error <= best.error * (1 + ROUNDING)
                and _residual(proposal, total, free) < _residual(levels, best, free)
            ):
                levels, steps, best = proposal, moved, total
                break
        else:
            break
    return Solution(levels, tidy(steps), best.error, _residual(levels, best, free))


def _residual(levels, total, free):
    gradient = 2 * (levels * total.mass - total.first)
    return float(np.abs(gradient[free]).max(initial=0.0))


def _proposals(levels, steps, total, free):
    """Yield the levels after Newton's step, a quarter of it, and Lloyd's step."""
    gradient = 2 * (levels * total.mass - total.first)
    step = np.zeros_like(levels)
    hessian = _hessian(levels, steps, total)[np.ix_(free, free)]
    try:
        step[free] = np.linalg.solve(hessian, -gradient[free])
        downhill = gradient @ step < 0
    except np.linalg.LinAlgError:
        downhill = False
    if downhill:
        yield levels + step
        yield levels + 0.25 * step
    occupied = free & (total.mass > 0)
    lloyd = levels.copy()
    lloyd[occupied] = total.first[occupied] / total.mass[occupied]
    yield lloyd


def _hessian(levels, steps, total):
    hessian = np.diag(2 * total.mass)
    left, right = steps.codes[:-1], steps.codes[1:]
    pull = 0.5 * steps.slope_density * np.abs(levels[right] - levels[left])
    for row in (left, right):
        for column in (left, right):
            np.subtract.at(hessian, (row, column), pull)
    empty = total.mass <= 0
    hessian[empty, empty] = 1.0
    return hessian
