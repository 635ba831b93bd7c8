"""What the error-bound policy knows of each variable and activation, from its last observations, and what it allows.

Squared norms are kept in units of the sum of all V^2 of their observation: whoever scales losses changes all of them
alike, and nothing here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fewbit.policies.error_bound.bits import least_average
from fewbit.policies.error_bound.formulas import table_error
from fewbit.policies.error_bound.formulas.shares import polynomial_error, tolerance
from fewbit.runtime.saved.probe import SPREAD

HISTORY = 10
"""Observations that count (AC-GC, section 4: of the last ten the mean, or the maximum)."""
LEAST_SEEN = 3
"""Times that the monitor has to see a variable to know how far its gradients' norms spread."""
WINDOWS = ("mean", "max")


class Row(NamedTuple):
    """A demand in one observation: V^2, and the squares of the coefficients of D = (first dx + second dx^2)^2."""

    v2: float
    first2: float
    second2: float


class Pair(NamedTuple):
    """Squared norms of one gradient, as the monitor saw it: as it was, and from exact values."""

    hat2: float
    exact2: float


@dataclass(frozen=True)
class Estimate:
    """A demand in its last observations, the latest last.

    label, kind: as of `GradientConstraint`; "" where only other processes have seen it. missed: observations of its variable since
    without it.
    """

    label: str = ""
    kind: str = ""
    rows: tuple[Row, ...] = ()
    pairs: tuple[Pair, ...] = ()
    missed: int = 0

    def dx2(self, e2: float, window: str) -> float:
        """The mean squared error of the variable with which D is e2 V^2.

        window: "mean": of V^2 and of the coefficients' squares. "max": of V^2 the mean, of the coefficients the largest.
        """
        if not self.rows:
            return math.inf
        v2, first2, second2 = (_mean(each) for each in zip(*self.rows, strict=True))
        if window == "max":
            first2, second2 = (max(each) for each in list(zip(*self.rows, strict=True))[1:])
        return polynomial_error(tolerance(e2, v2), math.sqrt(first2), math.sqrt(second2))


@dataclass(frozen=True)
class Known:
    """Of one variable. average, is_fixed, is_known, elements, samples, dtype_bytes: as of `TensorNorms`, the latest.

    spreads: of each observation squares a part, in units of the mean of range^2 over the elements of its samples.
    weights: of channels, the mean of the last `weighed` observations. demands: by number (`sums.number_of`).
    missed: observations since without the variable.
    """

    average: float
    is_fixed: bool
    is_known: bool
    elements: int
    samples: int
    dtype_bytes: int
    spreads: tuple[tuple[float, ...], ...] = ()
    weights: tuple[float, ...] | None = None
    weighed: int = 0
    demands: dict[int, Estimate] = field(default_factory=dict)
    missed: int = 0

    def unmonitored(self) -> Known:
        """Without what the monitor saw."""
        demands = {number: replace(each, pairs=()) for number, each in self.demands.items()}
        return replace(self, demands=demands)

    def deciding(self, e2: float, window: str) -> tuple[float, Estimate | None]:
        """(the smallest dx*^2, the demand that has it); (infinity, None) without demands."""
        found = [(each.dx2(e2, window), each) for each in self.demands.values()]
        return min(found, key=lambda pair: pair[0], default=(math.inf, None))

    def least_average(self, dx2: float, window: str) -> float | None:
        """The fewest bits, on average, with a mean squared error of at most dx2; None if the most are not enough."""
        parts = min(self.samples, SPREAD) or 1
        alike = [each for each in self.spreads if len(each) == parts]
        combined = max if window == "max" else _mean
        squares = [combined(each) for each in zip(*alike, strict=True)]
        return least_average(squares, self.samples, self.samples or 1, dx2)

    def pairs(self, is_exact: bool = False) -> tuple[Pair, Pair]:
        """Sums over demands of the means of what the monitor saw: (of parameters' gradients, of all).

        is_exact: of a variable that is kept exactly: both are V^2.
        """
        if is_exact:
            seen = [
                (each, Pair(*2 * (_mean([row.v2 for row in each.rows]),)))
                for each in self.demands.values()
                if each.rows
            ]
        else:
            seen = [(each, _mean_pair(each.pairs)) for each in self.demands.values() if each.pairs]
        of_parameters = _sum(pair for each, pair in seen if is_of_parameter(each.label))
        return of_parameters, _sum(pair for _, pair in seen)

    def excess(self, limit: float, of_parameters: bool, is_exact: bool) -> tuple[float, float]:
        """(mean, squared standard error) of |g^|^2 - limit |g|^2, of parameters' gradients or of all, as the monitor saw it.

        The error of what was seen fewer than LEAST_SEEN times is as large as its mean. is_exact: as of `pairs`.
        """
        if is_exact:
            pair = self.pairs(is_exact=True)[not of_parameters]
            return pair.hat2 - limit * pair.exact2, 0.0
        seen = [
            [pair.hat2 - limit * pair.exact2 for pair in reversed(each.pairs)]
            for each in self.demands.values()
            if each.pairs and (is_of_parameter(each.label) or not of_parameters)
        ]
        # One after the other: gradients of one observation have their errors in common.
        values = [math.fsum(each) for each in zip(*seen, strict=False)]
        if len(values) < LEAST_SEEN:
            mean = _mean(values) if values else 0.0
            return mean, mean * mean
        return _mean(values), statistics.variance(values) / len(values)

    @property
    def ratio(self) -> float | None:
        """The largest E|g^|^2 / E|g|^2 of its demands that the monitor saw; None where it has seen none."""
        found = (_mean_pair(each.pairs) for each in self.demands.values() if each.pairs)
        return max((ratio_of(each) for each in found if each.exact2 > 0), default=None)


