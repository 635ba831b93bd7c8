"""The bits of every saved tensor in one forward pass, if a policy chooses them.

A *slot* is one input that a layer saves in every forward pass, for example the input of a linear layer. Each slot has
an average number of bits per element, so the bytes of its tensor follow from the shape alone. A *sample* is one slice
of the tensor along dimension 0. The bits are divided among the samples according to the squares of their ranges (ActNN,
section 4.2), so that samples of larger range get more bits. On average, rounding adds step^2 / 6 to the variance of an
element, where step = (range of the element's group) / (2^bits - 1). Sample n therefore adds

    squares_n / 6 / (2^bits_n - 1)^2        squares_n = sum over its groups of length * range^2

If the squared norm of the sample's gradient is known, this number is multiplied by the squared norm.

A `BitPolicy` (`bit_policy.py`) makes one `BitAssignment` for each forward pass. To learn from a forward pass, the
policy adds a `Probe` to the assignment. The probe measures how much rounding each slot changes the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from fewbit.config import MAX_BITS, MIN_BITS
from fewbit.runtime.format.groups import LEAST_FEATURES
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.saved.sample_magnitudes import GradientMagnitudes, SampleIndices

COMPILED, REENTRANT, ALONE = "compiled", "reentrant", "alone"
"""Reasons why a probe does not see a layer's tensor: the layer is in a compiled part of the model; it is in a checkpoint
with use_reentrant=True; it was called by itself, outside a forward pass of the model."""


class TensorSlot(NamedTuple):
    """One tensor that a layer saves, in one forward pass.

    Args:
        name: the layer's name and the number of the layer's input.
        average: bits per element, from 1 to 8.
        is_fixed: whether the user gave these bits, so that no policy may change them.
        assignment: the forward pass's assignment.
        rounding: the object that the probe's `record_rounding` returned for this tensor, or None.
        user: the name of the layer that dequantizes the tensor, if another layer saved it and a probe measures the
            forward pass; else None.
    """

    name: tuple[str, int]
    average: float
    is_fixed: bool = True
    assignment: BitAssignment | None = None
    rounding: object = None
    user: str | None = None

    def total(self, samples: int) -> int:
        """Return the sum, over the samples, of the bits per element of each sample."""
        bits = self._whole(self.average * samples)
        return min(max(bits, MIN_BITS * samples), MAX_BITS * samples)

    def uniform(self) -> int:
        """Return the whole number of bits per element for a tensor that is not divided into samples."""
        return min(max(self._whole(self.average), MIN_BITS), MAX_BITS)

    def _whole(self, bits: float) -> int:
        if self.assignment is not None and self.assignment.rounds_up and not self.is_fixed:
            return math.ceil(bits - 1e-6)
        return math.floor(bits + 1e-6)

    @property
    def levels(self) -> float:
        """2^bits - 1: the number of steps into which a group's range is divided."""
        return 2.0**self.average - 1


class Probe(Protocol):
    """The object that measures one forward pass and its backward pass for a policy.

    The methods are called in the order in which they are listed. None of them may raise.
    """

    def record_saved(self, slot: TensorSlot, elements: int, sensitivities, fp32_min_bytes: int):
        """Record that a layer saved a tensor.

        Args:
            slot: the tensor's slot.
            elements: the number of elements.
            sensitivities: (samples,) float32, the numbers by which bits are divided among samples; None if they are not
                divided.
            fp32_min_bytes: the bytes by which the saved tensor grows if the minimums of its groups become float32.
        """

    def record_rounding(self, slot: TensorSlot, record) -> object | None:
        """Return the object that the backward pass gets as `TensorSlot.rounding`, or None.

        Args:
            slot: the tensor's slot.
            record: the tensor and its quantized copy, a `fewbit.runtime.quantizers.spec.QuantizationRecord`.
        """

    def knows(self, name: tuple[str, int]) -> bool:
        """Return whether `record_saved` was called for a slot named `name`."""

    def watch(self, outputs) -> None:
        """Follow the backward pass that starts at the result of the forward pass.

        Args:
            outputs: the result, tensors in nested containers.
        """

    def reached(self, slots) -> None:
        """Record that a layer's backward dequantized the tensors of the slots, and that `probe` is not called for them."""

    def probe(self, number: int, backward, context, grads, results, slots) -> None:
        """Measure one layer in the backward pass.

        Args:
            number: the number that the probe gave in `watch` to the layer's node of the autograd graph.
            backward: the layer's backward function. The probe may call it with `context` and gradients.
            context: the context of the layer's autograd Function.
            grads: the gradients of the layer's results.
            results: the gradients that `backward` returned for the layer's inputs.
            slots: the slots whose tensors `backward` dequantized.
        """

    def noise(self, rows: torch.Tensor, slot: TensorSlot, level: int) -> torch.Tensor:
        """Return noise to add to dequantized values: float32 of the shape of `rows`.

        Args:
            rows: the dequantized values, (samples, features).
            slot: the values' slot.
            level: which noise to imitate, see `fewbit.runtime.probes.variance_probe.LEVELS`.
        """


