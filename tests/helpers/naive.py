"""Slow and obvious computations of the solver's results, as oracles for its tests.

Nothing here imports the solver. Sums are exact (`Fraction`), and searches are exhaustive.
"""

import itertools
from fractions import Fraction

import numpy as np

# --- sequences ----------------------------------------------------------------------------------


def fractions(numbers):
    return [Fraction(float(number)) for number in numbers]


def spread(values, weights):
    """Return the weighted sum of squared deviations from the weighted mean, as a Fraction."""
    values, weights = fractions(values), fractions(weights)
    total = sum(weights)
    if total == 0:
        return Fraction(0)
    mean = sum(w * v for v, w in zip(values, weights, strict=True)) / total
    return sum(w * (v - mean) ** 2 for v, w in zip(values, weights, strict=True))


def breaks_cost(values, weights, breaks):
    """Return the cost of the contiguous partition at `breaks`."""
    edges = [0, *breaks, len(values)]
    return sum(spread(values[a:b], weights[a:b]) for a, b in itertools.pairwise(edges))


def every_contiguous(values, weights, count):
    """Return the least cost over every way to cut the sequence into `count` segments, empty ones allowed."""
    cuts = itertools.combinations_with_replacement(range(len(values) + 1), count - 1)
    return min(breaks_cost(values, weights, cut) for cut in cuts)


def every_grouping(values, weights, count):
    """Return the least cost over every assignment of the values to `count` groups, contiguous or not."""
    values, weights = np.asarray(values), np.asarray(weights)
    least = None
    for labels in itertools.product(range(count), repeat=len(values) - 1):
        labels = np.array([0, *labels])  # the first value is in group 0, which loses nothing
        cost = sum(spread(values[labels == k], weights[labels == k]) for k in range(count))
        least = cost if least is None else min(least, cost)
    return least


def plain_loop(values, weights, count):
    """Run the O(n^2 K) dynamic program in exact arithmetic, on the sequence in its given order."""
    values, weights = fractions(values), fractions(weights)
    n = len(values)
    costs = [[Fraction(0)] * (n + 1) for _ in range(n + 1)]
    for start in range(n):
        mass = first = second = Fraction(0)
        for stop in range(start, n):
            mass += weights[stop]
            first += weights[stop] * values[stop]
            second += weights[stop] * values[stop] ** 2
            costs[start][stop + 1] = second - first**2 / mass if mass else Fraction(0)
    best = [costs[0][i] for i in range(n + 1)]
    for _ in range(count - 1):
        best = [min(best[j] + costs[j][i] for j in range(i + 1)) for i in range(n + 1)]
    return best[n]


# --- the stochastic choice between levels -------------------------------------------------------


def choice_cost(values, weights, levels):
    """Return the sum of w (v - y_k)(y_{k+1} - v), y_k <= v <= y_{k+1}, as a Fraction; levels ascend."""
    values, weights, levels = fractions(values), fractions(weights), fractions(levels)
    total = Fraction(0)
    for v, w in zip(values, weights, strict=True):
        below = max(y for y in levels if y <= v)
        above = min(y for y in levels if y >= v)
        total += w * (v - below) * (above - v)
    return total


def every_choice(values, weights, count, forced=()):
    """Return the least choice cost over all sets of `count` levels among the values, both ends in."""
    known = sorted({min(values), max(values), *forced})
    others = sorted(set(values) - set(known))
    inner = itertools.combinations(others, min(count - len(known), len(others)))
    return min(choice_cost(values, weights, sorted([*known, *chosen])) for chosen in inner)


# --- the least possible maximum -----------------------------------------------------------------


