"""The function `solve`, which makes a table with a proven lower bound on its error."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fewbit._version import __version__
from fewbit.errors import SolveError
from fewbit.functions.callables import resolve
from fewbit.solver.cells import merge, survey
from fewbit.solver.certificate import widened
from fewbit.solver.dynamic_program import thread_count
from fewbit.solver.finish import (
    closed_sides,
    closed_sides_of_knots,
    contiguous_start,
    with_outer_pieces,
)
from fewbit.solver.minimax import largest_deviation, minimax_intervals, minimax_levels
from fewbit.solver.partition import Effort
from fewbit.solver.refine import RESIDUAL, ContiguousPieces, NearestPieces, Solution, refine
from fewbit.solver.relaxation import relax_intervals, relax_levels, relax_unbiased
from fewbit.solver.request import (
    check_request,
    checked_domain,
    count_levels,
    domain_of,
    is_integer,
)
from fewbit.solver.steps import nearest_steps, totals
from fewbit.solver.unbiased import build_stand_in, refine_unbiased, variance, with_tails
from fewbit.solver.weight import make_weight
from fewbit.table import MOST_PIECES, Knots, Table, lower_pieces
from fewbit.table.checks import FLOAT32_MAX, checked_function, checked_weight

_FINE = 4096
_MOST_CELLS = 2**22
_MOST_DEFAULT_CELLS = 2**18
_MOST_UNBIASED_CELLS = 2**17
# If f' has more monotone pieces than this, the default grid depends on their number.
_FEW_PIECES = 8
_LARGE_GAP = 0.02
# The number of pieces of a table is estimated before the search, from levels for this many atoms. The estimate is
# wrong by a few percent.
_ESTIMATE_ATOMS, _ESTIMATE_MARGIN = 1024, 1.1


def solve(
    function: str | Callable,
    bits: int | None = None,
    *,
    form: str = "levels",
    weight: object = "uniform",
    domain: Sequence[float] | None = None,
    objective: str = "mse",
    tails: str = "free",
    levels: int | None = None,
    grid: int | None = None,
    refine: bool = True,
    parameters: Mapping[str, float] | None = None,
    derivative: Callable | None = None,
    kinks: Sequence[float] | None = None,
    threads: int | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> Table:
    """Find the best approximation of f' by a step function with few levels (Few-bit Backward, eq. 4 and 9).

    Args:
        function: A name from `fewbit.functions`, "package.module:f", or a callable f for NumPy arrays or torch tensors: the
            activation, not its derivative.
        bits: 1 to 8; the table has at most 2**bits levels.
        form: "levels" (pieces may share a level) or "intervals" (as in the paper: every piece has its own level).
        weight: The density by which squared errors count: "uniform", "normal", "normal:MEAN,STD", "scales",
            "scales:LOW,HIGH", samples, a callable, or another form that `fewbit.solver.weight.make_weight` takes.
        domain: The interval (a, b) on which errors are measured; by default the range of the samples, or the function's own
            domain, extended to 8 standard deviations of a normal weight.
        objective: What is minimized: "mse" (the squared error), "minimax" (the largest error), or "unbiased" (the
            squared error if one of two levels is drawn at random such that the mean of the draw is f').
        tails: "pinned" to give the outermost pieces the limits of f' at both infinities as levels, or "free".
        levels: The number of levels, 2 to 256, instead of `bits`.
        grid: The number of cells; more narrow the gap between error and lower bound.
        refine: Whether to improve the first levels until the error is stationary.
        parameters: Parameters of a named function.
        derivative: The derivative f' of a callable f, treated as exact if its integrals agree with f to 1e-7 of max |f'|.
        kinks: The points at which the derivative of a callable is not smooth.
        threads: The largest number of threads; by default the processors of this process.
        progress: Called as `progress(stage, done, total)`.

    Returns:
        A `fewbit.Table`, whose `error` and `lower_bound` hold on the whole domain. Its `solver` is a dict with version, grid,
        seconds and status: "exact" (no error), "optimal" (minimax), "unrefined", "stationary" (the gradient is at most about
        1e-10), or "stalled" (no step lowered the error before that).

    Raises:
        FunctionError: The function cannot be used.
        WeightError: The weight cannot be used.
        SolveError: An argument is out of range, or the request cannot be satisfied.
    """
    started = time.perf_counter()
    count, bits = count_levels(bits, levels)
    _check_arguments(form, objective, tails, threads, parameters, grid, progress)
    weight, domain = make_weight(weight), checked_domain(domain)
    checked_weight(weight.document())

    def resolved(on):
        return resolve(function, parameters, derivative=derivative, kinks=kinks, domain=on)

    f = resolved(domain or weight.domain)
    domain = domain_of(f, weight, domain)
    if domain != tuple(f.domain):
        # The kinks of a callable are searched on the domain of the table.
        f = resolved(domain)
    checked_function(f.name)
    slopes = _pinned_slopes(f, tails, count, form)
    landscape = survey(
        f.derivative,
        f.kinks,
        weight,
        domain,
        f.name,
        panels=f.panels,
        accuracy=f.accuracy,
    )
    _warn_of_saturation(f, domain)
    cells, atoms = _grid(grid, count, form, objective, landscape)
    request = _Request(
        count=count,
        form=form,
        objective=objective,
        slopes=slopes,
        grid=cells,
        atoms=atoms,
        refine=refine,
        effort=Effort(threads or thread_count(), progress or _silent),
    )
    _check_size(landscape, request, f)
    outcome = _METHODS[objective](landscape, request, f)
    if len(outcome.codes) > MOST_PIECES:
        raise _too_many_pieces(landscape, request, f, len(outcome.codes))
    error, bound = _certified(outcome, f, objective)
    if error == 0 and objective != "minimax":
        _check_exact(landscape, outcome)
    relative_error = _relative(error, outcome.scale, objective)
    if objective != "minimax":
        error, bound = landscape.weight.restore(error, bound)
    table = Table(
        function=f.name,
        parameters=dict(f.parameters),
        bits=bits,
        form=form,
        objective=objective,
        weight=weight.document(),
        domain=domain,
        tails=tails,
        levels=outcome.levels,
        breaks=outcome.breaks,
        codes=outcome.codes,
        closed=outcome.closed,
        error=error,
        lower_bound=bound,
        relative_error=relative_error,
        solver={
            "version": __version__,
            "grid": request.grid,
            "status": "exact" if error == 0 else outcome.status,
            "seconds": round(time.perf_counter() - started, 4),
        },
        knots=outcome.knots,
        knots_error=outcome.knots_error,
        _function=f,
    )
    if grid is None:
        _warn_of_gap(table)
    return table


def _check_arguments(form, objective, tails, threads, parameters, grid, progress):
    check_request(form, objective, tails, parameters)
    if grid is not None and not (is_integer(grid) and 16 <= grid <= _MOST_CELLS):
        raise SolveError(f"grid: expected an integer from 16 to {_MOST_CELLS}, got {grid!r}")
    if progress is not None and not callable(progress):
        raise SolveError(f"progress: expected a callable, got {progress!r}")
    if threads is not None and not (is_integer(threads) and threads >= 1):
        raise SolveError(f"threads: expected an integer of at least 1, got {threads!r}")
    if objective == "unbiased" and form != "levels":
        raise SolveError("objective unbiased: expected form levels (the draw is between levels)")


def _check_size(landscape, request, f):
    turns = 1 + len(landscape.extrema) + len(landscape.kinks)
    if request.form == "intervals" or turns * (request.count - 1) <= MOST_PIECES:
        return
    cells = landscape.cells(_FINE)
    levels = relax_levels(cells, request.count, np.empty(0), Effort(1), _ESTIMATE_ATOMS).levels
    is_drawn = request.objective == "unbiased"
    thresholds = levels[1:-1] if is_drawn else 0.5 * (levels[1:] + levels[:-1])
    before, after = (np.searchsorted(thresholds, x) for x in (cells.value_left, cells.value_right))
    pieces = 1 + int(np.abs(after - before).sum() + np.count_nonzero(after[:-1] != before[1:]))
    if pieces > _ESTIMATE_MARGIN * MOST_PIECES:
        raise _too_many_pieces(landscape, request, f, pieces)


def _too_many_pieces(landscape, request, f, pieces):
    low, high = landscape.domain
    return SolveError(
        f"{f.name}: expected at most {MOST_PIECES} pieces, got about {pieces}: the derivative turns "
        f"{len(landscape.extrema)} times on the domain [{low:g}, {high:g}]; choose fewer than {request.count} levels "
        "(--bits, --levels) or a smaller domain (--domain)"
    )


def _warn_of_saturation(f, domain):
    # The tables of `value` quantize numbers. Their users expect that numbers beyond the outermost levels are cut off.
    if f.name != "value" and any(map(math.isinf, f.slopes)):
        warnings.warn(
            f"{f.name}: the derivative is unbounded and q is not, so f' - q grows without limit outside "
            f"[{domain[0]:g}, {domain[1]:g}]",
            stacklevel=3,
        )


def _warn_of_gap(table):
    if table.gap > _LARGE_GAP and table.relative_error > 1e-8:
        warnings.warn(
            f"{table.function}: the error may be up to {100 * table.gap:.2g} % above the optimum;"
            f" a larger grid= than {table.solver['grid']} narrows the gap",
            stacklevel=3,
        )


def _certified(outcome, f, objective):
    error, bound = outcome.error, min(outcome.lower_bound, outcome.error)
    if outcome.lower_bound > error * (1 + 1e-9) + 1e-27 * outcome.scale:
        raise SolveError(
            f"{f.name}: the lower bound {outcome.lower_bound!r} exceeds the error {error!r}; "
            "the quadrature did not resolve f' or w (a finer grid may)"
        )
    return widened(error, bound, accuracy=f.accuracy, mass=outcome.mass, objective=objective)


def _check_exact(landscape, outcome):
    """Raise SolveError if an error of 0 ignores cells with underflowing mass."""
    cells = landscape.supporting_cells(_FINE)
    cells = cells.take(cells.mass == 0)
    middle = 0.5 * (cells.left + cells.right)
    level = outcome.levels[outcome.codes[np.searchsorted(outcome.breaks, middle)]]
    wrong = (cells.lowest != level) | (cells.highest != level)
    if outcome.knots is not None:  # every level is drawn exactly
        wrong = ~(np.isin(cells.lowest, outcome.levels) & np.isin(cells.highest, outcome.levels))
    wrong &= landscape.weight.weight.density(middle) > 0
    if wrong.any():
        raise SolveError(
            f"weight: expected values that float64 can integrate together, got positive values at x = "
            f"{middle[wrong][0]:g} that are negligible beside the largest ones, and errors only there"
        )


@dataclass(frozen=True)
class _Request:
    count: int
    form: str
    objective: str
    slopes: tuple[float, float] | None
    grid: int
    atoms: int | None  # largest number of atoms in the discrete problem (form levels)
    refine: bool
    effort: Effort


@dataclass(frozen=True)
class _Outcome:
    levels: np.ndarray
    breaks: np.ndarray
    codes: np.ndarray
    closed: tuple[str, ...]
    error: float
    lower_bound: float
    scale: float  # divisor of the relative error: the integral of f'**2 w, for minimax max |f'|
    mass: float
    status: str
    knots: Knots | None = None
    knots_error: float | None = None


def _solve_mse(landscape, request, f):
    coarse, fine = _both_cells(landscape, request.grid)
    count = request.count
    if request.form == "levels":
        pinned = np.unique(request.slopes) if request.slopes else np.empty(0)
        relaxed = relax_levels(coarse, count, pinned, request.effort, request.atoms)
        pieces = NearestPieces(landscape, fine)
        levels, fixed = relaxed.levels, relaxed.fixed
        steps = nearest_steps(landscape, fine, levels)
    else:
        relaxed = relax_intervals(coarse, count, request.slopes, request.effort)
        pieces = ContiguousPieces(landscape, fine)
        levels, fixed, steps = contiguous_start(relaxed, landscape, request.slopes is not None)
    if request.refine:
        solution = refine(pieces, levels, steps, fixed)
    else:
        solution = Solution(levels, steps, totals(landscape, fine, steps, levels).error, math.inf)
    levels, steps = with_outer_pieces(solution.levels, solution.steps, request, landscape, f)
    return _Outcome(
        levels=levels,
        breaks=steps.breaks,
        codes=steps.codes,
        closed=closed_sides(f, steps, levels),
        error=solution.error,
        lower_bound=relaxed.lower_bound,
        scale=fine.second_moment,
        mass=float(fine.mass.sum()),
        status=_status(request, solution.residual, levels, fine),
    )


def _solve_minimax(landscape, request, f):
    cells = landscape.supporting_cells(max(request.grid, _FINE))
    if request.form == "levels":
        pinned = np.unique(request.slopes) if request.slopes else np.empty(0)
        levels, steps, bound = minimax_levels(landscape, cells, request.count, pinned)
    else:
        levels, steps, bound = minimax_intervals(landscape, cells, request.count, request.slopes)
    error = largest_deviation(landscape, cells, steps, levels)
    levels, steps = with_outer_pieces(levels, steps, request, landscape, f)
    return _Outcome(
        levels=levels,
        breaks=steps.breaks,
        codes=steps.codes,
        closed=closed_sides(f, steps, levels),
        error=error,
        lower_bound=bound,
        scale=float(np.max(np.abs([cells.lowest, cells.highest]))),
        mass=float(cells.mass.sum()),
        status="optimal",
    )


def _solve_unbiased(landscape, request, f):
    stand_in = _varying_stand_in(landscape, request, f)
    smooth = _with_derivative(landscape, stand_in)
    coarse, fine = _both_cells(smooth, request.grid)
    values = [stand_in.values.min(), stand_in.values.max(), *(request.slopes or ())]
    ends = np.unique([min(values), max(values), *(request.slopes or ())])
    if request.count < len(ends):
        raise SolveError(
            f"objective unbiased, tails pinned: expected at least {len(ends)} levels "
            f"(the least and greatest f' and the slopes between), got {request.count}"
        )
    relaxed = relax_unbiased(coarse, request.count, ends, request.effort)
    levels, residual = relaxed.levels, math.inf
    if request.refine:
        levels, residual = refine_unbiased(smooth, fine, levels, relaxed.fixed)
    bias = _bias(landscape, stand_in, fine)
    if request.slopes is not None:
        stand_in = with_tails(stand_in, request.slopes)
    knots = Knots(stand_in.points, stand_in.values, closed_sides_of_knots(f, stand_in))
    breaks, codes, closed = lower_pieces(levels, knots)
    return _Outcome(
        levels=levels,
        breaks=breaks,
        codes=codes,
        closed=closed,
        error=variance(smooth, fine, levels) + bias,
        lower_bound=relaxed.lower_bound + bias,
        scale=landscape.integrate(fine.left, fine.right).second_moment,
        mass=float(fine.mass.sum()),
        status=_status(request, residual, levels, fine),
        knots=knots,
        knots_error=stand_in.error + f.accuracy,
    )


def _varying_stand_in(landscape, request, f):
    stand_in = build_stand_in(landscape, request.count)
    if len(stand_in.points) > MOST_PIECES:
        raise _too_many_pieces(landscape, request, f, len(stand_in.points))
    if np.ptp(stand_in.values) == 0:
        raise SolveError(
            f"objective unbiased: expected a derivative that varies, got the constant "
            f"{stand_in.values[0]:g} for {f.name} (objective mse is exact)"
        )
    if np.ptp(stand_in.values) * FLOAT32_MAX < request.count - 1:
        raise SolveError(
            f"objective unbiased: expected a derivative with gaps between {request.count} levels that float32 "
            f"can divide by, got values from {stand_in.values.min():g} to {stand_in.values.max():g} for {f.name}"
        )
    return stand_in


def _with_derivative(landscape, stand_in):
    kinks = np.unique(stand_in.points)
    return replace(landscape, derivative=stand_in, kinks=kinks, extrema=np.empty(0))


def _bias(landscape, stand_in, cells):
    """Return the integral of (f' - stand-in)**2 w."""
    apart = replace(
        landscape,
        derivative=lambda x: landscape.derivative(x) - stand_in(x),
        kinks=np.unique(stand_in.points),
        extrema=np.empty(0),
    )
    return apart.integrate(cells.left, cells.right).second_moment


_METHODS = {
    "mse": _solve_mse,
    "minimax": _solve_minimax,
    "unbiased": _solve_unbiased,
}


def _both_cells(landscape, grid):
    """Return the cells of the discrete problem, and cells fine enough for integrals."""
    if grid >= _FINE:
        fine = landscape.cells(grid)
        return fine, fine
    # Coarse cells are unions of fine ones, so that error and lower bound use the same integrals.
    fine = landscape.cells(_FINE)
    return merge(fine, landscape.nodes(grid)), fine


def _relative(error, scale, objective):
    if scale <= 0:
        return 0.0
    return error / scale if objective == "minimax" else math.sqrt(error / scale)


def _silent(_stage, _done, _total):
    pass


def _status(request, residual, levels, cells):
    if not request.refine:
        return "unrefined"
    # The gradient is proportional to f' and to w.
    scale = max(1.0, float(np.abs(levels).max())) * min(1.0, float(cells.mass.sum()))
    return "stationary" if residual < RESIDUAL * scale else "stalled"


def _pinned_slopes(f, tails, count, form):
    if tails == "free":
        return None
    if not all(map(math.isfinite, f.slopes)):
        ends = " and ".join("none" if math.isnan(slope) else f"{slope:g}" for slope in f.slopes)
        raise SolveError(
            f"tails pinned: expected finite asymptotic slopes, got {ends} for {f.name}"
        )
    needed = 2 if form == "intervals" else len(set(f.slopes))
    if count < needed:
        raise SolveError(f"tails pinned: expected at least {needed} levels, got {count}")
    return tuple(f.slopes)


def _grid(grid, count, form, objective, landscape):
    """Return the number of cells, more if f' has many monotone pieces, and the largest number of atoms or None."""
    if grid is not None:
        return int(grid), None
    usual = max(_FINE, 256 * count)
    pieces = 1 + len(landscape.extrema) + len(landscape.kinks)
    if pieces <= _FEW_PIECES or objective == "minimax":
        return usual, None
    if form == "intervals":
        return max(_FINE, 64 * count), None
    if objective == "unbiased":
        return min(usual * math.ceil(pieces / 16), max(usual, _MOST_UNBIASED_CELLS)), None
    cells = min(usual * math.ceil(pieces / 4), max(usual, _MOST_DEFAULT_CELLS))
    return cells, max(_FINE, 128 * count)
