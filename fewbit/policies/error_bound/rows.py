"""The rows of `Bounds`: what the error-bound policy has found for each slot and activation."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fewbit.policies.error_bound.choices import choose_bits, has_enough_bits
from fewbit.policies.error_bound.codecs import ExactCodec
from fewbit.policies.error_bound.tables import is_known, table_error
from fewbit.runtime.codecs.payload import EXACT

WORST = "worst case"
"""The kind of an activation's bound."""


def slot_rows(policy) -> Iterator[tuple]:
    """Yield the fields of `report.Bounded` for each slot of an `ErrorBoundPolicy`."""
    for name, slot in policy.knowledge.slots.items():
        choice = policy.choices.get(name) or choose_bits(slot, policy.bound)
        codec = None if slot.is_fixed else policy.codec_of(name)
        kept, average = "bits", slot.average if slot.is_fixed else choice.average
        if isinstance(codec, ExactCodec):
            kept, average = EXACT, None
        elif codec is not None:
            kept, average = codec.stats.kept or codec.name, codec.stats.bits
            average = None if kept == EXACT else average
        label, kind = "", ""
        if choice.constraint is not None:
            label, kind = choice.constraint.label, choice.constraint.kind
        is_met = not slot.is_fixed or has_enough_bits(slot, choice, policy.bound)
        rest = slot.elements, slot.is_fixed, is_met, slot.ratio
        yield *name, label, kind, math.sqrt(choice.dx2), kept, average, *rest


def activation_rows(policy) -> Iterator[tuple]:
    """Yield the fields of `report.Bounded` for each activation, in the order of the forward pass."""
    # The backward pass, in whose order activations were measured, goes the other way.
    for name, activation in reversed(policy.knowledge.activations.items()):
        bits = policy.given.get(name, policy.activations.get(name))
        if bits is None:
            continue
        allowed = activation.allowed(policy.bound.e2, policy.bound.window)
        function = activation.function, activation.parameters
        is_met = not is_known(*function) or table_error(*function, bits) <= allowed
        is_given = name in policy.given
        yield name, None, "input", WORST, allowed, "bits", float(bits), None, is_given, is_met, None
