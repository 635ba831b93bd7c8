"""The optimal partition of a weighted sequence into K segments, and of weighted values into K levels (docs/concepts/solver.md).

`form="intervals"` keeps the order (Few-bit Backward, eq. 9). `form="levels"` sorts the values first (weighted one-dimensional
k-means), which makes costs Monge. For n items, the memory is O(n (K + log n)).

Pruning does not change the result. Let L_{k-1}(h) be a lower bound of the cost before break k - 1, if this break is in the block h of
positions [a, b]. If break k is in the block g, the segment between them contains at least the items from b_h to a_g. So with

    L_k(g) = min over h <= g of L_{k-1}(h) + cost(b_h, a_g)

and R_k(g) the same bound for the segments after break k, partitions whose break k is in block g cost at least L_k(g) + R_k(g). Blocks
whose bound exceeds the cost of a known partition are dropped, and the others divided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fewbit.errors import SolveError
from fewbit.solver.dynamic_program import PieceCosts, run_layer, thread_count
from fewbit.solver.segments import Items

# Below this many cost evaluations the plain dynamic program is faster than pruning first.
_WORTH_PRUNING = 10_000_000
_SUBDIVIDE = 8
# Costs are sums of non-negative terms, so their relative rounding error is far below this margin.
_MARGIN = 1e-9


@dataclass(frozen=True)
class Effort:
    """The threads of a search, and a function that reports progress.

    Attributes:
        progress: Called as `progress(stage, done, total)`.
    """

    threads: int = field(default_factory=thread_count)
    progress: Callable[[str, int, int], None] = lambda _stage, _done, _total: None


@dataclass(frozen=True)
class Partition:
    """An optimal partition of a sequence of n items into K segments.

    Attributes:
        cost: The sum of the segments' costs.
        breaks: int64 (K-1,), ascending; segment k contains the items breaks[k-1] <= i < breaks[k], of the sorted values in form "levels".
        means: float64 (K,), the segments' weighted means; nan for a segment without mass.
        order: The indices that sort the values in form "levels" with weights, else None.
        candidates: The number of positions that the final search tried, summed over breaks; about n K without pruning.
    """

    cost: float
    breaks: np.ndarray
    means: np.ndarray
    order: np.ndarray | None
    candidates: int


def partition(values, count, weights=None, *, form="levels", prune=True, threads=None):
    """Find the best partition of a sequence.

    Args:
        values: float64 (n,), n >= 1, finite. The cost of a segment is the sum of squared deviations from its mean.
        count: The number of segments, at least 1.
        weights: float64 (n,), not negative; by default 1.
        form: "levels" to sort the values first, "intervals" to keep their order.
        prune: Whether to prune positions before the exact search. The result is the same.
        threads: As in `fewbit.solve`.

    Raises:
        SolveError: An argument is not as described.
    """
    values, weights = _checked(values, weights, count)
    effort = Effort() if threads is None else Effort(threads)
    order = None
    if form == "levels":
        if weights is None:
            values = np.sort(values)
        else:
            order = np.argsort(values, kind="stable")
            values, weights = values[order], weights[order]
    elif form != "intervals":
        raise SolveError(f"form: expected 'levels' or 'intervals', got {form!r}")
    mass = np.ones_like(values) if weights is None else weights
    items = Items(mass, values)
    cost, breaks, searched = best_breaks(
        items, count, monge=form == "levels", prune=prune, effort=effort
    )
    return Partition(cost, breaks, items.segment_means(breaks), order, searched)


def _checked(values, weights, count):
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise SolveError(f"values: expected a non-empty 1-D array, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise SolveError(f"values: expected finite numbers, got {values[~np.isfinite(values)][0]}")
    if count < 1:
        raise SolveError(f"count: expected at least 1 segment, got {count}")
    if weights is not None:
        weights = np.asarray(weights, dtype=np.float64)
        if weights.shape != values.shape:
            raise SolveError(f"weights: expected shape {values.shape}, got {weights.shape}")
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise SolveError("weights: expected finite numbers that are not negative")
    return values, weights


def best_breaks(items, count, *, monge, prune=True, effort):
    """Return the cost, the breaks int64 (count - 1,), and `Partition.candidates` of the best partition."""
    n = len(items)
    count_used = min(count, n)
    candidates = [np.arange(n + 1)] * (count_used - 1)
    work = n * count_used * (n / 2 if not monge else max(np.log2(n), 1))
    if prune and count_used > 1 and work > _WORTH_PRUNING:
        candidates = surviving_breaks(items, count_used, monge=monge, effort=effort)
    searched = sum(len(c) for c in candidates)
    nodes = _union(n, candidates)
    merged = items.compress(nodes) if len(nodes) < n + 1 else items
    positions = [np.searchsorted(nodes, c) for c in candidates]
    cost, breaks = _search(PieceCosts(merged), positions, monge, effort)
    breaks = nodes[breaks]
    # If there are more segments than items, the last ones are empty.
    return cost, np.concatenate([breaks, np.full(count - count_used, n)]), searched


class LayeredSearch:
    """The dynamic program, layer by layer. The best choices are stored for `trace`.

    Args:
        monge: Whether the costs satisfy the quadrangle inequality.
        columns: int64 (m,), where the first segment may start; by default 0.
        values: float64 (m,), the total cost of all items before; by default 0.
    """

    def __init__(self, costs, monge, effort, *, columns=None, values=None):
        self.costs, self.monge, self.threads = costs, monge, effort.threads
        self.columns = np.zeros(1, dtype=np.int64) if columns is None else columns
        self.values = np.zeros(1) if values is None else values
        self._trail = []

    def step(self, rows):
        """Add a layer, whose segment may end at any of the ascending positions `rows`."""
        rows = np.ascontiguousarray(rows, dtype=np.int64)
        out, best = run_layer(
            self.costs, self.columns, self.values, rows, monge=self.monge, threads=self.threads
        )
        self._trail.append((self.columns, best))
        self.columns, self.values = rows, out

    def trace(self, at, layer=None):
        """Return int64 (layer,), the starts of the best segments that end at index `at` of a layer's rows."""
        starts = []
        for columns, best in reversed(self._trail[:layer]):
            at = best[at]
            starts.append(columns[at])
        return np.array(starts[::-1], dtype=np.int64)