@dataclass(frozen=True)
class KnownActivation:
    """Of one few-bit activation. function, parameters: "" and () where only other processes have seen it.

    rows: (|gradient of the input|^2, |gradient of the result|^2) in its last observations.
    """

    function: str
    parameters: tuple[float, ...]
    rows: tuple[tuple[float, float], ...]
    missed: int = 0

    def allowed(self, e2: float, window: str) -> float:
        """The largest error of the table (not squared) that the bound allows; with "max" in each observation."""
        if window == "max":
            return min(table_error(grad2, e2, v2) for v2, grad2 in self.rows)
        v2, grad2 = (_mean(each) for each in zip(*self.rows, strict=True))
        return table_error(grad2, e2, v2)


def is_of_parameter(label: str) -> bool:
    """Whether a demand's gradient is that of a parameter."""
    return label.rpartition(" ")[2] == "weight"


def ratio_of(pair: Pair) -> float | None:
    """|g^|^2 / |g|^2."""
    return pair.hat2 / pair.exact2 if pair.exact2 > 0 else None


def total_of(known: Iterable[tuple[Known, bool]]) -> tuple[Pair, Pair]:
    """Sums of `Known.pairs`. known: with whether it is kept exactly."""
    of_parameters, of_all = [], []
    for each, is_exact in known:
        for to, pair in zip((of_parameters, of_all), each.pairs(is_exact), strict=True):
            to.append(pair)
    return _sum(of_parameters), _sum(of_all)


def latest(rows: tuple, row) -> tuple:
    """The last HISTORY rows with one more."""
    return (*rows, row)[-HISTORY:]


def _mean(values) -> float:
    return math.fsum(values) / len(values)


def _mean_pair(pairs) -> Pair:
    return Pair(*map(_mean, zip(*pairs, strict=True)))


def _sum(pairs: Iterable[Pair]) -> Pair:
    hat2 = exact2 = 0.0
    for pair in pairs:
        hat2, exact2 = hat2 + pair.hat2, exact2 + pair.exact2
    return Pair(hat2, exact2)