def minimax_contiguous(values, count, ends=None):
    """Return the least radius with which `count` contiguous segments cover the sequence.

    `ends`: the given levels of the first and the last segment, or None.
    """
    values = np.asarray(values, float)
    n = len(values)

    def half_range(start, stop):
        return 0.5 * np.ptp(values[start:stop]) if stop > start else 0.0

    def distance(start, stop, level):
        return np.abs(values[start:stop] - level).max(initial=0.0)

    if ends is None:
        best = [half_range(0, i) for i in range(n + 1)]
        for _ in range(count - 1):
            best = [min(max(best[j], half_range(j, i)) for j in range(i + 1)) for i in range(n + 1)]
        return best[n]
    best = [distance(0, i, ends[0]) for i in range(n + 1)]
    for _ in range(count - 2):
        best = [min(max(best[j], half_range(j, i)) for j in range(i + 1)) for i in range(n + 1)]
    return min(max(best[j], distance(j, n, ends[1])) for j in range(n + 1))


def minimax_levels(values, count, pinned=()):
    """Return the least radius with which `count` levels, `pinned` among them, cover the values."""
    values = np.unique(values)
    halves = 0.5 * np.abs(values[:, None] - values[None, :]).ravel()
    distances = np.abs(values[:, None] - np.asarray(pinned, float)[None, :]).ravel()
    radii = np.unique(np.concatenate([[0.0], halves, distances]))
    slack = 1e-12 * (1.0 + np.abs(values).max())

    def enough(radius):
        rest = [v for v in values if all(abs(v - p) > radius + slack for p in pinned)]
        used = 0
        while rest:
            used += 1
            rest = [v for v in rest if v > rest[0] + 2 * radius + slack]
        return used <= count - len(pinned)

    return float(radii[np.argmax([enough(radius) for radius in radii])])


# --- tables -------------------------------------------------------------------------------------


def one(x):
    return np.ones_like(x)


def normal_density(mean=0.0, std=1.0):
    return lambda x: np.exp(-0.5 * ((x - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))


def parts_of(table, marks=(), pieces=64):
    """Return the domain cut at the table's breaks, the `marks` and evenly: (n, 2) intervals."""
    low, high = table.domain
    points = [low, high, *table.breaks, *marks, *np.linspace(low, high, pieces + 1)]
    points = np.unique([p for p in points if low <= p <= high])
    return np.stack([points[:-1], points[1:]], axis=1)


_GAUSS = np.polynomial.legendre.leggauss(24)


def fine_integral(function, parts):
    """Return the integral of a vectorized function over all parts, with 24 Gauss points in each."""
    half = 0.5 * (parts[:, 1] - parts[:, 0])[:, None]
    x = 0.5 * (parts[:, 1] + parts[:, 0])[:, None] + half * _GAUSS[0]
    return float(np.sum(function(x) * (half * _GAUSS[1])))


class SampledError:
    """The error of any set of levels, or of any contiguous pieces, on a fine fixed sample."""

    def __init__(self, f, domain, density=one, n=40_001):
        edges = np.unique(
            [*np.linspace(*domain, n), *[k for k in f.kinks if domain[0] < k < domain[1]]]
        )
        self.x = 0.5 * (edges[1:] + edges[:-1])
        self.mass = np.diff(edges) * density(self.x)
        self.value = f.derivative(self.x)

    def of_levels(self, levels):
        """Return the error if every point gets its nearest level."""
        levels = np.sort(levels)
        nearest = np.searchsorted(0.5 * (levels[1:] + levels[:-1]), self.value)
        return float(np.sum(self.mass * (self.value - levels[nearest]) ** 2))

    def of_table(self, table):
        return float(np.sum(self.mass * (self.value - table(self.x)) ** 2))

    def of_breaks(self, breaks):
        """Return the error if every piece gets its mean."""
        piece = np.searchsorted(np.sort(breaks), self.x)
        count = len(breaks) + 1
        mass = np.bincount(piece, self.mass, count)
        mean = np.bincount(piece, self.mass * self.value, count) / np.where(mass > 0, mass, 1.0)

        return float(np.sum(self.mass * (self.value - mean[piece]) ** 2))
