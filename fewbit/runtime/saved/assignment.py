"""The bits of every saved tensor in one forward pass, if a policy chooses them.

A tensor's bits are divided among its samples so that the sum of distortion(kind, bits_n) * sensitivity_n is small
(ActNN, section 4.2). A sample's *sensitivity* is its `squares`, times the squared norm of its gradient if known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from fewbit.config import MAX_BITS, MIN_BITS, UNIFORM
from fewbit.runtime.format.groups import LEAST_FEATURES
from fewbit.runtime.interop.cuda_streams import hold_for_stream, stream_of
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.saved.sample_magnitudes import GradientMagnitudes, SampleIndices

COMPILED, REENTRANT, ALONE = "compiled", "reentrant", "alone"
"""Why no probe can measure a layer: it is compiled, in a checkpoint with use_reentrant=True, or called outside the model."""


_new = tuple.__new__


class TensorSlot(NamedTuple):
    """One tensor that a layer saves, in one forward pass.

    Args:
        name: (the layer's name, the number of the tensor among the layer's inputs).
        average: the mean number of bits per element, from 1 to 8.
        is_fixed: whether the user gave these bits, so that no policy may change them.
        rounding: the object that the probe's `record_rounding` returned, or None.
        user: the name of the layer that dequantizes the tensor, if it is not the layer that saved it and a probe
            measures the forward pass; else None.
        kind: the kind of the group quantizer's copies, "uniform" or "rotated".
        rounds_up: whether the average is rounded up, not down, to whole bits.
    """

    name: tuple[str, int]
    average: float
    is_fixed: bool = True
    assignment: BitAssignment | None = None
    rounding: object = None
    user: str | None = None
    kind: str = UNIFORM
    rounds_up: bool = False

    def total(self, samples: int) -> int:
        return _total_bits(self.average, samples, self.rounds_up)

    def uniform(self) -> int:
        """Return the whole bits per element if they are not divided."""
        return _total_bits(self.average, 1, self.rounds_up)


@lru_cache(maxsize=4096)
def _total_bits(average: float, samples: int, rounds_up: bool) -> int:
    bits = average * samples
    bits = math.ceil(bits - 1e-6) if rounds_up else math.floor(bits + 1e-6)
    return min(max(bits, MIN_BITS * samples), MAX_BITS * samples)


class Probe(Protocol):
    """The object that measures one forward pass and its backward pass for a policy.

    The methods are called in this order, and none may raise an exception.
    """

    def record_saved(self, slot: TensorSlot, elements: int, sensitivities):
        """Record that a layer saved a tensor of this many elements.

        `sensitivities` is (samples,) float32, or None if the bits are not divided.
        """

    def record_rounding(self, slot: TensorSlot, record) -> object | None:
        """Measure the rounding of a `spec.QuantizationRecord`; the result becomes `TensorSlot.rounding`."""

    def knows(self, name: tuple[str, int]) -> bool:
        """Return whether `record_saved` was called for the slot `name`."""

    def watch(self, outputs) -> None:
        """Follow the backward pass that starts at the model's outputs, tensors in nested containers."""

    def reached(self, slots) -> None:
        """Record that a layer whose backward ran has saved tensors of these slots, and that `probe` cannot measure them."""

    def probe(self, number: int, backward, context, grads, results, slots) -> None:
        """Measure one layer in the backward pass.

        Args:
            number: the number that `watch` has given to the layer's node of the autograd graph.
            backward: the layer's backward function; the probe may call backward(context, *grads) again.
            context: the context of the layer's autograd Function.
            grads: the gradients of the layer's results.
            results: the gradients that `backward` returned.
            slots: the slots of the tensors that the layer has saved.
        """

    def noise(self, rows: torch.Tensor, slot: TensorSlot, level: int, errors) -> torch.Tensor:
        """Return noise to add to dequantized values `rows`, (samples, features): float32 of the same shape.

        It imitates the errors of rounding to `level` bits, of LEVELS. errors(bits, seed) is the errors of rounding
        again.
        """


class ChannelWeights:
    """The weights of a layer's channels, with mean 1: a channel with a larger weight gets more bits."""

    def __init__(self, weights):
        cpu = torch.device("cpu")
        self._by_device = {cpu: torch.tensor(weights, dtype=torch.float32, device=cpu)}

    def on(self, device: torch.device) -> torch.Tensor:
        found = self._by_device.get(device)
        if found is None:
            found = self._by_device[device] = self._by_device[torch.device("cpu")].to(device)
        hold_for_stream((found,))  # the policy may drop the weights soon
        return found


