"""Find the levels of unbiased codes with shared randomness, objective "shared" (QUIC-FL, Ben Basat et al., 2022).

Encoder and decoder share a random number h, which is uniform in {0, ..., H-1}. The decoder restores the level R[h][c]
from c, one of K codes. The code is exactly unbiased if, for every value v of the stand-in
(`fewbit.solver.drawn.unbiased`), the mean of the restored number over h and over the encoder's own randomness is v.
`fewbit.table.staircase` describes the best encoder for given levels R, and its states. Let M_k be the mean of state k,
S_k the variance of its H levels, and w the weight. The expected squared error is

    E = integral of [(v - M_k)(M_{k+1} - v) + (1 - p) S_k + p S_{k+1}] w,   v = (1 - p) M_k + p M_{k+1}.

Here v lies between M_k and M_{k+1}. Let t(v) be half the slope of the transition from state k to state k + 1. By the
envelope theorem,

    dE/dR[h][c] = 2 / H * integral over the draws of code c with this h of (R[h][c] - t(v)) w.

The mean of the first state is the least v, and that of the last state is the greatest v, because a state with a mean
beyond would only raise the error. So the means of the first and of the last column of R are given. A quasi-Newton
method (L-BFGS) minimizes E under these two constraints.

**The lower bound.** Let t(v) be any function, E[...] the integral with the weight w, R the restored number, and R_h the
restored number for a given h. For every unbiased code

    E[t v] = E[t R] <= mean over h of sqrt(kappa E[R_h**2]) <= sqrt(kappa E[R**2]),
    kappa = max over K levels c_j of E[max_j (2 c_j t - c_j**2)] = E[t**2] - D_K(t).

Here D_K(t) is the least squared error with which K levels can represent t(v). For each h, E[2 t R_h - R_h**2] <= kappa,
because R_h has at most K values. The first inequality follows if R_h is scaled. So the variance of every unbiased code,
with any amount of shared randomness, is at least

    E[R**2] - E[v**2] >= E[t v]**2 / kappa - E[v**2].

If t is constant on cells, dynamic programming finds D_K(t) exactly. Apart from the scale of t, the bound is concave in
t. So it is improved by steps t <- t + step * (mean of v in a cell - level of t in the best quantizer). The first t is
that of a code with more shared randomness. With little shared randomness, no code reaches the bound: for many levels,
the least variance with H values of h is about 1 + 1 / H**2 times the least variance with unlimited shared randomness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fewbit.extras import needed_for
from fewbit.solver.partition import best_breaks
from fewbit.solver.segments import Items
from fewbit.solver.steps import threshold_steps
from fewbit.table.staircase import build_staircase

RESIDUAL = 1e-7
"""The largest derivative of the error with respect to a level at which a code counts as stationary."""
_MOST_STEPS, _REFERENCE_STEPS = 600, 100
# Up to this number of levels, the search runs twice.
_FEW_LEVELS = 512
# The first t of the lower bound comes from a code with up to this many levels in all and this many values of h.
_REFERENCE_LEVELS, _REFERENCE_ROWS = 2**10, 2**8
_CELLS_PER_LEVEL, _LEAST_CELLS = 64, 1024
# Steps that improve the bound: {most levels: (number of steps, length of the first step)}.
_ASCENTS = {32: (300, 0.1), 64: (100, 0.03), 256: (6, 0.005)}


@dataclass(frozen=True)
class SharedSolution:
    """The levels of a code.

    Attributes:
        levels: float64 (H, K); every row ascends.
        error: The expected squared error.
        residual: The largest derivative of the error with respect to a level, in directions that the constraints allow.
    """

    levels: np.ndarray
    error: float
    residual: float


def interleaved(levels, rows):
    """Return the levels (H, K) from which the search starts: K levels, shifted for each h by another part of a gap.

    Args:
        levels: float64 (K,), ascending.
        rows: The number of values of the shared random number, H.
    """
    # This start reaches half a gap beyond both ends. It gave the least errors of several starts that were tried.
    below, above = 1.5 * levels[0] - 0.5 * levels[1], 1.5 * levels[-1] - 0.5 * levels[-2]
    outer = [below, *levels, above]
    shift = (np.arange(rows) + 0.5) / rows - 0.5
    place = np.arange(len(levels)) + shift[:, None]
    return np.interp(place, np.arange(-1, len(levels) + 1), outer)


def refine_shared(landscape, cells, levels, ends, most_steps=_MOST_STEPS):
    """Improve levels until the error is stationary.

    Args:
        landscape: The stand-in and the weight.
        cells: The cells of the domain.
        levels: float64 (H, K), the first levels.
        ends: The least and the greatest value of the stand-in.
        most_steps: The largest number of steps. With 0 steps, the levels only get the required means.

    Returns:
        A `SharedSolution`.
    """
    levels = _constrained(levels, ends)
    state = _evaluate(landscape, cells, levels)
    if most_steps == 0:
        return SharedSolution(levels, state.error, math.inf)
    # The error has a small curvature along a level that is used for few numbers. The first scale makes the curvatures
    # similar. With the second scale the search takes more steps, but may find a code with a smaller error.
    scales = [np.sqrt(np.maximum(state.use, 1e-6 * state.use.max()))]
    if levels.size <= _FEW_LEVELS:
        scales.append(np.ones_like(levels))
    found = [_descend(landscape, cells, levels, ends, scale, most_steps) for scale in scales]
    return min(found, key=lambda solution: solution.error)


def _descend(landscape, cells, levels, ends, scale, most_steps):
    """Minimize the error over levels times `scale`, by L-BFGS. Return a `SharedSolution`."""
    with needed_for("the objective shared"):
        from scipy.optimize import minimize

    def evaluate(x):
        moved = x.reshape(levels.shape) / scale
        state = _evaluate(landscape, cells, _constrained(moved, ends))
        gradient = np.empty_like(moved)
        np.put_along_axis(gradient, np.argsort(moved, axis=1), state.gradient, axis=1)
        return state.error, (gradient / scale).ravel()

    found = minimize(
        evaluate,
        (levels * scale).ravel(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": most_steps, "maxcor": 30, "ftol": 0.0, "gtol": 1e-11},
    )
    better = _constrained(found.x.reshape(levels.shape) / scale, ends)
    state = _evaluate(landscape, cells, better)
    return SharedSolution(better, state.error, float(np.abs(state.gradient).max()))


def _constrained(levels, ends):
    """Return levels with ascending rows, whose first and last columns have the means `ends`."""
    levels = np.sort(levels, axis=1)
    levels[:, 0] += ends[0] - levels[:, 0].mean()
    levels[:, -1] += ends[1] - levels[:, -1].mean()
    return np.sort(levels, axis=1)


@dataclass(frozen=True)
class _State:
    error: float
    gradient: np.ndarray
    use: np.ndarray


def _evaluate(landscape, cells, levels):
    rows, columns = levels.shape
    means, codes, slopes = build_staircase(levels)
    spread = levels[np.arange(rows), codes].var(axis=1)
    steps = threshold_steps(landscape, cells, means[1:-1])
    parts = landscape.split(cells, steps.breaks)
    state = steps.codes[np.searchsorted(steps.breaks, 0.5 * (parts.left + parts.right))]
    above, below = parts.mean - means[state], means[state + 1] - parts.mean
    own = np.maximum(parts.mass * above * below - parts.spread, 0.0)
    gap = np.maximum(np.diff(means), 1e-300)
    count = len(means) - 1
    # For numbers between two neighboring states: the mass with which the upper and the lower state are drawn.
    upper = np.bincount(state, parts.mass * above, count) / gap
    lower = np.bincount(state, parts.mass * below, count) / gap
    error = math.fsum(own) + math.fsum(lower * spread[:-1] + upper * spread[1:])
    mass, target = np.append(lower, 0.0), np.append(lower * slopes, 0.0)
    mass[1:] += upper
    target[1:] += upper * slopes
    place = (np.arange(rows) * columns + codes).ravel()
    use = np.bincount(place, np.repeat(mass, rows), rows * columns).reshape(levels.shape)
    wanted = np.bincount(place, np.repeat(target, rows), rows * columns).reshape(levels.shape)
    gradient = 2.0 / rows * (use * levels - wanted)
    # The means of the first and of the last column are fixed.
    gradient[:, 0] -= gradient[:, 0].mean()
    gradient[:, -1] -= gradient[:, -1].mean()
    return _State(error, gradient, use)


def lower_bound(landscape, plain, found, effort):
    """Return a lower bound on the error of every unbiased code with K levels, for any number of values of h.

    Args:
        landscape: The stand-in and the weight.
        plain: float64 (K,), the levels of objective "unbiased".
        found: float64 (H, K), the levels of the solved code. If K is small enough, a code with more values of h is
            made and used instead.
        effort: The threads and the progress function.
    """
    columns = len(plain)
    levels, rows = found, min(_REFERENCE_ROWS, _REFERENCE_LEVELS // columns)
    if rows > len(found):
        wide = landscape.cells(_LEAST_CELLS)
        levels = refine_shared(
            landscape, wide, interleaved(plain, rows), plain[[0, -1]], _REFERENCE_STEPS
        ).levels
    cells = landscape.cells(max(_LEAST_CELLS, _CELLS_PER_LEVEL * columns))
    order = np.argsort(cells.mean, kind="stable")
    mass, value = cells.mass[order], cells.mean[order]
    means, _, slopes = build_staircase(levels)
    target = _extended(value, 0.5 * (means[1:] + means[:-1]), slopes)
    count, first = next(choice for most, choice in _ASCENTS.items() if columns <= most)
    best = 0.0
    for step in range(count + 1):
        found, target, level = _bound(mass, value, target, columns, effort)
        best = max(best, found - cells.second_moment)
        target = target + first / (1.0 + 0.1 * step) * (value - level)
        target = np.maximum.accumulate(target)
    return best


def _extended(x, points, values):
    """Return the piecewise linear function through the given points. Beyond them it continues with the end slopes."""
    y = np.interp(x, points, values)
    for inner, outer in ((1, 0), (-2, -1)):
        slope = (values[outer] - values[inner]) / (points[outer] - points[inner])
        beyond = x < points[0] if outer == 0 else x > points[-1]
        y[beyond] = values[outer] + slope * (x[beyond] - points[outer])
    return y


def _bound(mass, value, target, columns, effort):
    """Return a lower bound on E[R**2], and the scaled target and its best levels.

    Args:
        mass: float64 (n,), the masses of cells.
        value: float64 (n,), the means of the stand-in in the cells.
        target: float64 (n,), ascending, the function t on the cells.
        columns: The number of levels K.
        effort: The threads and the progress function.
    """
    items = Items(mass, target)
    error, breaks, _ = best_breaks(items, columns, monge=True, effort=effort)
    level_of = np.searchsorted(breaks, np.arange(len(mass)), side="right")
    total = np.bincount(level_of, mass, columns)
    level = np.bincount(level_of, mass * target, columns) / np.where(total > 0, total, 1.0)
    product, kappa = float(np.sum(mass * target * value)), float(np.sum(mass * target**2)) - error
    scale = product / kappa if kappa > 0 else 0.0
    return product * scale, scale * target, scale * level[level_of]
