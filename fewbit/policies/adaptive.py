"""The policy of `AdaptiveBits` (ActNN, Chen et al., ICML 2021, level L3): what affects the gradient more gets more bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from fewbit.config import UNIFORM
from fewbit.policies.allocation import allocate
from fewbit.policies.allocation_report import Allocated, Allocation
from fewbit.policies.probing import ProbingPolicy
from fewbit.policies.records import (
    MOST,
    Record,
    check_layer,
    mean,
    merge_by_key,
    merged_by,
    rounded_mean,
    vector_sum,
)
from fewbit.policies.unobserved import FORGOTTEN, MEASURABLE
from fewbit.runtime.format.distortion import BITS, relative_distortion
from fewbit.runtime.probes.variance_probe import SPREAD, VarianceProbe

MOMENTUM = 0.5
"""The weight of the earlier sensitivity in the average with the new one."""


@dataclass(frozen=True)
class SlotVariance(Record):
    """The variance that rounding one slot adds to the gradient. Fields that are not listed are those of `RoundingEffect`.

    Args:
        elements: the number of elements in one forward pass, of all processes.
        missed: the number of measurements since the slot was last measured.
    """

    name: str
    input: int
    bits: float = merged_by(mean)
    is_fixed: bool = merged_by(any)
    is_known: bool = merged_by(all)
    elements: int = merged_by(sum)
    samples: int = merged_by(rounded_mean)
    sensitivity: float = merged_by(sum)
    at_one: float = merged_by(sum)
    weight: float = merged_by(mean)
    spread: tuple[float, ...] | None = merged_by(vector_sum)
    missed: int = 0
    quantizer: str = UNIFORM

    @property
    def key(self) -> tuple[str, int]:
        """The name of the slot."""
        return self.name, self.input

    def parts(self) -> list[float]:
        """Return the share of each part of `spread` in `sensitivity`."""
        count = min(self.samples, SPREAD) or 1
        points = [] if self.spread is None or count == 1 else self.spread[:count]
        total = sum(points)
        return [point / total for point in points] if total > 0 else [1.0 / count] * count

    def variances(self) -> list[float]:
        """Return the relative variance from rounding the slot to 1, 2, ... 8 bits."""
        found = [self.sensitivity * relative_distortion(self.quantizer, bits) for bits in BITS]
        # The greedy algorithm assumes that each further bit gains less than the bit before. This is true from
        # 2 bits on, so only the variance at 1 bit has to be limited.
        found[0] = min(max(self.at_one, 2 * found[1]), 100 * found[0])
        return [self.weight * variance for variance in found]

    def after(self, before: SlotVariance | None) -> SlotVariance:
        """Return this measurement, averaged with the earlier one."""
        if before is None or not before.is_known or before.quantizer != self.quantizer:
            return self
        return replace(
            self,
            sensitivity=MOMENTUM * before.sensitivity + (1 - MOMENTUM) * self.sensitivity,
            at_one=MOMENTUM * before.at_one + (1 - MOMENTUM) * self.at_one,
            weight=MOMENTUM * before.weight + (1 - MOMENTUM) * self.weight,
        )


@dataclass(frozen=True)
class VarianceKnowledge(Record):
    """All that an `AdaptivePolicy` has learned.

    Args:
        budget: the bytes from which `bits` and `sizes` follow (`Budget`), or None.
        bits: the average number of bits per element.
        sizes: a row (layer, number of the input, number of elements) for each slot to which the average applies; None
            for all slots.
        slots: the measurements, in the order of the forward pass.
    """

    budget: int | None
    bits: float
    sizes: tuple[tuple[str, int, int], ...] | None
    slots: dict[tuple[str, int], SlotVariance]


class SlotVarianceProbe(VarianceProbe):
    """A `VarianceProbe` whose results are `SlotVariance` records."""

    def _summed_up(self, host) -> dict[tuple[str, int], SlotVariance]:
        effects = super()._summed_up(host)
        return {name: SlotVariance(*name, **vars(effect)) for name, effect in effects.items()}


class AdaptivePolicy(ProbingPolicy):
    """A policy that gives important slots more bits, within a given average over all slots whose bits the user did not give.

    `bits`, `budget` and `sizes` are those of `VarianceKnowledge`, with `sizes` as {slot: number of elements}.
    """

    kind = "AdaptiveBits"
    Knowledge = VarianceKnowledge
    Result = dict[tuple[str, int], SlotVariance]

    def __init__(
        self,
        bits: float,
        names: Iterable[str],
        interval: int,
        sizes: Mapping[tuple[str, int], int] | None = None,
        budget: int | None = None,
    ):
        rows = None if sizes is None else tuple((*name, size) for name, size in sizes.items())
        super().__init__(bits, names, interval, VarianceKnowledge(budget, bits, rows, {}))

    def tables(self, model, ended: str) -> dict:
        """Return {"allocation": table of each saved tensor's bits}."""
        values = attrgetter(*Allocated._fields)
        rows = (Allocated(*values(slot)) for slot in self.knowledge.slots.values())
        empty = f"no bits chosen yet: {MEASURABLE}"
        unobserved = self.unobserved_layers(model)
        return {"allocation": Allocation(rows, empty, ended, unobserved)}

    def new_probe(self) -> SlotVarianceProbe:
        """See `ProbingPolicy.new_probe`."""
        return SlotVarianceProbe(self.step)

    def merge(self, results: list) -> dict[tuple[str, int], SlotVariance]:
        """Sum variances and elements over the processes, and average bits and samples."""
        return merge_by_key(results)

    def learn(self, result: dict[tuple[str, int], SlotVariance]) -> VarianceKnowledge:
        """See `ProbingPolicy.learn`. Variances that are all 0 are of no use."""
        if not any(slot.sensitivity > 0 for slot in result.values()):
            return self.knowledge
        known = _in_units_of(result, self.knowledge.slots)
        slots = {name: replace(slot, missed=slot.missed + 1) for name, slot in known.items()}
        slots |= {name: slot.after(known.get(name)) for name, slot in result.items()}
        slots = {name: slot for name, slot in slots.items() if slot.missed <= FORGOTTEN}
        return replace(self.knowledge, slots=slots)

    def adopt(self, knowledge: VarianceKnowledge) -> None:
        """See `ProbingPolicy.adopt`."""
        averages = allocated(knowledge)
        slots = {
            name: slot if slot.is_fixed else replace(slot, bits=averages.get(name, knowledge.bits))
            for name, slot in knowledge.slots.items()
        }
        self.knowledge = replace(knowledge, slots=slots)
        self.bits, self.averages = knowledge.bits, averages

    def fit(self, knowledge: VarianceKnowledge, settings: Mapping) -> VarianceKnowledge:
        """Return the state's knowledge, with this policy's budget, average and sizes unless the `Budget` is the same."""
        own = self.knowledge
        for layer, *_ in (*knowledge.slots, *(knowledge.sizes or ())):
            check_layer(layer, self._layers)
        # Bits from a budget depend on the weights, and this policy's own bits may be older than the loaded weights.
        is_same_budget = knowledge.budget is not None and knowledge.budget == own.budget
        found = knowledge if is_same_budget else replace(own, slots=knowledge.slots)
        allocated(found)  # raises for numbers that no measurement gives
        return found


def allocated(knowledge: VarianceKnowledge) -> dict[tuple[str, int], float]:
    """Return {slot: average bits} of the slots whose bits the policy chooses, from ActNN's problem (10).

    Each part of a slot's samples with similar sensitivities counts as a tensor.
    """
    sizes = None
    if knowledge.sizes is not None:
        sizes = {(layer, number): size for layer, number, size in knowledge.sizes}
    owners, variances, elements = [], [], []
    for name, slot in knowledge.slots.items():
        size = slot.elements if sizes is None else sizes.get(name, 0)
        if slot.is_fixed or not slot.is_known or not size:
            continue
        parts = slot.parts()
        owners += [name] * len(parts)
        variances += [[part * variance for variance in slot.variances()] for part in parts]
        elements += [max((size + i) // len(parts), 1) for i in range(len(parts))]
    if not owners:
        return {}
    budget = math.floor(knowledge.bits * sum(elements) + 1e-6)
    bits = allocate(variances, elements, budget)
    averages = _averages(owners, elements, bits)
    if sizes is not None:
        # A slot without an entry would get its layer's average. With a budget, this may differ from `knowledge.bits`.
        rest = (name for name, slot in knowledge.slots.items() if not slot.is_fixed)
        averages.update({name: knowledge.bits for name in rest if name not in averages})
    return averages


def _averages(owners, elements, bits) -> dict[tuple[str, int], float]:
    totals = {}
    for name, size, number in zip(owners, elements, bits, strict=True):
        total, count = totals.get(name, (0, 0))
        totals[name] = total + int(number) * size, count + size
    return {name: total / count for name, (total, count) in totals.items()}


def _in_units_of(now: Mapping, before: Mapping) -> dict[tuple[str, int], SlotVariance]:
    """Return the earlier measurements, scaled to the new total, because the loss may have another scale."""
    both = [name for name, slot in now.items() if name in before and slot.is_known]
    total, total_before = (sum(slots[name].sensitivity for name in both) for slots in (now, before))
    ratio = total / total_before if total > 0 and total_before > 0 else 1.0
    return {
        name: replace(
            slot,
            sensitivity=min(ratio * slot.sensitivity, MOST),
            at_one=min(ratio * slot.at_one, MOST),
            weight=min(slot.weight / ratio, MOST),
        )
        for name, slot in before.items()
    }
