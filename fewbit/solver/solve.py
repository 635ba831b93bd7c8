"""``solve``: from a function and a request to a certified table.

The stages, each in a module of its own: the weight (``weight``), the cells of the domain
(``cells``), the discrete problem that bounds the continuous one and its exact optimum
(``relaxation``, on ``partition``, ``layers``, ``segments``), and the refinement to a stationary
point of the continuous problem (``refine``, ``unbiased``; ``minimax`` needs none).
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass, replace

import numpy as np

from fewbit._version import __version__
from fewbit.errors import SolveError
from fewbit.functions.callables import resolve
from fewbit.solver.cells import merge, survey
from fewbit.solver.certificate import widened
from fewbit.solver.dynamic_program import thread_count
from fewbit.solver.minimax import largest_deviation, minimax_intervals, minimax_levels
from fewbit.solver.partition import Effort
from fewbit.solver.refine import RESIDUAL, ContiguousPieces, NearestPieces, Solution, refine
from fewbit.solver.relaxation import relax_intervals, relax_levels, relax_unbiased
from fewbit.solver.request import (
    check_choice,
    check_parameters,
    checked_domain,
    count_levels,
    domain_of,
    is_integer,
)
from fewbit.solver.steps import Steps, nearest_steps, relabel, tidy, totals
from fewbit.solver.unbiased import build_stand_in, refine_unbiased, variance, with_tails
from fewbit.solver.weight import make_weight
from fewbit.table import FORMS, OBJECTIVES, TAILS, Knots, Table, lower_pieces

_FINE = 4096
_MOST_CELLS = 2**22
_MOST_DEFAULT_CELLS = 2**18
_MOST_UNBIASED_CELLS = 2**17
# If f' has more monotone pieces than this, the default grid depends on their number.
_FEW_PIECES = 8
_LARGE_GAP = 0.02
_FARTHEST = 1e30


def solve(
    function,
    bits=None,
    *,
    form="levels",
    weight="uniform",
    domain=None,
    objective="mse",
    tails="free",
    levels=None,
    grid=None,
    refine=True,
    parameters=None,
    derivative=None,
    kinks=None,
    threads=None,
    progress=None,
):
    """The best approximation of f' by a step function of few levels, as a :class:`fewbit.Table`.

    function: a name from ``fewbit.functions``, ``"package.module:f"``, or a callable f on NumPy
        arrays or torch tensors (the activation itself; ``derivative=`` and ``kinks=`` if known).
        A given derivative is compared with f to 1e-7 of max |f'| only, and then taken as exact:
        ``error`` and ``lower_bound`` are certified for the given derivative.
    bits: 1 to 8; 2**bits levels. levels: their number instead, 2 to 256.
    form: ``"levels"`` (pieces may share a level) or ``"intervals"`` (the paper's: one level each).
    weight: what the error is weighted with, see :func:`fewbit.solver.weight.make_weight`.
    domain: (a, b); by default the range that matters for the function, or the weight's.
    objective: ``"mse"``, ``"unbiased"`` or ``"minimax"``. tails: ``"free"`` or ``"pinned"``.
    grid: the number of cells of the discrete problem; more of them narrow the certified gap.
    refine: False keeps the levels of the discrete problem. parameters: of a named function.
    threads: at most so many threads (default: the processors of this process).
    progress: called as ``progress(stage, done, total)`` while the discrete problem is solved.

    The table's ``error`` and ``lower_bound`` hold for the continuous problem; its ``solver`` holds
    version, grid, status and seconds. The status is ``"exact"`` (error 0), ``"stationary"`` (the
    gradient is below 1e-10), ``"optimal"`` (minimax, to the last bit), ``"unrefined"`` or
    ``"stalled"`` (no further step lowered the error).

    Raises FunctionError, WeightError or SolveError with one line.
    """
    started = time.perf_counter()
    count, bits = count_levels(bits, levels)
    check_choice("form", form, FORMS)
    check_choice("objective", objective, OBJECTIVES)
    check_choice("tails", tails, TAILS)
    if threads is not None and not (is_integer(threads) and threads >= 1):
        raise SolveError(f"threads: expected an integer of at least 1, got {threads!r}")
    check_parameters(parameters)
    if objective == "unbiased" and form != "levels":
        raise SolveError("objective unbiased: expected form levels (the draw is between levels)")
    weight = make_weight(weight)

    def resolved(on):
        return resolve(function, parameters, derivative=derivative, kinks=kinks, domain=on)

    f = resolved(checked_domain(domain) or weight.domain)
    domain = domain_of(f, weight, checked_domain(domain))
    if domain != tuple(f.domain):
        # A callable is searched for kinks where it will be used.
        f = resolved(domain)
    slopes = _pinned_slopes(f, tails, count, form)
    if any(map(math.isinf, f.slopes)):
        warnings.warn(
            f"{f.name}: the derivative is unbounded, so q saturates outside [{domain[0]:g}, {domain[1]:g}]",
            stacklevel=2,
        )
    landscape = survey(
        f.derivative,
        f.kinks,
        weight,
        domain,
        f.name,
        panels=f.panels,
        accuracy=f.accuracy,
    )
    cells, atoms = _grid(grid, count, form, objective, landscape)
    request = _Request(
        count=count,
        form=form,
        slopes=slopes,
        grid=cells,
        atoms=atoms,
        refine=refine,
        effort=Effort(threads or thread_count(), progress or _silent),
    )
    outcome = _METHODS[objective](landscape, request, f)
    error, bound = outcome.error, min(outcome.lower_bound, outcome.error)
    if outcome.lower_bound > error * (1 + 1e-9) + 1e-28:
        raise SolveError(
            f"{f.name}: the lower bound {outcome.lower_bound!r} exceeds the error {error!r}; "
            "the quadrature did not resolve f' or w (a finer grid may)"
        )
    error, bound = widened(
        error, bound, accuracy=f.accuracy, mass=outcome.mass, objective=objective
    )
    status = "exact" if error == 0 else outcome.status
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
        relative_error=_relative(error, outcome.scale, objective),
        solver={
            "version": __version__,
            "grid": request.grid,
            "status": status,
            "seconds": round(time.perf_counter() - started, 4),
        },
        knots=outcome.knots,
        knots_error=outcome.knots_error,
        _function=f,
    )
    if grid is None and table.gap > _LARGE_GAP and table.relative_error > 1e-8:
        warnings.warn(
            f"{f.name}: the error may be up to {100 * table.gap:.2g} % above the optimum;"
            f" a larger grid= than {request.grid} narrows the gap",
            stacklevel=2,
        )
    return table


@dataclass(frozen=True)
class _Request:
    count: int
    form: str
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
    scale: float  # divisor of the relative error: the integral of f'**2 w, or max |f'|
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
        levels, fixed, steps = _contiguous_start(relaxed, landscape, request.slopes is not None)
    if request.refine:
        solution = refine(pieces, levels, steps, fixed)
    else:
        solution = Solution(levels, steps, totals(landscape, fine, steps, levels).error, math.inf)
    levels, steps = _finish(solution.levels, solution.steps, request, landscape, f)
    return _Outcome(
        levels=levels,
        breaks=steps.breaks,
        codes=steps.codes,
        closed=_closed(f, steps, levels),
        error=solution.error,
        lower_bound=relaxed.lower_bound,
        scale=fine.second_moment,
        mass=float(fine.mass.sum()),
        status=_status(request, solution.residual, levels, fine),
    )


def _solve_minimax(landscape, request, f):
    _, cells = _both_cells(landscape, request.grid)
    if request.form == "levels":
        pinned = np.unique(request.slopes) if request.slopes else np.empty(0)
        levels, steps, bound = minimax_levels(landscape, cells, request.count, pinned)
    else:
        levels, steps, bound = minimax_intervals(landscape, cells, request.count, request.slopes)
    error = largest_deviation(landscape, cells, steps, levels)
    levels, steps = _finish(levels, steps, request, landscape, f)
    return _Outcome(
        levels=levels,
        breaks=steps.breaks,
        codes=steps.codes,
        closed=_closed(f, steps, levels),
        error=error,
        lower_bound=bound,
        scale=float(np.max(np.abs([cells.lowest, cells.highest]))),
        mass=float(cells.mass.sum()),
        status="optimal",
    )


def _solve_unbiased(landscape, request, f):
    stand_in = build_stand_in(landscape, request.count)
    if np.ptp(stand_in.values) == 0:
        raise SolveError(
            f"objective unbiased: expected a derivative that varies, got the constant {stand_in.values[0]:g} "
            f"for {f.name} (objective mse is exact)"
        )
    smooth = replace(
        landscape, derivative=stand_in, kinks=np.unique(stand_in.points), extrema=np.empty(0)
    )
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
    apart = replace(smooth, derivative=lambda x: landscape.derivative(x) - stand_in(x))
    bias = apart.integrate(fine.left, fine.right).second_moment
    error = variance(smooth, fine, levels) + bias
    if request.slopes is not None:
        stand_in = with_tails(stand_in, request.slopes)
    knots = Knots(stand_in.points, stand_in.values, _knots_closed(f, stand_in))
    breaks, codes, closed = lower_pieces(levels, knots)
    return _Outcome(
        levels=levels,
        breaks=breaks,
        codes=codes,
        closed=closed,
        error=error,
        lower_bound=relaxed.lower_bound + bias,
        scale=landscape.integrate(fine.left, fine.right).second_moment,
        mass=float(fine.mass.sum()),
        status=_status(request, residual, levels, fine),
        knots=knots,
        knots_error=stand_in.error + f.accuracy,
    )


_METHODS = {"mse": _solve_mse, "minimax": _solve_minimax, "unbiased": _solve_unbiased}


def _both_cells(landscape, grid):
    """The cells of the discrete problem, and cells fine enough to integrate on."""
    if grid >= _FINE:
        fine = landscape.cells(grid)
        return fine, fine
    # The same integrals on both sides of the certificate: coarse cells are unions of fine ones.
    fine = landscape.cells(_FINE)
    return merge(fine, landscape.nodes(grid)), fine


def _contiguous_start(relaxed, landscape, pinned):
    """The discrete optimum without its empty pieces (pinned ones outside the domain stay)."""
    breaks, count = relaxed.breaks, len(relaxed.levels)
    low, high = landscape.domain
    starts, stops = np.append(low, breaks), np.append(breaks, high)
    used = stops > starts
    used &= np.isfinite(relaxed.levels)
    if pinned:
        used[[0, -1]] = True
    kept = np.flatnonzero(used)
    # A piece starts where the one before it ends; an empty piece leaves no trace.
    start = starts[kept[1:]]
    if pinned and count > 1 and not stops[-1] > starts[-1]:
        start[-1] = high
    steps = tidy(Steps(start, np.arange(len(kept)), np.zeros(len(start))))
    steps, levels, fixed = relabel(steps, relaxed.levels[kept], relaxed.fixed[kept])
    return levels, fixed, steps


def _finish(levels, steps, request, landscape, f):
    """Outermost pieces added where the domain ends without them; unused levels dropped.

    Pinned tails are such pieces, and so is the value that f' has at a kink on which the domain ends
    (values saturate there: ReLU's outputs are 0), if a level has it or another level is allowed.
    """
    breaks, codes = steps.breaks, steps.codes
    if request.slopes is not None and request.form == "levels":
        first, last = (int(np.argmin(np.abs(levels - s))) for s in request.slopes)
        low, high = landscape.domain
        if codes[0] != first:
            breaks, codes = np.append(low, breaks), np.append(first, codes)
        if codes[-1] != last:
            breaks, codes = np.append(breaks, high), np.append(codes, last)
    steps = Steps(breaks, codes, np.zeros(len(breaks)))
    steps, levels, _ = relabel(steps, levels, np.zeros(len(levels), bool))
    if request.slopes is None:
        for end in landscape.domain:
            if end in f.kinks:
                levels, steps = _with_end(
                    levels, steps, request, end, end == landscape.domain[1], f
                )
    return levels, steps


def _with_end(levels, steps, request, end, last, f):
    """The same with a piece beyond ``end`` that has torch's value there."""
    value = float(f.derivative(np.array([end]))[0])
    outer = levels[steps.codes[-1 if last else 0]]
    if value == outer:
        return levels, steps
    own = request.form == "intervals"
    if own or value not in levels:
        if len(levels) == request.count:
            return levels, steps
        place = (len(levels) if last else 0) if own else int(np.searchsorted(levels, value))
        levels = np.insert(levels, place, value)
        codes = steps.codes + (steps.codes >= place)
    else:
        place, codes = int(np.flatnonzero(levels == value)[0]), steps.codes
    if last:
        breaks, codes = np.append(steps.breaks, end), np.append(codes, place)
    else:
        breaks, codes = np.append(end, steps.breaks), np.append(place, codes)
    return levels, Steps(breaks, codes, np.zeros(len(breaks)))


def _closed(f, steps, levels):
    """At a kink the point joins the piece whose level is nearer to torch's gradient there."""
    closed = np.full(len(steps.breaks), "right", dtype=object)
    at = np.flatnonzero(np.isin(steps.breaks, f.kinks))
    if len(at):
        value = f.derivative(steps.breaks[at])
        before, after = levels[steps.codes[at]], levels[steps.codes[at + 1]]
        closed[at[np.abs(value - after) < np.abs(value - before)]] = "left"
    return tuple(closed)


def _knots_closed(f, stand_in):
    points, values = stand_in.points, stand_in.values
    closed = ["right"] * len(points)
    for i in np.flatnonzero(points[1:] == points[:-1]):
        value = f.derivative(points[i : i + 1])[0]
        if abs(value - values[i + 1]) < abs(value - values[i]):
            closed[i] = closed[i + 1] = "left"
    return tuple(closed)


def _relative(error, scale, objective):
    if scale <= 0:
        return 0.0
    return error / scale if objective == "minimax" else math.sqrt(error / scale)


def _silent(_stage, _done, _total):
    pass


def _status(request, residual, levels, cells):
    if not request.refine:
        return "unrefined"
    # The gradient scales with f' and with w.
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
    """Return ``(cells, atoms)``: the number of cells of the grid, and the largest number of atoms, or None.

    In form levels all monotone pieces of f' share the levels, and each piece needs cells of its own. In form
    intervals nothing is shared, and so many cells would be too slow if f' has many pieces.
    """
    if grid is not None:
        if not (is_integer(grid) and 16 <= grid <= _MOST_CELLS):
            raise SolveError(f"grid: expected an integer from 16 to {_MOST_CELLS}, got {grid!r}")
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
