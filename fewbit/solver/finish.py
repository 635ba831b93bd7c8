"""The steps before and after the refinement: the first pieces; outer pieces and the sides of breaks."""

from __future__ import annotations

import numpy as np

from fewbit.solver.steps import Steps, relabel, tidy


def contiguous_start(relaxed, landscape, pinned):
    """Return the first pieces for form "intervals": those of the discrete optimum, without empty ones unless `pinned`.

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
    """Add pieces beyond the ends of the domain, drop unused levels, and return (levels, `Steps`).

    Pinned tails add the limits of f'. With free tails, an end that is a kink, which inputs may equal, gets a piece with torch's derivative
    unless that would be one level too many. `request` has `count` (the most levels), `form` and `slopes` (the limits, or None).
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
    """Add a piece beyond `end`, whose level is torch's derivative there, if possible."""
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
    """Return `Table.closed`: at a kink the side of the level nearer to torch's derivative, else "right"."""
    closed = np.full(len(steps.breaks), "right", dtype=object)
    at = np.flatnonzero(np.isin(steps.breaks, f.kinks))
    if len(at):
        value = f.derivative(steps.breaks[at])
        before, after = levels[steps.codes[at]], levels[steps.codes[at + 1]]
        closed[at[np.abs(value - after) < np.abs(value - before)]] = "left"
    return tuple(closed)


def closed_sides_of_knots(f, stand_in):
    """Return `Knots.closed`: at a jump the side of the value nearer to torch's derivative."""
    points, values = stand_in.points, stand_in.values
    closed = ["right"] * len(points)
    for i in np.flatnonzero(points[1:] == points[:-1]):
        value = f.derivative(points[i : i + 1])[0]
        if abs(value - values[i + 1]) < abs(value - values[i]):
            closed[i] = closed[i + 1] = "left"
    return tuple(closed)
