"""The result of a probe of the error-bound policy, in one process or merged over several.

Each coefficient of a merged D is the root of the sum of squares, an upper bound because processes round independently.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fewbit.config import UNIFORM
from fewbit.policies.records import (
    Record,
    mean,
    merge_by_key,
    merged_by,
    root_sum_square,
    rounded_mean,
    vector_mean,
    vector_sum,
)
from fewbit.runtime.probes.variance_probe import SPREAD

EXPECTED, MEASURED = "in expectation", "measured"
"""The kinds of constraints: D follows from a formula, or from noise."""


def merged_kind(kinds: list[str]) -> str:
    """Return the kind of a merged constraint."""
    return MEASURED if MEASURED in kinds else EXPECTED


@dataclass(frozen=True)
class GradientConstraint(Record):
    """A constraint D <= e2 V^2 on the squared error D = (first dx + second dx^2)^2 of a gradient.

    dx^2 is a slot's mean squared error. If the gradient depends on several slots, D is multiplied by their number.

    Args:
        label: the input or parameter whose gradient it is, such as "weight", after the name of the layer if another
            layer saved the slot ("block.q_proj: weight").
        v2: V^2, the squared norm of the gradient without errors, summed over the layer's calls.
    """

    label: str
    kind: str = merged_by(merged_kind)
    v2: float = merged_by(sum)
    first: float = merged_by(root_sum_square)
    second: float = merged_by(root_sum_square, 0.0)


class MonitoredNorms(NamedTuple):
    """The squared norms of one gradient: `hat2` with errors, `exact2` from exact values."""

    label: str
    hat2: float
    exact2: float


def merge_constraints(values: list[Iterable[GradientConstraint]]) -> tuple:
    """Merge all processes' constraints on one slot, by label."""
    return tuple(merge_by_key([by_label(constraints) for constraints in values]).values())


def merge_monitored(values: list[Iterable[MonitoredNorms]]) -> tuple:
    """Add the squared norms of all processes, by label."""
    sums = [sums_by_label(norms).values() for norms in values]
    return tuple(sums_by_label(norms for process in sums for norms in process).values())


@dataclass(frozen=True)
class TensorNorms(Record):
    """The measurements of one slot in one step. Fields that are not listed are those of `RoundingEffect`.

    Args:
        average: `RoundingEffect.bits`.
        squares: the `squares` of the samples in rising order, cut into SPREAD parts of nearly equal size: the mean of
            each part, then zeros. If `samples` is 0, the first number is the sum for the whole tensor.
        error2: the mean squared error of the elements.
        dtype_bytes: the bytes of an element if it is saved exactly.
        constraints: those of the gradients that depend on the slot.
        channel_weights: 1 / dx*^2 of each channel (dimension 1), scaled to mean 1; None for equal weights.
        monitored: the norms of gradients that were also computed from exact values.
    """

    name: str
    input: int
    average: float = merged_by(mean)
    is_fixed: bool = merged_by(any)
    elements: int = merged_by(sum, 0)
    samples: int = merged_by(rounded_mean, 0)
    squares: tuple[float, ...] = merged_by(vector_sum, ())
    error2: float = 0.0
    dtype_bytes: int = merged_by(rounded_mean, 4)
    constraints: tuple[GradientConstraint, ...] = merged_by(merge_constraints, ())
    channel_weights: tuple[float, ...] | None = merged_by(vector_mean, None)
    is_known: bool = merged_by(all, True)
    monitored: tuple[MonitoredNorms, ...] = merged_by(merge_monitored, ())
    quantizer: str = UNIFORM

    @property
    def key(self) -> tuple[str, int]:
        """The name of the slot."""
        return self.name, self.input


def parts_of(samples: int) -> int:
    """Return the number of parts of `TensorNorms.squares`, from 1 to SPREAD."""
    return min(samples, SPREAD) or 1


@dataclass(frozen=True)
class ActivationNorms(Record):
    """The squared norms of the gradients of an activation's input and result, summed over calls."""

    name: str
    function: str
    parameters: tuple[float, ...] = ()
    v2: float = merged_by(sum, 0.0)
    grad2: float = merged_by(sum, 0.0)

    @property
    def key(self) -> str:
        """The activation's name."""
        return self.name


@dataclass(frozen=True)
class ProbeResult(Record):
    """The measurements of slots and of activations, by name, in one step."""

    slots: Mapping[tuple[str, int], TensorNorms] = merged_by(merge_by_key, default_factory=dict)
    activations: Mapping[str, ActivationNorms] = merged_by(merge_by_key, default_factory=dict)


def by_label(constraints: Iterable[GradientConstraint]) -> dict[str, GradientConstraint]:
    """Return the constraints by label, merged by `strictest`."""
    found: dict[str, list[GradientConstraint]] = {}
    for constraint in constraints:
        found.setdefault(constraint.label, []).append(constraint)
    return {label: strictest(alike) for label, alike in found.items()}


def sums_by_label(monitored: Iterable[MonitoredNorms]) -> dict[str, MonitoredNorms]:
    """Return the squared norms by label, summed over the calls of a layer."""
    found = {}
    for label, hat2, exact2 in monitored:
        before = found.get(label, MonitoredNorms(label, 0.0, 0.0))
        found[label] = MonitoredNorms(label, before.hat2 + hat2, before.exact2 + exact2)
    return found


def strictest(constraints: list[GradientConstraint]) -> GradientConstraint:
    """Return one constraint that implies all of the given ones, which have one label."""
    if len(constraints) == 1:
        return constraints[0]
    kind = merged_kind([constraint.kind for constraint in constraints])
    v2 = 0.0
    if all(constraint.v2 > 0 for constraint in constraints):
        v2 = sum(constraint.v2 for constraint in constraints)
    first = second = 0.0
    for constraint in constraints:
        scale = math.sqrt(v2 / constraint.v2) if v2 > 0 else 1.0
        first, second = max(first, constraint.first * scale), max(second, constraint.second * scale)
    return GradientConstraint(constraints[0].label, kind, v2, first, second)
