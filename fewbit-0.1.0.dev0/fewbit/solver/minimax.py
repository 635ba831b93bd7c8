"""Find the step function q with the smallest maximum of |f' - q|, by solving covering problems.

The step function q has K levels. A radius r is called sufficient if some q has |f' - q| <= r on the whole domain. In
form "levels", in which several pieces of the domain may have the same level, this is the case if K intervals of length
2r cover all values of f'. In form "intervals", in which every piece has its own level, it is the case if the domain can
be cut into K pieces on each of which f' varies by at most 2r. Covering greedily from one end needs the fewest
intervals or pieces, so this method decides exactly whether a radius is sufficient. The optimum is the smallest
sufficient radius, found by bisection to the last bit. The lower bound is the largest radius that was found to be
insufficient. In each cell of the domain f' is monotone, so only the values at the ends of the cell matter.
"""

from __future__ import annotations

import numpy as np

from fewbit.solver.steps import Steps, crossing_points, nearest_steps, relabel, tidy


def minimax_levels(landscape, cells, count, pinned):
    """Find the levels for which the maximum of |f' - q| is smallest, in form "levels".

    Args:
        landscape: f' and the weight.
        cells: The cells of the domain.
        count: The number of levels.
        pinned: Values that must be among the levels, ascending.

    Returns:
        The levels (K,), the pieces as `Steps`, and a lower bound on the maximum.
    """
    low, high = _merged_ranges(cells)
    free = count - len(pinned)

    def cover(radius):
        return _cover_values(low, high, radius, pinned, free)

    radius, bound = _least_radius(cover, 0.5 * (high[-1] - low[0]), pinned, low, high)
    centers = cover(radius)
    levels = np.unique(np.concatenate([pinned, centers]))
    return levels, nearest_steps(landscape, cells, levels), bound


def minimax_intervals(landscape, cells, count, slopes):
    """Find the pieces for which the maximum of |f' - q| is smallest, in form "intervals".

    Args:
        landscape: f' and the weight.
        cells: The cells of the domain.
        count: The number of pieces.
        slopes: The levels of the first and the last piece if they are pinned, else None.

    Returns:
        The levels (K,), the pieces as `Steps`, and a lower bound on the maximum.
    """
    path = np.stack([cells.value_left, cells.value_right], axis=1)
    pinned = np.array([] if slopes is None else slopes)

    def cover(radius):
        return _cover_path(path, radius, slopes, count)

    radius, bound = _least_radius(
        cover, 0.5 * (path.max() - path.min()), pinned, path.min(), path.max()
    )
    cuts, levels = cover(radius)
    breaks = np.array([_cut_point(landscape, cells, cell, value) for cell, value in cuts])
    steps = tidy(Steps(breaks, np.arange(len(levels)), np.zeros(len(breaks))))
    steps, levels, _ = relabel(steps, np.asarray(levels), np.zeros(len(levels), bool))
    return levels, steps, bound


def largest_deviation(landscape, cells, steps, levels):
    """Return the largest |f' - q| over the cells, for the step function q with the pieces `steps` and the levels."""
    parts = landscape.split(cells, steps.breaks)
    level = levels[steps.codes[np.searchsorted(steps.breaks, 0.5 * (parts.left + parts.right))]]
    return float(np.maximum(np.abs(parts.lowest - level), np.abs(parts.highest - level)).max())


def _least_radius(cover, start, pinned, low, high):
    """Find the smallest sufficient radius by bisection.

    Args:
        cover: A function of a radius that returns None if the radius is not sufficient.
        start: A radius that is sufficient without pinned levels.
        pinned: The pinned levels.
        low: The smallest values of f'.
        high: The largest values of f'.

    Returns:
        A sufficient radius and the next smaller float, which is not sufficient; (0, 0) if 0 is sufficient.
    """
    if cover(0.0) is not None:
        return 0.0, 0.0
    enough = max([start, *(np.max(np.abs([p - np.min(low), p - np.max(high)])) for p in pinned)])
    enough = float(np.nextafter(enough * (1 + 1e-12), np.inf))
    short = 0.0
    while True:
        middle = 0.5 * (short + enough)
        if not short < middle < enough:
            return enough, short
        if cover(middle) is None:
            short = middle
        else:
            enough = middle


def _merged_ranges(cells):
    """Return the lower and the upper ends of the disjoint closed ranges, ascending, that contain all values of f'."""
    order = np.argsort(cells.lowest, kind="stable")
    low, high = cells.lowest[order], cells.highest[order]
    reach = np.maximum.accumulate(high)
    first = np.concatenate([[True], low[1:] > reach[:-1]])
    starts = np.flatnonzero(first)
    return low[starts], reach[np.concatenate([starts[1:] - 1, [len(reach) - 1]])]


