"""The error-bound policy's knowledge of each saved tensor and activation, from the last measurements.

Squared norms are divided by the measurement's sum of V^2, so the scale of the loss has no effect.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fewbit.config import UNIFORM
from fewbit.policies.error_bound.largest_errors import least_average, polynomial_error, tolerance
from fewbit.policies.error_bound.observations import (
    ActivationNorms,
    GradientConstraint,
    MonitoredNorms,
    TensorNorms,
    by_label,
    parts_of,
    sums_by_label,
)
from fewbit.policies.error_bound.table_errors import allowed_error
from fewbit.policies.records import MOST, Record
from fewbit.policies.unobserved import FORGOTTEN

HISTORY = 10
"""The number of latest measurements that count (AC-GC, section 4)."""
LEAST_SEEN = 3
"""The fewest measurements of the monitor that give a standard error."""
MOST_RATIO = 1e250
"""The largest quotient of two squared norms that is stored."""


class ConstraintRow(NamedTuple):
    """V^2, first^2 and second^2 of one measured `GradientConstraint`."""

    v2: float
    first2: float
    second2: float


class Pair(NamedTuple):
    """The squared norms of one gradient, as in `MonitoredNorms`."""

    hat2: float
    exact2: float


class ActivationRow(NamedTuple):
    """The squared norms of the gradients of an activation's input and result in one measurement."""

    v2: float
    grad2: float


@dataclass(frozen=True)
class ConstraintEstimate(Record):
    """The last measurements of one `GradientConstraint`.

    Args:
        rows: one for each measurement, the latest last.
        pairs: the monitor's measurements.
        missed: the number of measurements of the saved tensor since the last one with this constraint.
    """

    label: str = ""
    kind: str = ""
    rows: tuple[ConstraintRow, ...] = ()
    pairs: tuple[Pair, ...] = ()
    missed: int = 0

    @property
    def key(self) -> str:
        """The label."""
        return self.label

    def dx2(self, e2: float, window: str) -> float:
        """Return the largest mean squared error that this constraint allows; `window` is `ErrorBound.window`."""
        if not self.rows:
            return math.inf
        v2, first2, second2 = (mean(values) for values in zip(*self.rows, strict=True))
        if window == "max":
            _, first2, second2 = map(max, zip(*self.rows, strict=True))
        return polynomial_error(tolerance(e2, v2), math.sqrt(first2), math.sqrt(second2))


