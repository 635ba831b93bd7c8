"""The bits that keep the largest error of an activation's table within a bound (docs/concepts/theory/ac_gc.md, section 8)."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from fewbit import functions
from fewbit.catalog import store
from fewbit.config import MAX_BITS, MIN_BITS
from fewbit.errors import FewbitError
from fewbit.policies.error_bound.largest_errors import quotient, square, tolerance
from fewbit.runtime.activations.tables import DEFAULT
from fewbit.solver.cells import survey
from fewbit.solver.weight import Uniform
from fewbit.table import Table


def least_bits(function: str, parameters: tuple[float, ...], allowed: float) -> int | None:
    """Return the fewest bits with which the `table_error` is at most `allowed`, or None."""
    for bits in range(MIN_BITS, MAX_BITS + 1):
        if table_error(function, parameters, bits) <= allowed:
            return bits
    return None


@lru_cache(maxsize=1024)
def table_error(function: str, parameters: tuple[float, ...], bits: int) -> float:
    """Return max |q - f'| over the domain of a function's default table."""
    names = functions.get(function).parameters
    given = dict(zip(names, parameters, strict=True))
    table = store.load_table(function, bits, parameters=given, **DEFAULT)
    return largest_table_error(table, *table.domain)


def is_known(function: str, parameters: tuple[float, ...]) -> bool:
    """Return whether the function with these parameters has a default table."""
    try:
        # With the fewest bits, because larger tables take long to solve, and a function with two slopes needs no more.
        table_error(function, parameters, MIN_BITS)
    except FewbitError:
        return False
    return True


def allowed_error(grad2: float, e2: float, v2: float) -> float:
    """Return the largest error E of a table that the bound allows: E^2 grad2 = e2 v2."""
    return math.sqrt(quotient(tolerance(e2, v2), square("grad2", grad2)))


def largest_table_error(table: Table, low: float, high: float) -> float:
    """Return max |q(x) - f'(x)| over low <= x <= high; for an unbiased table, q(x) is the worse of two levels.

    The interval is finite, and fewbit has the table's function f. Between breaks of q, kinks of f and extrema of f' the
    error is monotone.
    """
    f = table.activation
    domain = (float(low), float(high))
    scape = survey(
        f.derivative, f.kinks, Uniform(), domain, f.name, panels=f.panels, accuracy=f.accuracy
    )
    knots = () if table.knots is None else table.knots.points
    points = np.concatenate([table.breaks, scape.kinks, scape.extrema, knots])
    nodes = np.unique(np.concatenate([[low, high], points[(points > low) & (points < high)]]))
    left, right = nodes[:-1], nodes[1:]
    ends = np.stack(scape.end_values(left, right))
    inside = _worst_distance(table, 0.5 * (left + right), ends)
    at_nodes = _worst_distance(table, nodes, f.derivative(nodes)[None])
    return float(max(inside.max(), at_nodes.max())) + f.accuracy


def _worst_distance(table: Table, x, slopes) -> np.ndarray:
    """Return |q(x) - slopes|, (k, n), for points x, (n,), and values of f', (k, n), in `slopes`."""
    levels = table.levels.astype(np.float32).astype(np.float64)
    codes = table.code(x)
    distance = np.abs(slopes - levels[codes])
    if table.objective == "unbiased":
        distance = np.maximum(distance, np.abs(slopes - levels[codes + 1]))
    return distance
