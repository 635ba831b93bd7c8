"""Solve the discrete problem, which gives a lower bound on the error, and the levels with which the refinement starts.

A cell with mass W, mean m, spread S (the integral of (f' - m)**2 w) and values of f' in [a, b] is replaced by *atoms*.

**Objective "mse", form "levels".** The mass moves to two atoms, at a and b, with the same mean; their spread is W (m - a)(b - m) >= S.
For any levels y write min_k (v - y_k)**2 = v**2 - h(v), with the convex h(v) = max_k (2 v y_k - y_k**2). On [a, b] h is below its
chord, whose mean over the cell is that over the two atoms:

    integral over the cell of min_k (f' - y_k)**2 w  >=  sum over its atoms of min_k (atom - y_k)**2
                                                          - (W (m - a)(b - m) - S).

So the least error of all atoms, minus the total excess spread, is a lower bound.

**Form "intervals".** The atoms are in the order in which f' passes them. If q changes inside a cell against the direction of f', the
error is concave in the break's place, so the break can move to an end of the cell, or to the next break. At other breaks contiguous
segments of atoms have the best levels, and the same bound follows. With n cells, both bounds differ from the optimum by O(n**-2).

**Objective "unbiased".** The expected squared error at v is H(v) - v**2, with H the convex piecewise linear interpolant of v**2 at the
levels. By Jensen's inequality the optimum for one atom per cell, at m, minus the total spread, is a lower bound. The error is linear
in a level between two atoms, so some optimal levels are values of atoms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fewbit.solver.dynamic_program import RANDOM_CHOICE, PieceCosts
from fewbit.solver.partition import LayeredSearch, best_breaks
from fewbit.solver.segments import Items


@dataclass(frozen=True)
class Relaxed:
    """The optimum of the discrete problem.

    Attributes:
        levels: float64 (K,), ascending for form "levels", in the order of the pieces for "intervals".
        fixed: bool (K,), the levels that are pinned.
        lower_bound: A lower bound on the optimum of the continuous problem, not negative.
        breaks: float64 (K-1,), the points between the pieces for form "intervals", else None.
    """

    levels: np.ndarray
    fixed: np.ndarray
    lower_bound: float
    breaks: np.ndarray | None = None


@dataclass(frozen=True)
class Atoms:
    """Point masses that replace cells.

    Attributes:
        x: float64 (n,), ascending, the place of every atom.
        value: float64 (n,), the value of f' at every atom.
        mass: float64 (n,), the mass of every atom.
        excess: The total excess spread of the cells.
    """

    x: np.ndarray
    value: np.ndarray
    mass: np.ndarray
    excess: float


def two_point_atoms(cells):
    """Replace every cell by two atoms, in the order in which f' passes them, and merge equal neighbors.

    Return the `Atoms`, and float64 (n,), the largest x merged into each; `Atoms.x` has the smallest.
    """
    low, high = cells.lowest, cells.highest
    width = high - low
    upper_share = np.where(width > 0, (cells.mean - low) / np.where(width > 0, width, 1.0), 0.0)
    upper = cells.mass * upper_share
    lower = cells.mass - upper
    rising = cells.value_right >= cells.value_left
    value = np.stack([np.where(rising, low, high), np.where(rising, high, low)], axis=1).ravel()
    mass = np.stack(
        [np.where(rising, lower, upper), np.where(rising, upper, lower)], axis=1
    ).ravel()
    x = np.stack([cells.left, cells.right], axis=1).ravel()
    excess = np.maximum(cells.mass * (cells.mean - low) * (high - cells.mean) - cells.spread, 0.0)
    first = np.concatenate([[True], value[1:] != value[:-1]])
    group = np.cumsum(first) - 1
    starts = np.flatnonzero(first)
    ends = np.concatenate([starts[1:], [len(x)]]) - 1
    # The breaks of form intervals need the first and the last x of merged atoms.
    return (
        Atoms(x[starts], value[starts], np.bincount(group, mass), float(excess.sum())),
        x[ends],
    )


def relax_levels(cells, count, pinned, effort, most=None):
    """Find the `count` best levels, `pinned` ones included. More than `most` atoms are first reduced to about `most`."""
    atoms, _ = two_point_atoms(cells)
    order = np.argsort(atoms.value, kind="stable")
    value, mass = _merge_equal(atoms.value[order], atoms.mass[order])
    excess = atoms.excess
    if most is not None and len(value) > most:
        value, mass, more = _fewer_atoms(value, mass, most)
        excess += more
    if len(pinned) == 0:
        items = Items(mass, value)
        cost, breaks, _ = best_breaks(items, count, monge=True, effort=effort)
        levels = items.segment_means(breaks)
        levels = np.unique(levels[np.isfinite(levels)])
        return Relaxed(levels, np.zeros(len(levels), bool), max(cost - excess, 0.0))
    return _relax_pinned_levels(value, mass, excess, count, np.sort(pinned), effort)


def _fewer_atoms(value, mass, most):
    """Return values and masses of about `most` atoms, to which the mass between them moves, and the increase of the total spread."""
    kept = np.unique(np.linspace(0, len(value) - 1, most).astype(np.int64))
    starts = kept[:-1]
    low, high = value[starts], value[kept[1:]]
    # The last atom is kept, with its mass.
    inner = mass[:-1]
    height = value[:-1] - np.repeat(low, np.diff(kept))
    total = np.add.reduceat(inner, starts)
    safe = np.where(total > 0, total, 1.0)
    rise = np.add.reduceat(inner * height, starts) / safe
    spread = np.add.reduceat(inner * (height - np.repeat(rise, np.diff(kept))) ** 2, starts)
    upper = total * rise / (high - low)
    moved = np.zeros(len(kept))
    moved[:-1] += total - upper
    moved[1:] += upper
    moved[-1] += mass[-1]
    excess = np.maximum(total * rise * (high - low - rise) - spread, 0.0)
    return value[kept], moved, float(excess.sum())


def _relax_pinned_levels(value, mass, excess, count, pinned, effort):
    """Divide the free levels among the zones between pinned levels such that the total cost is smallest."""
    edges = [-np.inf, *pinned, np.inf]
    free = count - len(pinned)
    zones, best, choice = [], np.zeros(1), []
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        inside = (value > low) & (value < high)
        first = low if np.isfinite(low) else None
        last = high if np.isfinite(high) else None
        zone = Zone(Items(mass[inside], value[inside]), first, last, effort)
        zones.append(zone)
        gain = zone.costs(free)
        total = np.full(free + 1, np.inf)
        pick = np.zeros(free + 1, dtype=int)
        for used in range(free + 1):
            options = [best[min(used - k, len(best) - 1)] + gain[k] for k in range(used + 1)]
            pick[used] = int(np.argmin(options))
            total[used] = options[pick[used]]
        best = total
        choice.append(pick)
    levels, left = list(pinned), free
    for zone, pick in zip(reversed(zones), reversed(choice), strict=True):
        levels.extend(zone.levels(pick[left]))
        left -= pick[left]
    levels = np.unique(levels)
    return Relaxed(levels, np.isin(levels, pinned), max(float(best[free]) - excess, 0.0))


def relax_intervals(cells, count, slopes, effort):
    """Find the best contiguous pieces. `slopes` are the levels of the outer pieces if pinned, else None."""
    atoms, leaving = two_point_atoms(cells)
    items = Items(atoms.mass, atoms.value)
    if slopes is None:
        cost, breaks, _ = best_breaks(items, count, monge=False, effort=effort)
        levels = items.segment_means(breaks)
        fixed = np.zeros(count, bool)
    else:
        zone = Zone(items, slopes[0], slopes[1], effort, monge=False)
        cost = zone.costs(count - 2)[-1]
        breaks, middle = zone.partition(count - 2)
        levels = np.concatenate([[slopes[0]], middle, [slopes[1]]])
        fixed = np.isin(np.arange(count), [0, count - 1])
    # A break lies between two atoms, or at an end of the domain if the pieces beyond it are empty.
    after = np.clip(breaks, 1, len(atoms.x) - 1) if len(atoms.x) > 1 else np.zeros(len(breaks), int)
    x = 0.5 * (leaving[after - 1] + atoms.x[after]) if len(atoms.x) > 1 else atoms.x[after]
    x = np.where(breaks == 0, cells.left[0], np.where(breaks == len(atoms.x), cells.right[-1], x))
    return Relaxed(levels, fixed, max(cost - atoms.excess, 0.0), x)


def relax_unbiased(cells, count, fixed, effort):
    """Find the best levels for objective "unbiased".

    `cells` are those of the stand-in. `fixed`, the pinned levels, ascending, include the smallest and the largest.
    """
    value = np.concatenate([cells.mean, fixed])
    mass = np.concatenate([cells.mass, np.zeros(len(fixed))])
    order = np.argsort(value, kind="stable")
    value, mass = _merge_equal(value[order], mass[order])
    n = len(value)
    if n <= count:
        return Relaxed(value, np.isin(value, fixed), 0.0)
    search = LayeredSearch(PieceCosts(Items(mass, value), RANDOM_CHOICE, fixed[1:-1]), True, effort)
    nodes = np.arange(n)
    for done in range(1, count - 1):
        search.step(nodes)
        effort.progress("searching", done, count - 1)
    search.step(np.array([n - 1]))
    levels = np.unique(np.append(value[search.trace(0)], fixed))
    bound = max(search.values[0] - float(cells.spread.sum()), 0.0)
    return Relaxed(levels, np.isin(levels, fixed), bound)


class Zone:
    """The search for the best contiguous segments of items between two pinned levels.

    Args:
        first: The level of the first segment, or None if it is free.
        last: The level of the last segment, or None if it is free.
        monge: Whether the items are sorted by value.
    """

    def __init__(self, items, first, last, effort, monge=True):
        self.items, self.first, self.last = items, first, last
        self.effort, self.monge = effort, monge
        n = len(items)
        # until[i]: the cost if the items before position i have the first level. after[i]: the cost if the items from
        # position i on have the last level.
        self.until = None if first is None else np.append(0.0, np.cumsum(self._given(first)))
        self.after = (
            None if last is None else np.append(np.cumsum(self._given(last)[::-1])[::-1], 0.0)
        )
        start = np.zeros(1) if first is None else self.until
        positions = np.zeros(1, np.int64) if first is None else np.arange(n + 1)
        self.search = LayeredSearch(
            PieceCosts(items), monge, effort, columns=positions, values=start
        )
        self.layers = [(positions, start)]

    def _given(self, level):
        return self.items.mass * (self.items.mean - level) ** 2

    def _ending(self, k):
        positions, values = self.layers[k]
        if self.after is None:
            return np.where(positions == len(self.items), values, np.inf)
        return values + self.after[positions]

    def costs(self, most):
        """Return float64 (most + 1,), the smallest total cost for every number of free segments."""
        nodes = np.arange(len(self.items) + 1)
        while len(self.layers) <= most:
            self.search.step(nodes)
            self.effort.progress("searching", len(self.layers), most)
            self.layers.append((nodes, self.search.values))
        return np.array([self._ending(k).min() for k in range(most + 1)])

    def partition(self, k):
        """Return the k + 1 ends of the k free segments, and their levels."""
        at = int(np.argmin(self._ending(k)))
        stop = self.layers[k][0][at]
        breaks = np.concatenate([self.search.trace(at, layer=k), [stop]]).astype(np.int64)
        means = self.items.segment_means(breaks)[1:-1]
        return breaks, means

    def levels(self, k):
        """Return the levels of those of the k free segments that have mass."""
        if k == 0 or len(self.items) == 0:
            return np.empty(0)
        means = self.partition(k)[1]
        return means[np.isfinite(means)]


def _merge_equal(value, mass):
    first = np.concatenate([[True], value[1:] != value[:-1]])
    return value[first], np.bincount(np.cumsum(first) - 1, mass)
