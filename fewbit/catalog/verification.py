"""Recomputing what a table claims, by means other than those that made it.

The solver integrates with Gauss-Legendre rules on its own cells; here every smooth stretch of the
domain is integrated by SciPy's adaptive tanh-sinh quadrature.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fewbit.errors import FewbitError, FunctionError, TableError
from fewbit.table import describe_function, load_file

TOLERANCE = 1e-6
# Below this a claimed error is rounding: squared deviations of 1e-16 on a domain of width 20.
_ROUNDING = 1e-28


@dataclass(frozen=True)
class Finding:
    """One table of one file: the claim, what was recomputed, and the problems (none: it holds).

    ``unchecked`` says why the error could not be recomputed, which is no verdict on the claim.
    """

    path: str
    index: int
    table: object
    recomputed: float | None
    problems: tuple[str, ...]
    unchecked: str | None = None


def verify(path, *, function=None, weight=None):
    """Check every table of a file: schema, recomputed error, bound, error never rising with bits.

    Args:
        path: the path of a file of tables.
        function: a callable or `package.module:name`, for tables of a function that is not built in. A name in
            the file is never imported.
        weight: the density, for tables whose weight is a callable.

    Returns:
        A list of :class:`Finding`, one for each table.

    Raises:
        TableError: the file is not a valid document, or contains no table.
        FunctionError: `function` cannot be used.
    """
    tables = load_file(path)
    if not tables:
        raise TableError(f"{path}: expected at least one table to verify, got none")
    if function is not None:
        tables = [
            table if table.activation is not None else table.with_activation(function)
            for table in tables
        ]
    findings = []
    for index, table in enumerate(tables):
        problems = []
        recomputed = unchecked = None
        try:
            recomputed, highest = _recomputed(table, weight)
        except FewbitError as error:
            unchecked = f"the error cannot be recomputed: {error}"
        else:
            allowed = TOLERANCE * table.error + _ROUNDING
            # If f' is known only up to its accuracy, the claimed error may be larger than the recomputed one by that effect.
            if not recomputed - allowed <= table.error <= highest + allowed:
                problems.append(f"error: claimed {table.error:.9g}, recomputed {recomputed:.9g}")
        better = [other for other in tables if _same_but_fewer_bits(other, table)]
        for other in better:
            if table.error > other.error * (1 + 1e-9):
                problems.append(
                    f"error rises with bits: {table.error:.6g} at {table.bits}, {other.error:.6g} at {other.bits}"
                )
        findings.append(Finding(str(path), index, table, recomputed, tuple(problems), unchecked))
    return findings


def recompute_error(table, weight=None):
    """Recompute the error that :attr:`Table.error` claims, from f', q and w alone.

    Args:
        table: a table with a known `activation`.
        weight: the density, if the table's weight is a callable.

    Returns:
        The error, a float.

    Raises:
        FunctionError: the table's function is not known.
        WeightError: the table's weight is a callable and `weight` is not given.
    """
    return _recomputed(table, weight)[0]


def _recomputed(table, weight=None):
    """Return the recomputed error, and the largest value that ``f.accuracy`` allows for it."""
    from fewbit.solver.certificate import widened
    from fewbit.solver.weight import make_weight

    f = table.activation
    if f is None:
        raise FunctionError(
            f"fewbit has no function {describe_function(table)}; pass function= (--function) to name it yourself"
        )
    is_callable = table.weight["kind"] == "callable"
    weight = make_weight(weight if is_callable and weight is not None else table.weight)
    ends = _stretches(table, f, weight)
    if table.objective == "minimax":
        error, mass = _largest_deviation(table, f, weight, ends), 0.0
    else:
        error = _integral(lambda x: _loss(table, f, x) * weight.density(x), ends)
        mass = _integral(weight.density, ends) if f.accuracy else 0.0
    highest, _ = widened(error, 0.0, accuracy=f.accuracy, mass=mass, objective=table.objective)
    return error, highest


def _same_but_fewer_bits(other, table):
    same = ("function", "parameters", "form", "objective", "weight", "domain", "tails")
    return other.bits < table.bits and all(
        getattr(other, name) == getattr(table, name) for name in same
    )


def _stretches(table, f, weight):
    """Points between which f', q and w are all smooth."""
    low, high = table.domain
    knots = table.knots.points if table.knots is not None else []
    points = np.concatenate([table.breaks, f.kinks, weight.edges(table.domain), knots, f.panels])
    inside = points[(points > low) & (points < high)]
    # Adaptive quadrature alone could step over a narrow density.
    hints = weight.mesh(table.domain)[::20]
    hints = hints[(hints > low) & (hints < high)]
    return np.unique(np.concatenate([[low, high], inside, hints, np.linspace(low, high, 41)]))


def _loss(table, f, x):
    slope = f.derivative(x)
    if table.objective != "unbiased":
        return (slope - table(x)) ** 2
    mean = table(x)
    lower = table.code(x)
    levels = table.levels
    return (mean - levels[lower]) * (levels[lower + 1] - mean) + (slope - mean) ** 2


def _integral(integrand, ends):
    from scipy.integrate import tanhsinh

    def inside(x, left, right):
        # The rule's outermost points round to the ends, where q may already have changed.
        return integrand(np.clip(x, np.nextafter(left, right), np.nextafter(right, left)))

    left, right = ends[:-1], ends[1:]
    # A break beside a kink leaves a stretch of a few floats, too narrow for the rule's points.
    wide = right - left > 1e-9 * (1 + np.abs(left))
    thin = ~wide
    rest = np.sum(integrand(0.5 * (left[thin] + right[thin])) * (right[thin] - left[thin]))
    left, right = left[wide], right[wide]
    result = tanhsinh(inside, left, right, args=(left, right), rtol=1e-9, atol=1e-30, maxlevel=8)
    return float(np.sum(result.integral) + rest)


def _largest_deviation(table, f, weight, ends):
    left, right = ends[:-1], ends[1:]
    x = left[:, None] + (right - left)[:, None] * np.linspace(0, 1, 257)
    x[:, 0], x[:, -1] = np.nextafter(left, right), np.nextafter(right, left)
    deviation = np.abs(f.derivative(x) - table(x))
    return float(deviation[weight.density(x) > 0].max())
