"""Recompute the errors that tables claim, by SciPy's adaptive tanh-sinh quadrature, which the solver does not use."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fewbit.errors import FewbitError, FunctionError, MissingPackageError, TableError
from fewbit.extras import needed_for
from fewbit.printable import printable
from fewbit.render.result import Result
from fewbit.render.view import Column, View
from fewbit.table import describe_function, load_file

TOLERANCE = 1e-6
"""Largest relative difference between a claimed and a recomputed error."""
# Rounding alone may cause a claimed error of this share of the integral of f'**2 w.
_ROUNDING = 1e-28


@dataclass(frozen=True)
class Finding:
    """The result of checking one table of a file.

    Attributes:
        index: The table's place in the file, from 0.
        recomputed: The recomputed error; None if it could not be recomputed.
        problems: A line for each claim of the table that does not hold.
        unchecked: The reason why the error could not be recomputed, or None.
    """

    path: str
    index: int
    table: object
    recomputed: float | None
    problems: tuple[str, ...]
    unchecked: str | None = None

    @property
    def deviation(self):
        """|recomputed - claimed| / claimed error, or None."""
        if self.recomputed is None or not self.table.error > 0:
            return None
        return abs(self.recomputed - self.table.error) / self.table.error

    def record(self):
        is_finite = self.recomputed is not None and math.isfinite(self.recomputed)
        return {
            "file": self.path,
            "index": self.index,
            "function": self.table.function,
            "bits": self.table.bits,
            "form": self.table.form,
            "error": self.table.error,
            "recomputed": self.recomputed if is_finite else None,
            "holds": None if self.unchecked else not self.problems,
            "problems": list(self.problems),
            "unchecked": self.unchecked,
        }


def verify(
    path: str | os.PathLike, *, function: str | Callable | None = None, weight: object = None
) -> list[Finding]:
    """Check every table of a file: schema, errors and lower bound. More bits must never give a larger error.

    Args:
        path: The path of a file of tables.
        function: A callable or `package.module:name`, for tables of a function that is not built in. A name in the file
            is never imported.
        weight: The density by which errors count, for tables whose weight is a callable.

    Raises:
        TableError: The file is not a valid document, or contains no table.
        FunctionError: `function` cannot be used.
        MissingPackageError: SciPy is not installed.
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
        problems, recomputed, unchecked = [], None, None
        try:
            found = _recompute(table, weight)
        except MissingPackageError:
            raise
        except FewbitError as error:
            unchecked = f"the error cannot be recomputed: {error}"
        else:
            recomputed = found.error
            problems += _wrong_errors(table, found)
        problems += _rises(table, tables)
        findings.append(Finding(str(path), index, table, recomputed, tuple(problems), unchecked))
    return findings


def recompute_error(table, weight=None):
    """Recompute the error of a table with a known `activation` from f', q and w alone. `weight` replaces a weight that is a callable."""
    return _recompute(table, weight).error


@dataclass(frozen=True)
class _Recomputed:
    """A recomputed error, and numbers to compare claims with, all of the scaled weight.

    Attributes:
        scaled_error: The recomputed error, divided by 2**exponent, as are the next two.
        highest: The largest error that a table may claim; larger if f' is not known exactly.
        scale: The divisor of relative errors: the integral of f'**2 w, or for "minimax" the largest |f'|.
        exponent: 0 for objective "minimax".
    """

    scaled_error: float
    highest: float
    scale: float
    exponent: int

    @property
    def error(self):
        """The recomputed error; infinity beyond the range of float64."""
        with np.errstate(over="ignore"):
            return float(np.ldexp(self.scaled_error, self.exponent))


def _wrong_errors(table, found):
    def holds(claimed, tolerance):
        allowed = tolerance * claimed + _ROUNDING * found.scale
        # If f' is an approximation, the solver adds the effect of its inaccuracy to the error. `highest` includes the
        # effect.
        return found.scaled_error - allowed <= claimed <= found.highest + allowed

    with np.errstate(over="ignore"):
        claimed = float(np.ldexp(table.error, -found.exponent))
    if not holds(claimed, TOLERANCE):
        return [f"error: claimed {table.error:.9g}, recomputed {found.error:.9g}"]
    is_root = table.objective != "minimax"
    implied = table.relative_error ** (2 if is_root else 1) * found.scale
    if holds(implied, 2 * TOLERANCE):
        return []
    share = found.scaled_error / found.scale if found.scale > 0 else 0.0
    relative = math.sqrt(share) if is_root else share
    return [f"relative_error: claimed {table.relative_error:.9g}, recomputed {relative:.9g}"]


def _rises(table, tables):
    """Yield a line for each table with the same settings, fewer bits and a smaller error."""
    names = ("function", "parameters", "form", "objective", "weight", "domain", "tails")
    for other in tables:
        is_alike = all(getattr(other, name) == getattr(table, name) for name in names)
        if is_alike and other.bits < table.bits and table.error > other.error * (1 + 1e-9):
            yield (
                f"error rises with bits: {table.error:.6g} at {table.bits}, "
                f"{other.error:.6g} at {other.bits}"
            )


