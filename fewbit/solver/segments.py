"""Compute the cost of a segment of a sequence in constant time and without cancellation (docs/decisions/0002).

The cost is the weighted sum of squared deviations from the segment's mean (Few-bit Backward, appendix G, eq. 11). A *disjoint sparse
table* stores, for every l and every item, the mass W, the mean M and the spread S of the run between the item and the middle of its
block of 2**(l+1) items. Every segment of at least two items is the union of two such runs, so

    cost = S_left + S_right + W_left W_right / (W_left + W_right) (M_left - M_right)**2,

a sum of non-negative terms (Chan, Golub, LeVeque 1983). Means of runs are relative to the anchor of an item of the block. Memory is
O(n log n).
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["Items", "merge_runs"]


class Items:
    """A sequence of weighted values in a fixed order, and the costs of its segments.

    Args:
        mass: float64 (n,), not negative, the weights of the items.
        anchor: float64 (n,). The mean of item i is anchor[i] + offset[i].
        offset: float64 (n,), by default 0.
        spread: float64 (n,), for each item the weighted sum of squared deviations from its mean; by default 0.
    """

    def __init__(self, mass, anchor, offset=None, spread=None):
        self.mass = np.ascontiguousarray(mass, dtype=np.float64)
        self.anchor = np.ascontiguousarray(anchor, dtype=np.float64)
        zeros = np.zeros_like(self.mass)
        self.offset = zeros if offset is None else np.ascontiguousarray(offset, dtype=np.float64)
        self.spread = zeros if spread is None else np.ascontiguousarray(spread, dtype=np.float64)
        self._table = None

    def __len__(self):
        return len(self.mass)

    @property
    def mean(self):
        """The means of the items, float64 (n,)."""
        return self.anchor + self.offset

    @property
    def table(self):
        """The disjoint sparse table.

        Returns:
            moments: float64 (depth, n, 3), the mass, the mean relative to the block's reference, and the spread of each run.
            references: float64 (depth, blocks), the anchor that was subtracted from the means of each block.
            level_of: uint8. Its entry at (first item XOR last item) of a segment is the l at which a middle divides it.
        """
        if self._table is None:
            n = max(len(self), 1)
            depth = max(1, int(n - 1).bit_length())
            level_of = np.zeros(1 << depth, dtype=np.uint8)
            for level in range(depth):
                level_of[1 << level : 1 << (level + 1)] = level
            moments = np.zeros((depth, n, 3))
            references = np.zeros((depth, (n + 1) // 2))
            if len(self):
                _build(self.mass, self.anchor, self.offset, self.spread, moments, references)
            self._table = (moments, references, level_of)
        return self._table

    def cost(self, start, stop):
        """Return the cost of the items start <= i < stop."""
        moments, _, level_of = self.table
        return segment_cost(moments, level_of, self.spread, start, stop)

    def segment_means(self, breaks):
        """Return the weighted means float64 (K,) of the segments between `breaks`, int (K-1,); nan without mass."""
        edges = np.concatenate([[0], breaks, [len(self)]]).astype(np.int64)
        runs = merge_runs(self.mass, self.anchor, self.offset, self.spread, edges)
        return np.where(runs.mass > 0, runs.mean, np.nan)

    def compress(self, nodes):
        """Merge the items between neighboring `nodes`, ascending positions from 0 to n."""
        return merge_runs(self.mass, self.anchor, self.offset, self.spread, nodes)


def merge_runs(mass, anchor, offset, spread, nodes):
    """Return new `Items`, with the items between neighboring `nodes` merged."""
    nodes = np.ascontiguousarray(nodes, dtype=np.int64)
    out = np.zeros((4, len(nodes) - 1))
    _merge_runs(mass, anchor, offset, spread, nodes, out)
    return Items(*out)


@njit(cache=True, nogil=True, error_model="numpy")
def _merge_runs(mass, anchor, offset, spread, nodes, out):
    for r in range(len(nodes) - 1):
        a, b = nodes[r], nodes[r + 1]
        if b <= a:
            continue
        reference = anchor[_first_with_mass(mass, a, b, 1)]
        total = 0.0
        first = 0.0
        for i in range(a, b):
            total += mass[i]
            first += mass[i] * ((anchor[i] - reference) + offset[i])
        mean = first / total if total > 0.0 else 0.0
        second = 0.0
        for i in range(a, b):
            d = ((anchor[i] - reference) + offset[i]) - mean
            second += spread[i] + mass[i] * (d * d)
        out[0, r] = total
        out[1, r] = reference
        out[2, r] = mean
        out[3, r] = second


@njit(cache=True, nogil=True, error_model="numpy")
def _first_with_mass(mass, start, stop, step):
    i = start
    while i != stop and mass[i] == 0.0:
        i += step
    return start if i == stop else i


@njit(cache=True, nogil=True, error_model="numpy")
def _build(mass, anchor, offset, spread, moments, references):
    """Fill the arrays of `Items.table`, in which `level` is the exponent l."""
    depth, n, _ = moments.shape
    for level in range(depth):
        half = 1 << level
        middle = half
        while middle - half < n:
            stop = min(middle, n)
            bottom = middle - half
            reference = anchor[_first_with_mass(mass, stop - 1, bottom - 1, -1)]
            references[level, bottom >> (level + 1)] = reference
            w = 0.0
            m = 0.0
            s = 0.0
            for i in range(stop - 1, bottom - 1, -1):
                w, m, s = _add(w, m, s, mass[i], (anchor[i] - reference) + offset[i], spread[i])
                moments[level, i, 0] = w
                moments[level, i, 1] = m
                moments[level, i, 2] = s
            if middle < n:
                top = min(middle + half, n)
                near = anchor[_first_with_mass(mass, middle, top, 1)]
                shift = near - reference
                w = 0.0
                m = 0.0
                s = 0.0
                for i in range(middle, top):
                    w, m, s = _add(w, m, s, mass[i], (anchor[i] - near) + offset[i], spread[i])
                    moments[level, i, 0] = w
                    moments[level, i, 1] = m + shift
                    moments[level, i, 2] = s
            middle += 2 * half


@njit(cache=True, nogil=True, error_model="numpy")
def _add(w, m, s, mass, mean, spread):
    total = w + mass
    if total > 0.0:
        d = mean - m
        share = mass / total
        m += d * share
        s += spread + d * d * (w * share)
    return total, m, s


@njit(cache=True, nogil=True, error_model="numpy")
def segment_cost(moments, level_of, spread, start, stop):
    """Return the cost of the segment start <= i < stop."""
    last = stop - 1
    if start >= last:
        return spread[start] if start == last else 0.0
    level = level_of[start ^ last]
    w1 = moments[level, start, 0]
    w2 = moments[level, last, 0]
    total = w1 + w2
    s = moments[level, start, 2] + moments[level, last, 2]
    if total > 0.0:
        d = moments[level, start, 1] - moments[level, last, 1]
        s += d * d * (w1 * (w2 / total))
    return s