@dataclass(eq=False)
class BitAssignment:
    """The bits of all slots in one forward pass, also when a region of it is recomputed.

    Args:
        averages: {slot's name: average bits per element} where the policy replaces the layer's own average.
        samples: the number of samples in the forward pass, or None if it is not known.
        magnitudes: the squared gradient norms of samples in earlier backward passes, or None.
        numbers: the rows of this forward pass's samples in `magnitudes`, or None.
        codecs: {slot's name: slot codec} of slots that the group quantizer does not save.
        activations: {activation's name: bits} where the policy replaces the activation's own bits.
        channels: {layer's name: number of channels} of layers whose bits are divided among the channels of each sample.
        channel_weights: {layer's name: weights of these channels}.
        least_features: the least number of elements per sample with which a tensor's bits are divided among samples.
        rounds_up: whether averages that are not fixed are rounded up, not down, to whole bits.
        unobserved: why no probe can measure this forward pass: REENTRANT, ALONE, or "" if one can.
    """

    averages: Mapping[tuple[str, int], float]
    samples: int | None
    probe: Probe | None = None
    magnitudes: GradientMagnitudes | None = None
    numbers: SampleIndices | None = None
    codecs: Mapping[tuple[str, int], object] = field(default_factory=dict)
    activations: Mapping[str, int] = field(default_factory=dict)
    channels: Mapping[str, int] = field(default_factory=dict)
    channel_weights: Mapping[str, ChannelWeights] = field(default_factory=dict)
    least_features: int = 0
    rounds_up: bool = False
    unobserved: str = ""
    _numbers_by_stream: dict = field(default_factory=dict, repr=False)

    def slot(
        self, name: tuple[str, int], average: float, is_fixed: bool, kind: str = UNIFORM
    ) -> TensorSlot:
        """Return the slot `name`, as `TensorSlot` describes it, with the policy's average, if any."""
        if not is_fixed and name in self.averages:
            average = self.averages[name]
        rounds_up = self.rounds_up and not is_fixed
        return _new(TensorSlot, (name, average, is_fixed, self, None, None, kind, rounds_up))

    def activation_bits(self, name: str, default: int) -> int:
        return self.activations.get(name, default)

    def sensitivities(self, slot: TensorSlot, squares: torch.Tensor) -> torch.Tensor:
        """Return the sensitivities, (samples,) float32, of samples with these `squares`."""
        if self.numbers is None and not self.channel_weights:
            return squares
        layer, number = slot.name
        channels = self.channels.get(layer, 0)
        has_weights = number == 0 and layer in self.channel_weights
        if has_weights and len(squares) >= channels * self.samples:
            weights = self.channel_weights[layer].on(squares.device)
            return (squares.view(-1, channels) * weights).view(-1)
        if self.numbers is None:
            return squares
        magnitudes = self.magnitudes.of(slot.name, self._numbers_beside(squares))
        return squares if magnitudes is None else squares * magnitudes

    def note_gradient(self, slot: TensorSlot, grad) -> None:
        """Remember the squared norm of each numbered sample's gradient of a layer's result."""
        if self.numbers is not None and grad is not None and is_plain(grad):
            self.magnitudes.note(slot.name, self._numbers_beside(grad), grad)

    def _numbers_beside(self, x) -> SampleIndices:
        """Return the samples' rows on x's device, for the current stream alone."""
        place = x.device, stream_of(x)
        found = self._numbers_by_stream.get(place)
        if found is None:
            found = self._numbers_by_stream[place] = self.numbers.to(x.device)
        return found

    def samples_of(self, x, layer: str = "") -> int | None:
        """Return the number of samples, or of channels of samples, among which x's bits are divided, or None."""
        if not self.samples or not x.ndim or not x.numel():
            return None
        channels = self.channels.get(layer) if self.channels else None
        if channels is not None and _has_planes(x, channels):
            return x.shape[0] * channels
        if self.least_features and x.numel() < self.least_features * self.samples:
            return None
        if x.shape[0] == self.samples:
            return self.samples
        return self.samples if x.shape[0] % self.samples == 0 and x.is_contiguous() else None


def _has_planes(x, channels: int) -> bool:
    """Return whether x is contiguous, (N, channels, ...), and has groups of its own in each channel."""
    fits = x.dim() > 2 and x.shape[1] == channels and x.is_contiguous()
    return fits and x.numel() >= LEAST_FEATURES * len(x) * channels


def batch_size(inputs) -> int | None:
    """Return the size of dimension 0 of the first tensor among the inputs, or None."""
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.ndim:
            return value.shape[0]
    return None