@dataclass(frozen=True)
class TensorEstimate(Record):
    """All that is known of one slot. The fields from `name` to `dtype_bytes` are those of the latest `TensorNorms`.

    Args:
        spreads: `TensorNorms.squares` of each measurement, divided by the number of elements of a sample.
        weights: the mean weights of channels; None for equal weights.
        weighed: the number of measurements in `weights`, at most HISTORY.
        missed: the number of measurements since the slot was last measured.
    """

    name: str
    input: int
    average: float
    is_fixed: bool
    is_known: bool
    elements: int
    samples: int
    dtype_bytes: int
    spreads: tuple[tuple[float, ...], ...] = ()
    weights: tuple[float, ...] | None = None
    weighed: int = 0
    constraints: Mapping[str, ConstraintEstimate] = field(default_factory=dict)
    missed: int = 0
    quantizer: str = UNIFORM

    @property
    def key(self) -> tuple[str, int]:
        """The name of the slot."""
        return self.name, self.input

    def unmonitored(self) -> TensorEstimate:
        """Return the estimate without the monitor's measurements."""
        constraints = {
            label: replace(constraint, pairs=()) for label, constraint in self.constraints.items()
        }
        return replace(self, constraints=constraints)

    def deciding(self, e2: float, window: str) -> tuple[float, ConstraintEstimate | None]:
        """Return (allowed mean squared error, constraint) of the strictest constraint; (inf, None) without one."""
        found = [(made.dx2(e2, window), made) for made in self.constraints.values()]
        return min(found, key=lambda pair: pair[0], default=(math.inf, None))

    def least_average(self, dx2: float, window: str) -> float | None:
        """Return the `least_average` for the mean squared error `dx2`."""
        parts = parts_of(self.samples)
        alike = [spread for spread in self.spreads if len(spread) == parts]
        combined = max if window == "max" else mean
        squares = [combined(values) for values in zip(*alike, strict=True)]
        return least_average(squares, self.samples, dx2, self.quantizer)

    def pairs(self, is_exact: bool = False) -> tuple[Pair, Pair]:
        """Return the sums of the `Pair`s of parameters' and of all gradients; without errors if `is_exact`."""
        seen = []
        for constraint in self.constraints.values():
            if is_exact and constraint.rows:
                v2 = mean([row.v2 for row in constraint.rows])
                seen.append((constraint, Pair(v2, v2)))
            elif constraint.pairs and not is_exact:
                seen.append((constraint, _mean_pair(constraint.pairs)))
        of_parameters = [pair for constraint, pair in seen if is_of_parameter(constraint.label)]
        return sum_of(of_parameters), sum_of([pair for _, pair in seen])

    def excess(self, limit: float, of_parameters: bool, is_exact: bool) -> tuple[float, float]:
        """Return the mean of the monitor's |g^|^2 - limit |g|^2, and the square of its standard error.

        The standard error of fewer than LEAST_SEEN measurements is the mean itself.
        """
        if is_exact:
            pair = self.pairs(is_exact=True)[not of_parameters]
            return pair.hat2 - limit * pair.exact2, 0.0
        seen = [
            [pair.hat2 - limit * pair.exact2 for pair in reversed(constraint.pairs)]
            for constraint in self.constraints.values()
            if constraint.pairs and (is_of_parameter(constraint.label) or not of_parameters)
        ]
        # Gradients of one measurement have errors in common, so they are added before the variance is taken.
        values = [math.fsum(numbers) for numbers in zip(*seen, strict=False)]
        if len(values) < LEAST_SEEN:
            average = mean(values) if values else 0.0
            return average, average * average
        return mean(values), statistics.variance(values) / len(values)

    @property
    def ratio(self) -> float | None:
        """The largest E|g^|^2 / E|g|^2 of gradients that depend on this tensor, or None."""
        seen = (constraint.pairs for constraint in self.constraints.values())
        pairs = [_mean_pair(pairs) for pairs in seen if pairs]
        return max((ratio_of(pair) for pair in pairs if pair.exact2 > 0), default=None)


@dataclass(frozen=True)
class ActivationEstimate(Record):
    """All that is known of one few-bit activation."""

    name: str
    function: str
    parameters: tuple[float, ...]
    rows: tuple[ActivationRow, ...]
    missed: int = 0

    @property
    def key(self) -> str:
        """The activation's name."""
        return self.name

    def allowed(self, e2: float, window: str) -> float:
        """Return the `allowed_error` of the activation's table."""
        if window == "max":
            return min(allowed_error(row.grad2, e2, row.v2) for row in self.rows)
        v2, grad2 = (mean(values) for values in zip(*self.rows, strict=True))
        return allowed_error(grad2, e2, v2)


@dataclass(frozen=True)
class BoundKnowledge(Record):
    """All that the error-bound policy has learned. The monitor's next measurement begins with slot number `next`."""

    slots: Mapping[tuple[str, int], TensorEstimate] = field(default_factory=dict)
    activations: Mapping[str, ActivationEstimate] = field(default_factory=dict)
    next: int = 0
    has_warned: bool = False


def is_of_parameter(label: str) -> bool:
    """Return whether a label stands for a parameter's gradient."""
    return label.rpartition(" ")[2] == "weight"


def ratio_of(pair: Pair) -> float | None:
    """Return |g^|^2 / |g|^2, or None if g is 0."""
    return pair.hat2 / pair.exact2 if pair.exact2 > 0 else None