def _search(costs, candidates, monge, effort):
    """Run the dynamic program in which break k+1 has one of the positions candidates[k]."""
    search = LayeredSearch(costs, monge, effort)
    steps = [*candidates, np.array([len(costs.items)])]
    for done, rows in enumerate(steps, 1):
        search.step(rows)
        effort.progress("searching", done, len(steps))
    return float(search.values[0]), search.trace(0)[1:]


def surviving_breaks(items, count, *, monge, effort):
    """Return the positions that remain after pruning, one int64 array for every break."""
    n = len(items)
    first = min(n, max(512, 4 * count))
    nodes = np.unique(np.linspace(0, n, first + 1).astype(np.int64))
    alive = [np.arange(len(nodes) - 1)] * (count - 1)
    upper = np.inf
    quiet = Effort(effort.threads)
    while True:
        costs = PieceCosts(items.compress(nodes))
        blocks = len(nodes) - 1
        ends = [_union(blocks, [a, a + 1], with_ends=False) for a in alive]
        upper = min(upper, _search(costs, ends, monge, quiet)[0])
        lower = _block_bounds(costs, alive, monge, quiet)
        before = sum(int((nodes[a + 1] - nodes[a]).sum()) for a in alive)
        alive = [a[b <= upper * (1 + _MARGIN)] for a, b in zip(alive, lower, strict=True)]
        after = sum(int((nodes[a + 1] - nodes[a]).sum()) for a in alive)
        effort.progress("pruning", before - after, before)
        widest = max(int((nodes[a + 1] - nodes[a]).max()) for a in alive)
        if widest == 1 or after > 0.8 * before:
            return [_positions(nodes, a) for a in alive]
        nodes, alive = _subdivide(nodes, alive)


def _block_bounds(costs, alive, monge, effort):
    """Return lower bounds on the cost with every break in each remaining block."""
    n = len(costs.items)
    options = {"monge": monge, "slack": 1, "threads": effort.threads}
    left, columns, values = [], np.zeros(1, dtype=np.int64), np.zeros(1)
    for a in alive:
        values, _ = run_layer(costs, columns, values, a, **options)
        left.append(values)
        columns = a + 1
    right, columns, values = [], np.zeros(1, dtype=np.int64), np.zeros(1)
    for a in reversed(alive):
        rows = n - (a[::-1] + 1)
        values, _ = run_layer(costs, columns, values, rows, flip=n, **options)
        right.append(values[::-1])
        columns = n - a[::-1]
    return [lo + hi for lo, hi in zip(left, reversed(right), strict=True)]


def _subdivide(nodes, alive):
    """Divide the remaining blocks. Return the new nodes and every break's blocks."""
    used = _union(len(nodes) - 2, alive, with_ends=False)
    start, stop = nodes[used], nodes[used + 1]
    inner = start[:, None] + (stop - start)[:, None] * np.arange(_SUBDIVIDE + 1) // _SUBDIVIDE
    finer = _union(nodes[-1], [inner.ravel()])
    renewed = [
        _runs(np.searchsorted(finer, nodes[a]), np.searchsorted(finer, nodes[a + 1])) for a in alive
    ]
    return finer, renewed


def _positions(nodes, alive):
    return _union(nodes[-1], [_runs(nodes[alive], nodes[alive + 1] + 1)], with_ends=False)


def _union(last, parts, *, with_ends=True):
    mask = np.zeros(last + 1, dtype=bool)
    mask[[0, last]] = with_ends
    for part in parts:
        mask[part] = True
    return np.flatnonzero(mask)


def _runs(starts, stops):
    """Return concatenate([arange(a, b) for a, b in zip(starts, stops)])."""
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