class ChannelWeights:
    """Weights of a layer's channels, with mean 1. The first call of `on(device)` moves a copy to the device."""

    def __init__(self, weights):
        cpu = torch.device("cpu")
        self._by_device = {cpu: torch.tensor(weights, dtype=torch.float32, device=cpu)}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the weights, (channels,) float32, on the given device."""
        found = self._by_device.get(device)
        if found is None:
            found = self._by_device[device] = self._by_device[torch.device("cpu")].to(device)
        return found


@dataclass(eq=False)
class BitAssignment:
    """The bits of all slots in one forward pass, and in every checkpointed region of that pass that is recomputed.

    Args:
        averages: {slot's name: bits} of slots that do not have their layer's own average.
        samples: the number of samples in the forward pass, or None if it is not known.
        probe: the probe that measures this forward pass, or None.
        magnitudes: the squared gradient norms by slot and sample, or None.
        numbers: the rows of this forward pass's samples in `magnitudes`; None if the user did not number the samples.
        codecs: {slot's name: slot codec} of slots whose tensors a `SlotCodec` saves instead of the group quantizer.
        activations: {activation's name: bits} of few-bit activations that do not have their own bits.
        channels: {layer's name: count} of layers for which each channel of a sample has its own bits.
        channel_weights: {layer's name: weights} by which bits are divided among such channels.
        least_features: samples with fewer elements have no bits of their own.
        rounds_up: whether averages that are not fixed are lower bounds. Otherwise they are upper bounds.
        unobserved: the reason why no probe may see this forward pass's tensors, REENTRANT or ALONE, or "".
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
    _numbers_by_device: dict = field(default_factory=dict, repr=False)

    def slot(self, name: tuple[str, int], average: float, is_fixed: bool) -> TensorSlot:
        """Return the slot `name`. If `is_fixed` or the policy chose nothing for the slot, it has the given average."""
        if not is_fixed:
            average = self.averages.get(name, average)
        return TensorSlot(name, average, is_fixed, self)

    def codec(self, slot: TensorSlot):
        """Return the slot codec that saves this slot's tensors instead of the group quantizer, or None."""
        return None if slot.is_fixed else self.codecs.get(slot.name)

    def activation_bits(self, name: str, default: int) -> int:
        """Return the bits of the few-bit activation `name`: `default` unless the policy chose others."""
        return self.activations.get(name, default)

    def sensitivities(self, slot: TensorSlot, squares: torch.Tensor) -> torch.Tensor:
        """Return the numbers by which the bits of a tensor are divided among its samples.

        Args:
            slot: the slot of the tensor.
            squares: (samples,) float32, for each sample the sum of its groups' length * range^2.

        Returns:
            (samples,) float32. Usually these are the squares, each multiplied by the sample's squared gradient norm if
            the sample is numbered and was seen before. If each channel of a sample counts as a sample, they are the
            squares times the channels' weights.
        """
        layer, number = slot.name
        channels = self.channels.get(layer, 0)
        has_weights = number == 0 and layer in self.channel_weights
        if has_weights and len(squares) >= channels * self.samples:
            weights = self.channel_weights[layer].on(squares.device)
            return (squares.view(-1, channels) * weights).view(-1)
        if self.numbers is None:
            return squares
        magnitudes = self.magnitudes.of(slot.name, self._numbers_on(squares.device))
        return squares if magnitudes is None else squares * magnitudes

    def note_gradient(self, slot: TensorSlot, grad) -> None:
        """Remember the squared norm of each sample's gradient, if the user numbered the samples of this forward pass.

        Args:
            slot: a slot that a layer has saved.
            grad: the gradient of that layer's result, or None.
        """
        if self.numbers is not None and grad is not None and is_plain(grad):
            self.magnitudes.note(slot.name, self._numbers_on(grad.device), grad)

    def _numbers_on(self, device) -> SampleIndices:
        found = self._numbers_by_device.get(device)
        if found is None:
            found = self._numbers_by_device[device] = self.numbers.to(device)
        return found

    def samples_of(self, x, layer: str = "") -> int | None:
        """Return the number of samples that lie one after the other in x's memory; None if x is not divided into samples.

        Args:
            x: a tensor that a layer saves.
            layer: the layer's name. If the layer's channels have bits of their own, each channel of a sample counts as
                one.
        """
        if not self.samples or not x.dim() or not x.numel():
            return None
        channels = self.channels.get(layer)
        if channels is not None and _has_planes(x, channels):
            return len(x) * channels
        if x.numel() < self.least_features * self.samples:
            return None
        if len(x) == self.samples:
            return self.samples
        return self.samples if len(x) % self.samples == 0 and x.is_contiguous() else None


def _has_planes(x, channels: int) -> bool:
    """Return whether each channel of x, (N, channels, ...), is contiguous in each sample and fills groups of its own."""
    fits = x.dim() > 2 and x.shape[1] == channels and x.is_contiguous()
    return fits and x.numel() >= LEAST_FEATURES * len(x) * channels


def batch_size(inputs) -> int | None:
    """Return the size of dimension 0 of the first tensor among a model's inputs, or None without such a tensor."""
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.dim():
            return len(value)
    return None
