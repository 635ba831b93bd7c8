"""Updates of the error-bound policy's knowledge with one more measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fewbit.policies.error_bound.estimates import (
    HISTORY,
    ActivationEstimate,
    ActivationRow,
    ConstraintEstimate,
    ConstraintRow,
    Pair,
    TensorEstimate,
)
from fewbit.policies.error_bound.observations import (
    ActivationNorms,
    GradientConstraint,
    MonitoredNorms,
    TensorNorms,
    by_label,
    parts_of,
    sums_by_label,
)
from fewbit.policies.records import capped
from fewbit.policies.unobserved import FORGOTTEN

MOST_RATIO = 1e250
"""The largest quotient of two squared norms that is stored."""


def updated_slot(before: TensorEstimate | None, now: TensorNorms, total: float) -> TensorEstimate:
    """Return a slot's knowledge after one more measurement, in which V^2 of all gradients has the sum `total`."""
    scale = (now.samples or 1) / now.elements if now.elements else 0.0
    spread = tuple(capped(scale * square) for square in now.squares[: parts_of(now.samples)])
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
    row = ActivationRow(capped(now.v2 / total), capped(now.grad2 / total))
    rows = _latest(() if before is None else before.rows, row)
    return ActivationEstimate(now.name, now.function, now.parameters, rows)


def _updated_constraint(
    before: ConstraintEstimate,
    now: GradientConstraint,
    seen: MonitoredNorms | None,
    total: float,
) -> ConstraintEstimate:
    squares = (capped(value**2 / total, MOST_RATIO) for value in (now.first, now.second))
    rows, pairs = _latest(before.rows, ConstraintRow(now.v2 / total, *squares)), before.pairs
    if seen is not None:
        pairs = _latest(pairs, Pair(capped(seen.hat2 / total), capped(seen.exact2 / total)))
    return ConstraintEstimate(now.label, now.kind, rows, pairs)


def _latest(rows: tuple, row) -> tuple:
    return (*rows, row)[-HISTORY:]
