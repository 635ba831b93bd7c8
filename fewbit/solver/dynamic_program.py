"""One layer of the dynamic program that cuts a sequence of items into segments with the smallest total cost.

A layer computes, for ascending positions `rows` and `columns` at which its segment may end and start,

    out[i] = min over j of previous[j] + cost(columns[j], rows[i]).

There are two exact searches, which release the interpreter lock:

divide: for Monge costs, whose best column never moves left as the row moves right. Divide and conquer takes
    O((rows + columns) log rows).
scan: for costs that do not shrink when the segment gets longer. It visits blocks of columns from right to left, and skips
    those whose shortest segment plus smallest `previous` is not below the best total so far.

With `slack = 1` a segment may start one position after its end, at cost 0, as bounds of `partition` need. With `flip = n` the
layer runs on the reversed sequence of n items.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

SQUARED_DEVIATION = 0
"""The cost of a segment whose items are replaced by their mean."""
RANDOM_CHOICE = 1
"""The cost of a segment whose items each become one of two values at random, with the item as mean."""
_BLOCK = 32
_TIE = 1e-14
# With fewer evaluations of costs, of about 3 ns each, threads would save less time than starting them takes.
_SERIAL_WORK = 2_000_000


def thread_count():
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class PieceCosts:
    """The costs of all segments of a sequence of items.

    Args:
        kind: `SQUARED_DEVIATION`: the squared error if the items start <= i < stop are replaced by their mean.
            `RANDOM_CHOICE`: the sum of w (v - v_start)(v_stop - v), the expected squared error if each becomes the level
            v_start or v_stop at random.
        forced: Values that must be levels, for `RANDOM_CHOICE`. A segment that passes one costs infinity.
    """

    def __init__(self, items, kind=SQUARED_DEVIATION, forced=()):
        self.items = items
        self.kind = kind
        self.values = items.mean if kind == RANDOM_CHOICE else np.zeros(1)
        self.forced = np.asarray(forced, dtype=np.float64)

    @property
    def arguments(self):
        """The first seven arguments of this module's compiled functions."""
        moments, references, level_of = self.items.table
        spread = self.items.spread
        return moments, references, level_of, spread, self.values, self.forced, self.kind


def run_layer(costs, columns, previous, rows, *, monge, slack=0, flip=-1, threads=1):
    """Compute one layer, as the module's docstring describes it.

    Returns:
        For every row: float64, the least cost; and int64, the index in `columns` of the best column. If every column is too
        far right, these are infinity and -1.
    """
    out = np.full(len(rows), np.inf)
    best = np.full(len(rows), -1, dtype=np.int64)
    if len(rows) == 0 or len(columns) == 0:
        return out, best
    fixed = (*costs.arguments, columns, previous, rows, slack, flip, out, best)
    if monge:
        _divide_threads(fixed, threads)
    else:
        _scan_threads(fixed, previous, threads)
    return out, best


def _divide_threads(fixed, threads):
    *_, columns, previous, rows, slack, flip, out, best = fixed
    last = len(columns) - 1
    # Divide and conquer visits every column about log2(rows) times.
    if threads == 1 or (len(rows) + len(columns)) * 16 < _SERIAL_WORK:
        _divide(*fixed, 0, len(rows), 0, last)
        return
    cuts = np.linspace(0, len(rows), threads + 1).astype(np.int64)
    for row in cuts[1:-1]:
        _divide(*fixed, row, row + 1, 0, last)
    known = [0, *(max(best[row], 0) for row in cuts[1:-1]), last]
    with ThreadPoolExecutor(threads) as pool:
        jobs = [
            pool.submit(_divide, *fixed, cuts[t], cuts[t + 1], known[t], known[t + 1])
            for t in range(threads)
        ]
        for job in jobs:
            job.result()


