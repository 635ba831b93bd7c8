"""The choice of bits, codecs and tables from the knowledge of the error-bound policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fewbit.config import MAX_BITS, MIN_BITS, ErrorBound
from fewbit.policies.error_bound.estimates import (
    ActivationEstimate,
    BoundKnowledge,
    ConstraintEstimate,
    TensorEstimate,
)
from fewbit.policies.error_bound.table_errors import is_known, least_bits
from fewbit.runtime.codecs import DEFAULT, codec
from fewbit.runtime.codecs.payload import exact


class ExactCodec:
    """A codec that saves the tensor unchanged, but copies a part of a larger storage."""

    def quantize(self, x, seed):
        """Return x itself as a codec's result."""
        return exact(x)


@dataclass
class PayloadStats:
    """The bits per element of a slot's latest tensor, and the name of the codec that saved it."""

    bits: float | None = None
    codec: str | None = None


@dataclass(frozen=True)
class BoundedCodec:
    """A codec of `fewbit.runtime.codecs` that saves tensors within a `bound` on the mean squared error.

    `channels` has bounds of the channels (dimension 1), which replace `bound` for a tensor with as many channels.
    """

    name: str
    bound: float
    channels: tuple[float, ...] | None = None
    stats: PayloadStats = field(default_factory=PayloadStats, compare=False, repr=False)

    def quantize(self, x, seed):
        """Return x compressed, and write its size into `stats`."""
        bound = self.bound
        if self.channels is not None and x.dim() > 1 and x.shape[1] == len(self.channels):
            bound = self.channels
        # The cosine transform needs images, (N, C, H, W).
        fits = self.name != "jpeg" or x.dim() == 4
        payload = codec(self.name if fits else DEFAULT).compress(x, bound, seed)
        if x.numel():
            self.stats.bits = 8 * payload.nbytes / x.numel()
            self.stats.codec = payload.codec
        return payload


class BitChoice(NamedTuple):
    """The error-bound policy's choice for one slot.

    Args:
        average: bits per element; None if a codec saves the slot, or if it is saved exactly.
        dx2: dx*^2, the largest mean squared error of the slot's elements that all gradients allow.
        constraint: the one from which `dx2` follows, or None.
    """

    average: float | None
    dx2: float
    constraint: ConstraintEstimate | None = None


def choose(
    knowledge: BoundKnowledge, bound: ErrorBound, given: Mapping[str, int]
) -> tuple[dict[tuple[str, int], BitChoice], dict[str, int]]:
    """Return ({slot: choice}, {activation: bits of its table}); activations in `given` have bits that the user gave.

    Raises:
        FewbitError: there is no table for an activation.
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
    return slots, activations


def choose_bits(slot: TensorEstimate, bound: ErrorBound) -> BitChoice:
    """Return a slot's choice: the fewest bits if no gradient depends on it, the most if some gradients are unknown."""
    dx2, constraint = slot.deciding(bound.e2, bound.window)
    if constraint is None and slot.is_known:
        return BitChoice(float(MIN_BITS), dx2)
    if slot.is_known and (dx2 == 0 or bound.codec != DEFAULT):
        return BitChoice(None, dx2, constraint)
    average = slot.least_average(dx2, bound.window)
    if average is not None and not slot.is_known:
        average = float(MAX_BITS)
    return BitChoice(average, dx2, constraint)


def choose_codec(slot: TensorEstimate, choice: BitChoice, bound: ErrorBound, stats: PayloadStats):
    """Return the codec for a slot without bits. It writes the size of each tensor into `stats`."""
    if choice.dx2 == 0 or not slot.is_known or bound.codec == DEFAULT:
        return ExactCodec()
    channels = None
    if bound.by_channel and slot.weights is not None:
        channels = tuple(choice.dx2 / weight if weight > 0 else math.inf for weight in slot.weights)
    return BoundedCodec(bound.codec, choice.dx2, channels, stats)


def has_enough_bits(slot: TensorEstimate, choice: BitChoice, bound: ErrorBound) -> bool:
    """Return whether the bits that the user gave meet the bound; True without measurements."""
    if not slot.is_known or choice.constraint is None:
        return True
    least = slot.least_average(choice.dx2, bound.window) if choice.dx2 > 0 else None
    return least is not None and slot.average >= least


def _table_bits(activation: ActivationEstimate, bound: ErrorBound) -> int:
    allowed = activation.allowed(bound.e2, bound.window)
    return least_bits(activation.function, activation.parameters, allowed) or MAX_BITS