def sum_of(pairs: list[Pair]) -> Pair:
    """Return the sum of pairs of squared norms."""
    hat2 = exact2 = 0.0
    for pair in pairs:
        hat2, exact2 = hat2 + pair.hat2, exact2 + pair.exact2
    return Pair(hat2, exact2)


def mean(values) -> float:
    """Return the mean, summed without rounding errors."""
    return math.fsum(values) / len(values)


def _mean_pair(pairs) -> Pair:
    return Pair(*map(mean, zip(*pairs, strict=True)))


# -- Updates with one more measurement ---------------------------------------------------------------


def updated_slot(before: TensorEstimate | None, now: TensorNorms, total: float) -> TensorEstimate:
    """Return a slot's knowledge after one more measurement, in which V^2 of all gradients has the sum `total`."""
    scale = (now.samples or 1) / now.elements if now.elements else 0.0
    spread = tuple(min(scale * square, MOST) for square in now.squares[: parts_of(now.samples)])
    weights, weighed, spreads = None, 0, ()
    if before is not None:
        weights, weighed, spreads = before.weights, before.weighed, before.spreads
    if weighed == 1 or (before is not None and before.quantizer != now.quantizer):
        spreads = ()  # bits were not divided by channel weights then, or copies were of another kind
    if now.channel_weights is not None:
        if weights is None or len(weights) != len(now.channel_weights):
            weights, weighed = (0.0,) * len(now.channel_weights), 0
        weighed = min(weighed + 1, HISTORY)
        pairs = zip(weights, now.channel_weights, strict=True)
        weights = tuple(old + (new - old) / weighed for old, new in pairs)
    return TensorEstimate(
        *now.key,
        now.average,
        now.is_fixed,
        now.is_known,
        now.elements,
        now.samples,
        now.dtype_bytes,
        _latest(spreads, spread),
        weights,
        weighed,
        _updated_constraints({} if before is None else before.constraints, now, total),
        quantizer=now.quantizer,
    )


def updated(before: Mapping, now: Mapping, update: Callable) -> dict:
    """Return updated estimates by name, without those that more than FORGOTTEN measurements have missed."""
    found = {}
    for name in {**before, **now}:
        if name in now:
            found[name] = update(before.get(name), now[name])
        elif before[name].missed < FORGOTTEN:
            found[name] = replace(before[name], missed=before[name].missed + 1)
    return found


def _updated_constraints(before: Mapping, now: TensorNorms, total: float) -> dict:
    monitored = sums_by_label(now.monitored)

    def update(estimate: ConstraintEstimate | None, constraint: GradientConstraint):
        pair = monitored.get(constraint.label)
        return _updated_constraint(estimate or ConstraintEstimate(), constraint, pair, total)

    return updated(before, by_label(now.constraints), update)


def updated_activation(
    before: ActivationEstimate | None, now: ActivationNorms, total: float
) -> ActivationEstimate:
    """Return the knowledge of an activation; see `updated_slot`."""
    row = ActivationRow(min(now.v2 / total, MOST), min(now.grad2 / total, MOST))
    rows = _latest(() if before is None else before.rows, row)
    return ActivationEstimate(now.name, now.function, now.parameters, rows)


def _updated_constraint(
    before: ConstraintEstimate,
    now: GradientConstraint,
    seen: MonitoredNorms | None,
    total: float,
) -> ConstraintEstimate:
    squares = (min(value**2 / total, MOST_RATIO) for value in (now.first, now.second))
    rows, pairs = _latest(before.rows, ConstraintRow(now.v2 / total, *squares)), before.pairs
    if seen is not None:
        pairs = _latest(pairs, Pair(min(seen.hat2 / total, MOST), min(seen.exact2 / total, MOST)))
    return ConstraintEstimate(now.label, now.kind, rows, pairs)


def _latest(rows: tuple, row) -> tuple:
    return (*rows, row)[-HISTORY:]
