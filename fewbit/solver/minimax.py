"""Find the step function q with the smallest maximum of |f' - q|, by solving covering problems.

In form "levels", K intervals of length 2r must cover all values of f'; in form "intervals", K pieces on each of which f' varies by at
most 2r must cover the domain. Greedy covering from one end decides whether r suffices. Bisection finds the smallest sufficient r to
the last bit; the largest insufficient one is the lower bound.
"""

from __future__ import annotations

import numpy as np

from fewbit.solver.steps import Steps, crossing_points, nearest_steps, relabel, tidy


def minimax_levels(landscape, cells, count, pinned):
    """Find the best `count` levels, `pinned` ones included, in form "levels".

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
    """Find the best `count` pieces. `slopes` are the levels of the outer pieces if they are pinned, else None.

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
    """Return the largest |f' - q| over the cells."""
    parts = landscape.split(cells, steps.breaks)
    level = levels[steps.codes[np.searchsorted(steps.breaks, 0.5 * (parts.left + parts.right))]]
    return float(np.maximum(np.abs(parts.lowest - level), np.abs(parts.highest - level)).max())


def _least_radius(cover, start, pinned, low, high):
    """Return (the smallest sufficient radius, the next smaller float). `cover(radius)` is None if it is insufficient."""
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
    order = np.argsort(cells.lowest, kind="stable")
    low, high = cells.lowest[order], cells.highest[order]
    reach = np.maximum.accumulate(high)
    first = np.concatenate([[True], low[1:] > reach[:-1]])
    starts = np.flatnonzero(first)
    return low[starts], reach[np.concatenate([starts[1:] - 1, [len(reach) - 1]])]


def _cover_values(low, high, radius, pinned, free):
    """Return the centers of at most `free` further intervals of half width `radius` that cover the ranges, or None."""
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
    """Cut the path of f', (n, 2), into pieces on which it varies by at most 2 radius; return (cuts, levels), or None.

    A cut (cell, value) is the point in the cell at which f' has the value; (cell, None) is the start of the cell.
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
    return (cell + 1, None) if value == path[cell, 1] else (cell, value)


def _trim(path, level, radius):
    """Remove the longest beginning of the path within `radius` of `level`; return (the rest, the number of removed cells)."""
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
    """Return the x of a cut. In a gap left by cells without mass, x is the middle."""
    if value is not None:
        return crossing_points(landscape, cells, np.array([cell]), np.array([value]))[0]
    if cell == 0:
        return cells.left[0]
    if cell == len(cells):
        return cells.right[-1]
    return 0.5 * (cells.right[cell - 1] + cells.left[cell])
