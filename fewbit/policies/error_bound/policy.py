"""The policy of `ErrorBound`, which turns measurements into bits (docs/guides/error_bound.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from fewbit.config import MAX_BITS, ErrorBound
from fewbit.errors import FewbitError, InputError
from fewbit.policies.allocation_report import Allocation
from fewbit.policies.error_bound import monitor
from fewbit.policies.error_bound.bounds import Bounds, rows_of
from fewbit.policies.error_bound.choices import ExactCodec, PayloadStats, choose, choose_codec
from fewbit.policies.error_bound.estimates import (
    BoundKnowledge,
    updated,
    updated_activation,
    updated_slot,
)
from fewbit.policies.error_bound.observations import ProbeResult
from fewbit.policies.error_bound.probe import ErrorBoundProbe
from fewbit.policies.probing import ProbingPolicy
from fewbit.policies.records import check_layer
from fewbit.policies.unobserved import MEASURABLE
from fewbit.runtime.format.groups import LEAST_FEATURES
from fewbit.runtime.saved.assignment import BitAssignment, ChannelWeights

_SETTINGS = "e2", "window", "codec", "by_channel"


class ErrorBoundPolicy(ProbingPolicy):
    """A policy that gives each slot and each activation as few bits as a bound on gradient errors allows.

    Args:
        bound: the configuration.
        names: as in `ProbingPolicy`.
        channels: {layer: number of channels} of layers whose input has channels.
        activations: the names of few-bit activations whose bits the policy chooses.
        given: {name: bits} of the other few-bit activations.
    """

    kind = "ErrorBound"
    shares_results = False  # it chooses a codec for each tensor that a layer uses
    Knowledge = BoundKnowledge
    Result = ProbeResult

    def __init__(
        self,
        bound: ErrorBound,
        names: Iterable[str],
        channels: Mapping[str, int] | None = None,
        activations: Iterable[str] = (),
        given: Mapping[str, int] | None = None,
    ):
        super().__init__(MAX_BITS, names, bound.interval, BoundKnowledge())
        self.bound = bound
        self.choices: dict = {}
        self.activations: dict[str, int] = {}
        self.given = dict(given or {})
        self._channels = dict(channels or {}) if bound.by_channel else {}
        self._bounded_activations = frozenset(activations) | self.given.keys()
        self._codecs: dict = {}
        self._channel_weights: dict[str, ChannelWeights] = {}
        self._stats: dict[tuple[str, int], PayloadStats] = {}  # of this process

    @property
    def limit(self) -> float:
        """See `Bounds.limit`."""
        return 1.0 + self.bound.e2

    @property
    def ratio(self) -> float | None:
        """See `Bounds.ratio`."""
        return monitor.total_ratio(self.knowledge.slots, self._exact())

    def tables(self, model, ended: str) -> dict:
        """Return {"bounds": table, "allocation": table without rows}."""
        empty = f"no bounds found yet: {MEASURABLE}"
        unobserved = self.unobserved_layers(model)
        return {
            "allocation": Allocation(empty="bits follow from an error bound: see bounds"),
            "bounds": Bounds(rows_of(self), self.bound.e2, self.ratio, empty, unobserved, ended),
        }

    def number_samples(self, numbers) -> None:
        """Raise InputError: this policy does not use the gradients of single samples."""
        raise InputError(
            "expected SampleBits or AdaptiveBits for numbers of samples, got ErrorBound, whose bits follow from bounds"
        )

    # -- In a forward pass -----------------------------------------------------------------------------------

    def new_probe(self) -> ErrorBoundProbe:
        """See `ProbingPolicy.new_probe`."""
        return ErrorBoundProbe(self.step, frozenset(self.monitored()))

    def apply_to(self, assignment: BitAssignment) -> None:
        """Write bits, codecs and weights of channels into a bit assignment."""
        assignment.averages, assignment.codecs = self.averages, self._codecs
        assignment.activations = self.activations
        assignment.channels, assignment.channel_weights = self._channels, self._channel_weights
        # Shorter samples share groups, so the elements of one sample change the errors of others.
        assignment.least_features = LEAST_FEATURES
        assignment.rounds_up = True

    def monitored(self) -> list[tuple[str, int]]:
        """Return the slots whose gradients the next probe also computes from exact values."""
        return monitor.turn_of(self.knowledge.slots, self.knowledge.next, self._exact())

    def _exact(self) -> set[tuple[str, int]]:
        return {name for name, codec in self._codecs.items() if isinstance(codec, ExactCodec)}

    def codec_of(self, name: tuple[str, int]):
        """Return the codec of a slot, or None for the group quantizer."""
        return self._codecs.get(name)

    # -- Learning --------------------------------------------------------------------------------------------

    def merge(self, results: list[ProbeResult | None]) -> ProbeResult:
        """Merge the results of all processes by saved tensor and activation."""
        return ProbeResult.merged([result or ProbeResult() for result in results])

    def learn(self, result: ProbeResult | None) -> BoundKnowledge:
        """See `ProbingPolicy.learn`."""
        known, result = self.knowledge, result or ProbeResult()
        total = math.fsum(
            constraint.v2 for slot in result.slots.values() for constraint in slot.constraints
        ) or math.fsum(activation.v2 for activation in result.activations.values())
        if not 0 < total < math.inf:
            return known
        seen = {
            (layer, number): norms
            if layer in self._channels and number == 0
            else replace(norms, channel_weights=None)
            for (layer, number), norms in result.slots.items()
        }
        slots = updated(known.slots, seen, partial(updated_slot, total=total))
        bounded = {
            name: norms
            for name, norms in result.activations.items()
            if name in self._bounded_activations
        }
        activations = updated(known.activations, bounded, partial(updated_activation, total=total))
        turn = self.monitored()
        following = monitor.next_start(turn, known.next, known.slots, slots, result.slots)
        return BoundKnowledge(slots, activations, following, known.has_warned)

    def adopt(self, knowledge: BoundKnowledge) -> None:
        """See `ProbingPolicy.adopt`."""
        self.choices, self.activations = choose(knowledge, self.bound, self.given)
        self.knowledge = knowledge
        self.averages = {
            name: made.average for name, made in self.choices.items() if made.average is not None
        }
        self._channel_weights = {
            layer: ChannelWeights(slot.weights)
            for (layer, number), slot in knowledge.slots.items()
            if number == 0 and slot.weights is not None and layer in self._channels
        }
        self._codecs = {
            name: choose_codec(
                knowledge.slots[name],
                made,
                self.bound,
                self._stats.setdefault(name, PayloadStats()),
            )
            for name, made in self.choices.items()
            if made.average is None
        }

    def take_in(self, result: ProbeResult | None) -> None:
        """Learn from a result, and warn once if gradients exceed the bound."""
        before = self.knowledge
        super().take_in(result)
        known, ratio, limit = self.knowledge, self.ratio, self.limit
        if known is before or known.has_warned or ratio is None or not ratio > limit:
            return
        if monitor.is_exceeded(known.slots, self._exact(), limit):
            self.knowledge = replace(known, has_warned=True)
            monitor.warn(known.slots, ratio, limit)

    # -- State -----------------------------------------------------------------------------------------------

    def settings(self) -> dict:
        """See `ProbingPolicy.settings`."""
        return {name: getattr(self.bound, name) for name in _SETTINGS}

    def check_result(self, result: ProbeResult) -> None:
        """See `ProbingPolicy.check_result`."""
        super().check_result(result.slots)

    def fit(self, knowledge: BoundKnowledge, settings: Mapping) -> BoundKnowledge:
        """See `ProbingPolicy.fit`.

        Under other settings the monitor's measurements are left out, because they were made with other bits.
        """
        self._check_slots(knowledge)
        if settings.get("by_channel") != self.bound.by_channel:
            raise InputError(
                f"expected the state of a controller with by_channel={self.bound.by_channel}, got another one"
            )
        taken = {
            name: activation
            for name, activation in knowledge.activations.items()
            if name in self._bounded_activations
        }
        knowledge = replace(knowledge, activations=taken)
        try:
            choose(knowledge, self.bound, self.given)
        except FewbitError as error:  # no table for the function with these parameters
            raise InputError(f"activations: {error}") from None
        if settings != self.settings():
            slots = {name: slot.unmonitored() for name, slot in knowledge.slots.items()}
            knowledge = replace(knowledge, slots=slots, has_warned=False)
        return knowledge

    def _check_slots(self, knowledge: BoundKnowledge) -> None:
        for (layer, number), slot in knowledge.slots.items():
            check_layer(layer, self._layers)
            count = self._channels.get(layer) if number == 0 else None
            if slot.weights is not None and len(slot.weights) != count:
                raise InputError(
                    f"expected weights of {count or 0} channels of {layer!r}, got {len(slot.weights)}"
                )
