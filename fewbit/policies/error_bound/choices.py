"""The bits, codecs and tables that follow from the error-bound policy's knowledge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from fewbit.config import MAX_BITS, MIN_BITS, ErrorBound
from fewbit.policies.error_bound.codecs import BoundedCodec, ExactCodec, PayloadStats
from fewbit.policies.error_bound.estimates import (
    ActivationEstimate,
    BoundKnowledge,
    ConstraintEstimate,
    TensorEstimate,
)
from fewbit.policies.error_bound.tables import is_known, least_bits
from fewbit.runtime.codecs import DEFAULT as QUANT


class BitChoice(NamedTuple):
    """The choice for one slot.

    Args:
        average: bits per element; None if a codec saves the slot, or it is saved exactly.
        dx2: dx*^2, the mean squared error that is allowed.
        constraint: the constraint that dx* follows from, or None.
    """

    average: float | None
    dx2: float
    constraint: ConstraintEstimate | None = None


class Choices(NamedTuple):
    """Choices by slot, and bits by activation."""

    slots: Mapping[tuple[str, int], BitChoice]
    activations: Mapping[str, int]


def choose(knowledge: BoundKnowledge, bound: ErrorBound, given: Mapping[str, int]) -> Choices:
    """Return what follows from the knowledge.

    Args:
        knowledge: the policy's knowledge.
        bound: the policy's settings.
        given: {name: bits} of few-bit activations whose bits the user gave.

    Raises:
        FewbitError: an activation's function has no table with the parameters that the knowledge says.
    """
    slots = {
        name: choose_bits(slot, bound)
        for name, slot in knowledge.slots.items()
        if not slot.is_fixed
    }
    activations = {
        name: _table_bits(activation, bound)
        for name, activation in knowledge.activations.items()
        if name not in given and is_known(activation.function, activation.parameters)
    }
    return Choices(slots, activations)


def choose_bits(slot: TensorEstimate, bound: ErrorBound) -> BitChoice:
    """Return the choice for one slot.

    A slot that no gradient uses has the fewest bits. If not all gradients were seen, the slot keeps the most bits.
    """
    dx2, constraint = slot.deciding(bound.e2, bound.window)
    if constraint is None and slot.is_known:
        return BitChoice(float(MIN_BITS), dx2)
    if slot.is_known and (dx2 == 0 or bound.codec != QUANT):
        return BitChoice(None, dx2, constraint)
    average = slot.least_average(dx2, bound.window)
    if average is not None and not slot.is_known:
        average = float(MAX_BITS)
    return BitChoice(average, dx2, constraint)


def choose_codec(slot: TensorEstimate, choice: BitChoice, bound: ErrorBound, stats: PayloadStats):
    """Return the codec of a slot whose choice has no bits.

    Args:
        slot: the knowledge of the slot.
        choice: its choice.
        bound: the policy's settings.
        stats: filled by the codec whenever it saves the slot.
    """
    if choice.dx2 == 0 or not slot.is_known or bound.codec == QUANT:
        return ExactCodec()
    channels = None
    if bound.by_channel and slot.weights is not None:
        channels = tuple(choice.dx2 / weight if weight > 0 else math.inf for weight in slot.weights)
    return BoundedCodec(bound.codec, choice.dx2, channels, stats)


def has_enough_bits(slot: TensorEstimate, choice: BitChoice, bound: ErrorBound) -> bool:
    """Return whether bits that the user gave keep to the bound, as far as that is known."""
    if not slot.is_known or choice.constraint is None:
        return True
    least = slot.least_average(choice.dx2, bound.window) if choice.dx2 > 0 else None
    return least is not None and slot.average >= least


def _table_bits(activation: ActivationEstimate, bound: ErrorBound) -> int:
    allowed = activation.allowed(bound.e2, bound.window)
    return least_bits(activation.function, activation.parameters, allowed) or MAX_BITS