def _cover_values(low, high, radius, pinned, free):
    """Cover the values of f' by intervals whose half width is `radius`.

    Args:
        low: The lower ends of the ranges of values, ascending.
        high: The upper ends of these ranges.
        radius: The half width of an interval.
        pinned: The centers of given intervals.
        free: The largest number of further intervals.

    Returns:
        The centers of the further intervals, or None if more than `free` are needed.
    """
    centers = []
    at = low[0]
    while True:
        # Move to the smallest value >= at that no pinned level covers.
        moved = True
        while moved:
            moved = False
            for p in pinned:
                if abs(p - at) <= radius:
                    beyond = np.nextafter(p + radius, np.inf)
                    if beyond > at:
                        at, moved = beyond, True
            part = np.searchsorted(high, at)
            if part == len(high):
                return np.array(centers)
            if low[part] > at:
                at, moved = low[part], True
        if len(centers) == free:
            return None
        part = np.searchsorted(low, at + 2 * radius, side="right") - 1
        last = min(high[part], at + 2 * radius)
        centers.append(0.5 * (at + last))
        at = np.nextafter(last, np.inf)


def _cover_path(path, radius, slopes, count):
    """Cut the path of f' into pieces on which f' varies by at most 2 radius.

    Args:
        path: (n, 2), the values of f' at both ends of every cell.
        radius: Half of the largest variation of f' on a piece.
        slopes: The levels of the first and the last piece if they are pinned, else None.
        count: The largest number of pieces.

    Returns:
        The cuts and the levels, or None if more pieces are needed. A cut (cell, value) is the point in the cell at
        which f' has the value; (cell, None) is the start of the cell.
    """
    if slopes is None:
        return _cover_free(path, radius, count, 0)
    rest, dropped = _trim(path, slopes[0], radius)
    backwards, _ = _trim(rest[::-1, ::-1], slopes[1], radius)
    middle = backwards[::-1, ::-1]
    cuts, levels = [], []
    if len(middle):
        found = _cover_free(middle, radius, count - 2, dropped)
        if found is None:
            return None
        cuts, levels = found
        cuts.append(_end_cut(path, dropped + len(middle) - 1, middle[-1, 1]))
    entry = (len(path), None)
    if len(rest):
        entry = (dropped, None if rest[0, 0] == path[dropped, 0] else rest[0, 0])
    return [entry, *cuts], np.array([slopes[0], *levels, slopes[1]])


def _end_cut(path, cell, value):
    """Return the cut where f' has the value in a cell, as (cell, value), or (cell + 1, None) at the end of the cell."""
    return (cell + 1, None) if value == path[cell, 1] else (cell, value)


def _trim(path, level, radius):
    """Remove the longest beginning of the path that is within `radius` of `level`.

    Returns:
        The rest of the path, and the number of removed cells.
    """
    outside = np.abs(path - level) > radius
    cells = np.flatnonzero(outside.any(axis=1))
    if len(cells) == 0:
        return path[:0], len(path)
    cell = cells[0]
    rest = path[cell:].copy()
    if not outside[cell, 0]:
        rest[0, 0] = level + radius if rest[0, 1] > level else level - radius
    return rest, int(cell)


def _cover_free(path, radius, most, offset):
    cuts, levels = [], []
    path = path.copy()
    start = 0
    while len(levels) < most:
        high = np.maximum.accumulate(path[start:].max(axis=1))
        low = np.minimum.accumulate(path[start:].min(axis=1))
        over = np.flatnonzero(high - low > 2 * radius)
        if len(over) == 0:
            levels.append(0.5 * (low[-1] + high[-1]))
            return cuts, levels
        cell = start + over[0]
        entry, leaving = path[cell]
        lowest = min(entry, low[over[0] - 1]) if over[0] else entry
        highest = max(entry, high[over[0] - 1]) if over[0] else entry
        if highest - lowest > 2 * radius:
            levels.append(0.5 * (low[over[0] - 1] + high[over[0] - 1]))
            cuts.append((offset + cell, None))
        else:
            value = lowest + 2 * radius if leaving > entry else highest - 2 * radius
            levels.append(0.5 * (min(lowest, value) + max(highest, value)))
            cuts.append((offset + cell, value))
            path[cell, 0] = value
        start = cell
    return None


def _cut_point(landscape, cells, cell, value):
    """Return the x of a cut (cell, value). In a gap, where cells without mass were left out, x is the gap's middle."""
    if value is not None:
        return crossing_points(landscape, cells, np.array([cell]), np.array([value]))[0]
    if cell == 0:
        return cells.left[0]
    if cell == len(cells):
        return cells.right[-1]
    return 0.5 * (cells.right[cell - 1] + cells.left[cell])
