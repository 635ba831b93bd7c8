"""Error bounds of pointwise functions: docs/theory/ac_gc.md, section 8.

The input's gradient is f'(x) g. Either x is saved with errors, or the few-bit codes of a table stand for f'(x). The error
of a table is the same in each step. So it never averages out, and has a worst-case bound only.
"""

from __future__ import annotations

import math

import numpy as np

from fewbit.errors import FunctionError, InputError
from fewbit.policies.error_bound.formulas.shares import quotient, square, tolerance
from fewbit.solver.cells import survey
from fewbit.solver.weight import Uniform
from fewbit.table import Table

CURVATURE = {
    "gelu": math.sqrt(2.0 / math.pi),
    "silu": 0.5,
    "sigmoid": 1.0 / (6.0 * math.sqrt(3.0)),
    "tanh": 4.0 / (3.0 * math.sqrt(3.0)),
    "softplus": 0.25,
}
"""max |f''| of smooth functions, in exact form; at x = 0 for gelu, silu and softplus."""


def pointwise_d(dx2: float, curvature: float, grad2: float) -> float:
    """Return D of the input's gradient if x is saved: curvature^2 |g|^2 dx2, in the worst case and in expectation.

    The mean of the errors need not be 0 for the bound in expectation.

    Args:
        dx2: the largest squared error of an element, not the mean.
        curvature: the largest change of f' per unit of x; max |f''| if f' has no jumps.
        grad2: |g|^2, where g is the gradient of the result.
    """
    return square("curvature", curvature) ** 2 * square("grad2", grad2) * square("dx2", dx2)


def pointwise_error(curvature: float, grad2: float, e2: float, v2: float) -> float:
    """Return dx2 with which `pointwise_d` is e2 v2, where v2 is |grad of the input|^2."""
    return quotient(tolerance(e2, v2), square("curvature", curvature) ** 2 * square("grad2", grad2))


def table_d(largest: float, grad2: float) -> float:
    """Return D of the input's gradient if a table stands for f': largest^2 |g|^2, in the worst case.

    Args:
        largest: max |q - f'| over the data, for example from `largest_table_error`.
        grad2: |g|^2, where g is the gradient of the result.
    """
    return square("largest", largest) ** 2 * square("grad2", grad2)


def table_error(grad2: float, e2: float, v2: float) -> float:
    """Return the largest max |q - f'| (not squared) with which `table_d` is at most e2 v2."""
    return math.sqrt(quotient(tolerance(e2, v2), square("grad2", grad2)))


def largest_table_error(table: Table, low: float, high: float) -> float:
    """Return max |q(x) - f'(x)| over low <= x <= high, with q's levels in float32 as they are at run time.

    The error is monotone between breaks, kinks and turns of f', so its maximum is at one of them. Turns are found as in
    the solver (docs/solver.md).

    Args:
        table: the table of q. If it is unbiased, q is either of the two levels that may be drawn.
        low: the lower end of the interval, which may lie outside the table's domain.
        high: the upper end.

    Raises:
        InputError: the interval is empty or infinite.
        FunctionError: fewbit has no function of the table's name.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(f"expected finite ends low < high, got {low} and {high}")
    f = table.activation
    if f is None:
        raise FunctionError(f"expected a table of a function that fewbit has, got {table.function}")
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
    """Return |q - f'|, (k, n), for points x, (n,), and values of f' in `slopes`, (k, n)."""
    levels = table.levels.astype(np.float32).astype(np.float64)
    codes = table.code(x)
    distance = np.abs(slopes - levels[codes])
    if table.objective == "unbiased":
        distance = np.maximum(distance, np.abs(slopes - levels[codes + 1]))
    return distance