def _recompute(table, weight=None):
    from fewbit.solver.certificate import widened
    from fewbit.solver.weight import ScaledWeight, make_weight

    f = table.activation
    if f is None:
        raise FunctionError(
            f"fewbit has no function {describe_function(table)}; pass function= (--function) to name it yourself"
        )
    is_callable = table.weight["kind"] == "callable"
    weight = make_weight(weight if is_callable and weight is not None else table.weight)
    ends = _smooth_intervals(table, f, weight)
    if table.objective == "minimax":
        error, mass, exponent = _largest_deviation(table, f, weight, ends), 0.0, 0
        scale = _largest_slope(f, weight, ends)
    else:
        scaled = ScaledWeight(weight, table.domain)
        exponent = scaled.exponent
        largest = _largest_slope(f, weight, ends)
        error = _integral(lambda x: _loss(table, f, x) * scaled.density(x), ends, largest)
        mass = _integral(scaled.density, ends) if f.accuracy else 0.0
        scale = _integral(lambda x: f.derivative(x) ** 2 * scaled.density(x), ends, largest)
    highest, _ = widened(error, 0.0, accuracy=f.accuracy, mass=mass, objective=table.objective)
    return _Recomputed(error, highest, scale, exponent)


def _smooth_intervals(table, f, weight):
    """Return points between which f', q and w are smooth."""
    low, high = table.domain
    knots = table.knots.points if table.knots is not None else []
    edges = weight.edges(table.domain), weight.support_edges(table.domain)
    points = np.concatenate([table.breaks, f.kinks, *edges, knots, f.panels])
    inside = points[(points > low) & (points < high)]
    # Adaptive quadrature could miss a narrow density without points of the density's own mesh.
    hints = weight.mesh(table.domain)[::20]
    hints = hints[(hints > low) & (hints < high)]
    # On a wide domain, most of the function's shape is near 0.
    near = np.geomspace(1e-3, 1e3, 49)
    near = np.concatenate([-near, near])
    near = near[(near > low) & (near < high)]
    return np.unique(np.concatenate([[low, high], inside, hints, near, np.linspace(low, high, 41)]))


def _loss(table, f, x):
    slope = f.derivative(x)
    if table.objective != "unbiased":
        return (slope - table(x)) ** 2
    mean = table(x)
    lower = table.code(x)
    levels = table.levels
    return (mean - levels[lower]) * (levels[lower + 1] - mean) + (slope - mean) ** 2


def _integral(integrand, ends, slope=1.0):
    """Integrate a function that is smooth between the ends; `slope` squared has about its size."""
    with needed_for("fewbit.verify"):
        from scipy.integrate import tanhsinh

    def inside(x, left, right):
        # The outermost points of the rule round to the ends, at which q may already have changed.
        return integrand(np.clip(x, np.nextafter(left, right), np.nextafter(right, left)))

    left, right = ends[:-1], ends[1:]
    # If a break is beside a kink, the interval between them contains few floats: too few for the points of the rule.
    wide = right - left > 1e6 * np.spacing(np.maximum(np.abs(left), np.abs(right)))
    rest = _few_points(integrand, left[~wide], right[~wide])
    left, right = left[wide], right[wide]
    result = tanhsinh(
        inside, left, right, args=(left, right), rtol=1e-9, atol=1e-30 * slope**2, maxlevel=8
    )
    return float(np.sum(result.integral) + rest)


def _few_points(integrand, left, right):
    points, weights = np.polynomial.legendre.leggauss(5)
    x = left[:, None] + 0.5 * (points + 1) * (right - left)[:, None]
    return np.sum(integrand(x) @ weights * 0.5 * (right - left))


def _samples(left, right):
    x = left[:, None] + (right - left)[:, None] * np.linspace(0, 1, 257)
    x[:, 0], x[:, -1] = np.nextafter(left, right), np.nextafter(right, left)
    return x


def _largest_deviation(table, f, weight, ends):
    x = _samples(ends[:-1], ends[1:])
    deviation = np.abs(f.derivative(x) - table(x))
    return float(deviation[weight.support(x)].max())


def _largest_slope(f, weight, ends):
    """Return the largest |f'|; a second round samples around the first's largest value."""
    left, right = ends[:-1], ends[1:]
    for _ in range(2):
        x = _samples(left, right)
        slope = np.where(weight.support(x), np.abs(f.derivative(x)), 0.0)
        row, column = np.unravel_index(np.argmax(slope), slope.shape)
        neighbors = x[row, max(column - 1, 0)], x[row, min(column + 1, x.shape[1] - 1)]
        left, right = np.array(neighbors[:1]), np.array(neighbors[1:])
    return float(slope.max())


@dataclass(frozen=True, repr=False)
class Verification(Result):
    """The findings of several files.

    Attributes:
        files: Pairs of a path (`pathlib.Path`) and the findings of that file.
    """

    files: tuple

    @property
    def findings(self):
        """All findings."""
        return [finding for _, findings in self.files for finding in findings]

    def records(self) -> list[dict]:
        return [finding.record() for finding in self.findings]

    def view(self) -> View:
        columns = (
            Column("file", lambda file: printable(file[0].name), "text"),
            Column("tables", lambda file: str(len(file[1]))),
            Column("largest deviation", lambda file: _largest(file[1])),
            Column(
                "result",
                lambda file: _verdict(file[1])[0],
                "word",
                style=lambda file: _verdict(file[1])[1],
            ),
        )
        notes = [
            printable(f"{path.name}, tables[{finding.index}]: {line}")
            for path, findings in self.files
            for finding, line in (*_problems(findings), *_unchecked(findings))
        ]
        return View("", columns, self.files, notes)


def _problems(findings):
    return [(finding, problem) for finding in findings for problem in finding.problems]


def _unchecked(findings):
    return [(finding, finding.unchecked) for finding in findings if finding.unchecked]


def _largest(findings):
    deviations = [finding.deviation for finding in findings if finding.deviation is not None]
    return f"{max(deviations):.1e}" if deviations else "-"


def _verdict(findings):
    if problems := _problems(findings):
        return f"{len(problems)} wrong", "red"
    if unchecked := _unchecked(findings):
        return f"{len(unchecked)} not checked", "yellow"
    return "holds", "green"