def _scan_threads(fixed, previous, threads):
    *_, columns, _, rows, slack, flip, out, best = fixed
    floor = np.minimum.accumulate(previous)
    padded = np.full(-(-len(previous) // _BLOCK) * _BLOCK, np.inf)
    padded[: len(previous)] = previous
    block_floor = padded.reshape(-1, _BLOCK).min(axis=1)
    if threads == 1 or len(rows) * len(columns) < _SERIAL_WORK:
        _scan(*fixed, floor, block_floor, 0, len(rows))
        return
    # Later rows have more columns, so many small shares distribute the work evenly.
    cuts = np.linspace(0, len(rows), 8 * threads + 1).astype(np.int64)
    with ThreadPoolExecutor(threads) as pool:
        jobs = [
            pool.submit(_scan, *fixed, floor, block_floor, a, b)
            for a, b in zip(cuts[:-1], cuts[1:], strict=True)
        ]
        for job in jobs:
            job.result()


# In compiled code a call takes longer than computing a cost, so one call computes the costs of a block of columns.
@njit(cache=True, nogil=True, error_model="numpy")
def _fill_costs(
    moments, references, level_of, spread, values, forced, kind,
    columns, first_column, stop_column, row, flip, out,
):  # fmt: skip
    """Set out[t] to the cost of the segment from columns[first_column + t] to row."""
    for t in range(stop_column - first_column):
        start = columns[first_column + t]
        stop = row
        if flip >= 0:
            stop = flip - start
            start = flip - row
        if start >= stop:
            out[t] = 0.0
            continue
        lower = 0.0
        upper = 0.0
        if kind == RANDOM_CHOICE:
            lower = values[start]
            upper = values[stop]
            start += 1
            if start == stop:
                out[t] = 0.0
                continue
        last = stop - 1
        if start == last:
            mass = moments[0, start, 0]
            mean = values[start] if kind == RANDOM_CHOICE else 0.0
            s = spread[start]
        else:
            level = level_of[start ^ last]
            w1 = moments[level, start, 0]
            w2 = moments[level, last, 0]
            m1 = moments[level, start, 1]
            m2 = moments[level, last, 1]
            mass = w1 + w2
            s = moments[level, start, 2] + moments[level, last, 2]
            share = w2 / mass if mass > 0.0 else 0.0
            d = m2 - m1
            s += d * d * (w1 * share)
            mean = m1 + d * share
            if kind == RANDOM_CHOICE:
                mean += references[level, last >> (level + 1)]
        if kind == RANDOM_CHOICE:
            s = max(mass * ((mean - lower) * (upper - mean)) - s, 0.0)
            for f in range(len(forced)):
                if lower < forced[f] < upper:
                    s = np.inf
        out[t] = s


@njit(cache=True, nogil=True, error_model="numpy")
def _divide(
    moments, references, level_of, spread, values, forced, kind,
    columns, previous, rows, slack, flip, out, best,
    row_start, row_stop, column_first, column_last,
):  # fmt: skip
    buffer = np.empty(_BLOCK)
    stack = np.empty((128, 4), dtype=np.int64)
    stack[0, 0] = row_start
    stack[0, 1] = row_stop
    stack[0, 2] = column_first
    stack[0, 3] = column_last
    depth = 1
    while depth > 0:
        depth -= 1
        r0 = stack[depth, 0]
        r1 = stack[depth, 1]
        c0 = stack[depth, 2]
        c1 = stack[depth, 3]
        if r0 >= r1:
            continue
        middle = (r0 + r1) >> 1
        row = rows[middle]
        # Find the last valid column of c0 .. c1 by bisection. All columns after it are right of the row.
        low = c0
        high = c1 + 1
        while low < high:
            probe = (low + high) >> 1
            if columns[probe] <= row + slack:
                low = probe + 1
            else:
                high = probe
        valid = low
        least = np.inf
        where = np.int64(-1)
        tie_first = np.int64(-1)
        tie_last = np.int64(-1)
        for j0 in range(c0, valid, _BLOCK):
            j1 = min(j0 + _BLOCK, valid)
            _fill_costs(
                moments, references, level_of, spread, values, forced, kind,
                columns, j0, j1, row, flip, buffer,
            )  # fmt: skip
            for j in range(j0, j1):
                total = previous[j] + buffer[j - j0]
                if total < least * (1.0 - _TIE):
                    tie_first = j
                if total <= least * (1.0 + _TIE) and total < np.inf:
                    tie_last = j
                if total < least:
                    least = total
                    where = j
        out[middle] = least
        best[middle] = where
        # The totals of several columns may differ by rounding only. Rows whose costs are much smaller can tell these
        # columns apart, so the search for other rows includes all of them. A cost of 0 is exact.
        if least == 0.0:
            tie_first = where
            tie_last = where
        # A row without a valid column must not narrow the search for other rows.
        if where < 0:
            tie_first = max(valid - 1, c0)
            tie_last = tie_first
        stack[depth, 0] = middle + 1
        stack[depth, 1] = r1
        stack[depth, 2] = tie_first
        stack[depth, 3] = c1
        depth += 1
        stack[depth, 0] = r0
        stack[depth, 1] = middle
        stack[depth, 2] = c0
        stack[depth, 3] = tie_last
        depth += 1


@njit(cache=True, nogil=True, error_model="numpy")
def _scan(
    moments, references, level_of, spread, values, forced, kind,
    columns, previous, rows, slack, flip, out, best,
    floor, block_floor, row_start, row_stop,
):  # fmt: skip
    buffer = np.empty(_BLOCK)
    count = len(columns)
    top = np.int64(0)
    warm = np.int64(-1)
    for i in range(row_start, row_stop):
        row = rows[i]
        while top < count and columns[top] <= row + slack:
            top += 1
        least = np.inf
        where = np.int64(-1)
        if warm >= 0:
            _fill_costs(
                moments, references, level_of, spread, values, forced, kind,
                columns, warm, warm + 1, row, flip, buffer,
            )  # fmt: skip
            least = previous[warm] + buffer[0]
            where = warm
        stop = top
        while stop > 0:
            block = (stop - 1) // _BLOCK
            bottom = block * _BLOCK
            _fill_costs(
                moments, references, level_of, spread, values, forced, kind,
                columns, stop - 1, stop, row, flip, buffer,
            )  # fmt: skip
            near = buffer[0]
            if near + floor[stop - 1] >= least:
                break
            if near + block_floor[block] < least:
                _fill_costs(
                    moments, references, level_of, spread, values, forced, kind,
                    columns, bottom, stop, row, flip, buffer,
                )  # fmt: skip
                for c in range(bottom, stop):
                    total = previous[c] + buffer[c - bottom]
                    if total < least:
                        least = total
                        where = c
            stop = bottom
        out[i] = least
        best[i] = where
        warm = where
