"""The measurements of an `ErrorBoundProbe`, and the computation of the probe's result from them on the host.

`host` maps the `id` of a tensor of measured numbers to the list of its values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fewbit.policies.error_bound.observations import GradientConstraint, MonitoredNorms
from fewbit.runtime.probes.gradient_errors import Cost, ErrorOfGradient
from fewbit.runtime.probes.norms import squared


@dataclass
class MeasuredTensor:
    """The measurements of one of the saved tensors of a slot.

    Args:
        has_samples: whether the tensor's bits are divided among its samples.
        errors: (rows,) the sum of squared rounding errors in each entry of dimension 0.
        error: 0-D, the root of the sum of all squared errors.
        squares: 0-D, `QuantizationRecord.squares`.
        deviation: 0-D, the standard deviation of the noise with which the effect of errors is measured.
    """

    name: tuple[str, int]
    elements: int
    has_samples: bool
    errors: torch.Tensor
    error: torch.Tensor
    squares: torch.Tensor
    deviation: torch.Tensor


@dataclass
class MeasuredGradient:
    """The measurements of one gradient of a layer. `label` and `kind` are those of `GradientConstraint`.

    Args:
        tensor: the saved tensor from which the gradient is computed.
        size: 0-D, the Euclidean norm of the gradient.
        exact: the same with exact values of the saved tensor, or None.
    """

    part: ErrorOfGradient
    label: str
    kind: str
    tensor: MeasuredTensor
    size: torch.Tensor
    exact: torch.Tensor | None = None


class Share(NamedTuple):
    """The effect of the error of one slot on one gradient of one call of a layer.

    Args:
        v2: the measured squared norm, minus the expected squared error.
        slots: the number of slots on which the gradient depends.
    """

    found: MeasuredGradient
    cost: Cost
    v2: float
    slots: int


def shares_by_slot(host, calls: list[list[MeasuredGradient]]) -> dict[tuple, list[Share]]:
    """Return {slot's name: shares}; `calls` has the gradients of each call of a layer."""
    found = {}
    for gradients in calls:
        for share in _shares(host, gradients):
            found.setdefault(share.found.tensor.name, []).append(share)
    return found


def _shares(host, gradients: list[MeasuredGradient]) -> list[Share]:
    by_place = {}
    for gradient in gradients:
        error2 = squared(host, gradient.tensor.error) / gradient.tensor.elements
        cost = gradient.part.finish(
            [host[id(numbers)] for numbers in gradient.part.numbers], error2
        )
        if cost.first or cost.second:
            present = (cost.first * math.sqrt(error2) + cost.second * error2) ** 2
            by_place.setdefault(gradient.part.place, []).append((gradient, cost, present))
    shares = []
    for same_place in by_place.values():
        present = sum(error for *_, error in same_place)
        shares += [
            Share(gradient, cost, squared(host, gradient.size) - present, len(same_place))
            for gradient, cost, _ in same_place
        ]
    return shares


def monitored_norms(host, shares: list[Share]) -> tuple[MonitoredNorms, ...]:
    """Return the squared norms of the gradients that have `exact`."""
    gradients = [share.found for share in shares if share.found.exact is not None]
    return tuple(
        MonitoredNorms(gradient.label, squared(host, gradient.size), squared(host, gradient.exact))
        for gradient in gradients
    )


def constraints_of(
    host, shares: list[Share], tried: float
) -> list[tuple[GradientConstraint, list[float] | None]]:
    """Return pairs (constraint on the error of one slot, effects of its channels or None), one for each label and kind.

    `tried` is the mean variance of the noise in the slot's elements. When the bits change, the errors of the slot's
    tensors are assumed to remain in proportion to their noise.
    """
    by_label = {}
    for share in shares:
        by_label.setdefault((share.found.label, share.found.kind), []).append(share)
    constraints = []
    for (label, kind), alike in by_label.items():
        first2 = second2 = 0.0
        channels = []
        for share in alike:
            deviation2 = squared(host, share.found.tensor.deviation)
            ratio = deviation2 / tried if tried > 0 else 1.0
            first2 += share.slots * ratio * share.cost.first**2
            second2 += share.slots * (ratio * share.cost.second) ** 2
            channels.append([ratio * cost for cost in share.cost.channels or ()])
        v2 = max(sum(share.v2 for share in alike), 0.0)
        constraint = GradientConstraint(label, kind, v2, math.sqrt(first2), math.sqrt(second2))
        constraints.append((constraint, _sum_of_channels(channels)))
    return constraints


def _sum_of_channels(costs: list[list[float]]) -> list[float] | None:
    if len({len(channels) for channels in costs}) != 1 or not costs[0]:
        return None
    return [sum(numbers) for numbers in zip(*costs, strict=True)]


def channel_weights(costs: list[tuple[GradientConstraint, list[float] | None]]) -> tuple | None:
    """Return the weights of a slot's channels, with mean 1, or None if all are equal.

    A weight is the largest part of a gradient's first^2 / V^2 that comes from the channel.
    """
    costs = [pair for pair in costs if pair[0].v2 > 0 and pair[0].first > 0]
    lengths = {len(channels) for _, channels in costs if channels is not None and sum(channels) > 0}
    if len(lengths) != 1:
        return None
    (count,) = lengths
    weights = [0.0] * count
    for constraint, channels in costs:
        shares = [1.0 / count] * count
        if channels is not None:
            shares = [cost / sum(channels) for cost in channels]
        relative = constraint.first**2 / constraint.v2
        weights = [max(a, relative * b) for a, b in zip(weights, shares, strict=True)]
    mean = sum(weights) / count
    if max(weights) - min(weights) <= 1e-9 * mean:
        return None
    return tuple(weight / mean for weight in weights)
