"""From the dynamic program's levels to a stationary point of the continuous problem.

With the pieces chosen for given levels y, the error L(y) (Few-bit Backward, eq. 4) has the gradient

    dL/dy_k = 2 (y_k M_k - S_k),   M_k, S_k the mass and the integral of f' w over the pieces of k,

and, because a break between levels l and r sits where f' = (y_l + y_r) / 2 and moves with it,

    H = 2 diag(M) - 1/2 sum over breaks of (w / |f''|) |y_r - y_l| (e_l + e_r)(e_l + e_r)^T.

Newton steps are tried first, then the exact minimizer for the present pieces (Lloyd's step, which
cannot raise the error); a step is kept only if it lowers the error, or leaves it where rounding
cannot tell the difference and lowers the gradient. At a stationary point
y_k is the mean of f' over its pieces and f' at each break is the mean of its two levels, which is
the gradient in s (eq. 5) equal to zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fewbit.solver.steps import Steps, crossing_points, nearest_steps, slope_density, tidy, totals

_MOST_STEPS = 200
RESIDUAL = 1e-10
ROUNDING = 1e-15


@dataclass(frozen=True)
class Solution:
    """Levels, their pieces, the error, and the largest |dL/dy| over the levels that are free."""

    levels: np.ndarray
    steps: Steps
    error: float
    residual: float


class NearestPieces:
    """Form ``levels``: the pieces follow from the levels alone."""

    def __init__(self, scape, cells):
        self.scape, self.cells = scape, cells

    def steps(self, levels, _previous):
        if (np.diff(levels) <= 0).any():
            return None
        return nearest_steps(self.scape, self.cells, levels)


class ContiguousPieces:
    """Form ``intervals``: each break moves downhill to the nearest place where f' = (y_l + y_r) / 2."""

    def __init__(self, scape, cells):
        self.scape, self.cells = scape, cells

    def steps(self, levels, previous):
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
        """The point between floor and ceiling reached from ``at`` by moving downhill."""
        cells, threshold = self.cells, 0.5 * (lower + upper)
        sign = np.sign(upper - lower)
        # Positive where a point is better served by the piece on its right.
        ends = sign * (np.stack([cells.value_left, cells.value_right], axis=1).ravel() - threshold)
        minima = np.flatnonzero((ends[:-1] <= 0) & (ends[1:] > 0))
        i = int(np.clip(np.searchsorted(cells.left, at, side="right") - 1, 0, len(cells) - 1))
        here = ends[2 * i]
        if at > cells.left[i]:
            here = sign * (self.scape.derivative(np.array([at]))[0] - threshold)
        rank = np.searchsorted(minima, 2 * i, side="right" if here > 0 else "left")
        rank -= here > 0
        if not 0 <= rank < len(minima):
            return at, 0.0
        cell, between = divmod(int(minima[rank]), 2)
        if between:
            found, density = 0.5 * (cells.right[cell] + cells.left[cell + 1]), 0.0
        else:
            which = np.array([cell])
            point = crossing_points(self.scape, cells, which, np.array([threshold]))
            found, density = point[0], slope_density(self.scape, cells, which, point)[0]
        return (float(found), float(density)) if floor < found < ceiling else (at, 0.0)


def refine(pieces, levels, steps, fixed, *, most_steps=_MOST_STEPS):
    """Improve ``levels`` (K,) until stationary; ``fixed`` (K,) marks levels that must stay."""
    scape, cells = pieces.scape, pieces.cells
    free = ~fixed
    best = totals(scape, cells, steps, levels)
    for _ in range(most_steps):
        if _residual(levels, best, free) < 1e-3 * RESIDUAL * min(1.0, best.mass.sum()):
            break
        for proposal in _proposals(levels, steps, best, free):
            if not np.isfinite(proposal).all():
                continue
            moved = pieces.steps(proposal, steps)
            if moved is None:
                continue
            total = totals(scape, cells, moved, proposal)
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
    """Newton's step, shorter ones, and Lloyd's."""
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
