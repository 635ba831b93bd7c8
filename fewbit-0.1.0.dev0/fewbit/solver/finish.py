"""The steps before and after the refinement, which improves the breaks and levels of a step function q.

Before it, the pieces are chosen from which it starts. After it, the outer pieces and the sides of breaks are set.

The pieces are the intervals on which q has one value, a level. The breaks are the points between pieces. The side of a
break says which of its two pieces contains the break itself.
"""

from __future__ import annotations

import numpy as np

from fewbit.solver.steps import Steps, relabel, tidy


def contiguous_start(relaxed, landscape, pinned):
    """Return the pieces from which the refinement of form "intervals" starts.

    They are the pieces that are optimal for the discrete problem (`fewbit.solver.relaxation`), without empty ones.

    Args:
        relaxed: The optimum of the discrete problem, a `Relaxed` with breaks.
        landscape: f' and the weight.
        pinned: Whether the first and the last level are pinned. Pinned levels stay even if their pieces are empty.

    Returns:
        The levels (K,), a bool mask (K,) of the pinned levels, and the pieces as `Steps`.
    """
    breaks, count = relaxed.breaks, len(relaxed.levels)
    low, high = landscape.domain
    starts, stops = np.append(low, breaks), np.append(breaks, high)
    used = stops > starts
    used &= np.isfinite(relaxed.levels)
    if pinned:
        used[[0, -1]] = True
    kept = np.flatnonzero(used)
    # A piece starts at the end of the one before. Empty pieces are dropped.
    start = starts[kept[1:]]
    if pinned and count > 1 and not stops[-1] > starts[-1]:
        start[-1] = high
    steps = tidy(Steps(start, np.arange(len(kept)), np.zeros(len(start))))
    steps, levels, fixed = relabel(steps, relaxed.levels[kept], relaxed.fixed[kept])
    return levels, fixed, steps


def with_outer_pieces(levels, steps, request, landscape, f):
    """Add pieces beyond the ends of the domain, and drop unused levels.

    With tails "pinned", the added pieces have the limits of f' at both infinities as levels. With tails "free", a piece
    is added beyond an end of the domain that is a kink, because inputs may be equal to this end, as many outputs of
    ReLU are equal to 0. The level of this piece is torch's derivative at the end, if it differs from the level inside.
    The piece is left out if it would need a new level although q has as many levels as allowed.

    Args:
        levels: float64 (K,).
        steps: The pieces inside the domain.
        request: An object with three attributes: `count`, the largest number of levels; `form`; and `slopes`, the
            limits of f' at both infinities if tails are pinned, else None.
        landscape: f' and the weight.
        f: The activation, a `Function`.

    Returns:
        The new levels and the new `Steps`.
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
    """Add a piece outside the domain at its `end`, whose level is torch's derivative there, if possible."""
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


def closed_sides(f, steps, levels):
    """Return the side of every break, as in `Table.closed`.

    "right" means that the break belongs to the piece on its left, "left" that it belongs to the piece on its right. A
    break at a kink belongs to the piece whose level is nearer to torch's derivative at the kink. All other breaks have
    "right".
    """
    closed = np.full(len(steps.breaks), "right", dtype=object)
    at = np.flatnonzero(np.isin(steps.breaks, f.kinks))
    if len(at):
        value = f.derivative(steps.breaks[at])
        before, after = levels[steps.codes[at]], levels[steps.codes[at + 1]]
        closed[at[np.abs(value - after) < np.abs(value - before)]] = "left"
    return tuple(closed)


def closed_sides_of_knots(f, stand_in):
    """Return the side of every knot of a stand-in, as in `Knots.closed`.

    A jump consists of two knots with equal x. "right" means that the stand-in has the value of the first knot at this
    x, "left" that it has the value of the second. The value that is nearer to torch's derivative is chosen.
    """
    points, values = stand_in.points, stand_in.values
    closed = ["right"] * len(points)
    for i in np.flatnonzero(points[1:] == points[:-1]):
        value = f.derivative(points[i : i + 1])[0]
        if abs(value - values[i + 1]) < abs(value - values[i]):
            closed[i] = closed[i + 1] = "left"
    return tuple(closed)
