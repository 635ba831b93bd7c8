"""Bits that are not fixed: an average for each compressed tensor of a model, shared out between its samples.

A *variable* is what a layer keeps of one of its inputs, forward after forward. It has an average of bits an element,
so that the bytes of a tensor follow from its shape alone; its samples share them by the squares of their ranges
(ActNN, section 4.2). Rounding adds step^2 / 6 on average to the variance of an element, step being the range of
its group / (2^bits - 1), so that of sample n

    squares_n / 6 / (2^bits_n - 1)^2        squares_n = sum over its groups of length * range^2

is added in all, times the square of its gradient, as far as that is known.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fewbit.config import MAX_BITS, MIN_BITS
from fewbit.errors import InputError
from fewbit.runtime.format.groups import LEAST_FEATURES
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.saved.sample_magnitudes import (
    GradientMagnitudes,
    SampleIndices,
    SampleNumbering,
)
from fewbit.sizes import counted

COMPILED, REENTRANT, ALONE = "compiled", "reentrant", "alone"
"""Why no observation knows of what a layer keeps: in a part that is compiled; in a checkpoint with use_reentrant=True; by a
layer that is called by itself, outside of a forward of the model."""


class TensorSlot(NamedTuple):
    """One compressed tensor of a model's forward. name: (of the layer, number of its input).

    average: bits an element, from 1 to 8. is_fixed: whether nobody but the user may change that. plan: of the forward.
    rounding: what the forward's observation has found out of how this tensor is rounded, where observed. user: the name
    of the layer that restores the tensor, where observed and not the one that keeps it.
    """

    name: tuple[str, int]
    average: float
    is_fixed: bool = True
    plan: BitAssignment | None = None
    rounding: object = None
    user: str | None = None

    def total(self, samples: int) -> int:
        """Bits of one element of each of `samples` samples together."""
        return min(max(self._whole(self.average * samples), MIN_BITS * samples), MAX_BITS * samples)

    def uniform(self) -> int:
        """Bits of a tensor whose samples are not known."""
        return min(max(self._whole(self.average), MIN_BITS), MAX_BITS)

    def _whole(self, bits: float) -> int:
        if self.plan is not None and self.plan.rounds_up and not self.is_fixed:
            return math.ceil(bits - 1e-6)
        return math.floor(bits + 1e-6)

    @property
    def levels(self) -> float:
        """2^bits - 1: steps that a range is divided into."""
        return 2.0**self.average - 1


class ChannelWeights:
    """Numbers by which channels count, of mean 1."""

    def __init__(self, weights):
        self._of = {torch.device("cpu"): torch.tensor(weights, dtype=torch.float32, device="cpu")}

    def on(self, device: torch.device) -> torch.Tensor:
        """(channels,) float32."""
        found = self._of.get(device)
        if found is None:
            found = self._of[device] = self._of[torch.device("cpu")].to(device)
        return found


class BitAssignment:
    """What one forward goes by, and whoever makes a part of it again for a checkpoint.

    averages: {name: bits}, of variables that do not have those of their layer. samples: in the forward, or None.
    observation: what is to be found out on the way, or None. Where the samples are numbered also magnitudes, of
    gradients by sample, and numbers, of the samples of this forward. keepers: {name: what keeps a variable in place of
    the group quantizer}. activations: {name: bits}, of few-bit activations that do not have their own.
    channels: {name of a layer: how many}, where those of each sample have bits of their own; weights: {name of a layer:
    ChannelWeights}, by which they share them. least_features: samples of fewer have no bits of their own. rounds_up: averages
    that are not fixed are least ones, so that their bits are at least as many; else they are at most. unobserved: why no
    observation may know of what goes by it (REENTRANT, ALONE), or "".
    """

    def __init__(self, averages, samples: int | None, observation=None):
        self.averages = averages
        self.samples = samples
        self.observation = observation
        self.magnitudes = self.numbers = None
        self.keepers, self.activations, self.channels, self.weights = {}, {}, {}, {}
        self.least_features, self.rounds_up, self.unobserved = 0, False, ""
        self._placed = {}

    def of(self, name: tuple[str, int], average: float, is_fixed: bool) -> TensorSlot:
        """The variable of that name. average: unless the plan has another."""
        if not is_fixed:
            average = self.averages.get(name, average)
        return TensorSlot(name, average, is_fixed, self)

    def keeper(self, variable: TensorSlot):
        """What keeps it in place of the group quantizer, or None."""
        return None if variable.is_fixed else self.keepers.get(variable.name)

    def sensitivities(self, variable: TensorSlot, squares: torch.Tensor) -> torch.Tensor:
        """(samples,) float32: squares of ranges, times those of gradients if the samples have been seen.

        Of samples that are channels times their weights.
        """
        name, slot = variable.name
        channels = self.channels.get(name, 0)
        if slot == 0 and name in self.weights and len(squares) >= channels * self.samples:
            weights = self.weights[name].on(squares.device)
            return (squares.view(-1, channels) * weights).view(-1)
        if self.numbers is None:
            return squares
        magnitudes = self.magnitudes.of(variable.name, self._on(squares.device))
        return squares if magnitudes is None else squares * magnitudes

    def note(self, variable: TensorSlot, grad) -> None:
        """The gradient of the result of a layer that has kept the variable, or None."""
        if self.numbers is not None and grad is not None and is_plain(grad):
            self.magnitudes.note(variable.name, self._on(grad.device), grad)

    def _on(self, device) -> SampleIndices:
        found = self._placed.get(device)
        if found is None:
            found = self._placed[device] = self.numbers.to(device)
        return found

    def samples_of(self, x, name: str = "") -> int | None:
        """How many samples lie in x one after the other, in storage order; None where that is not known.

        name: of the layer: where its channels have bits of their own, each of a sample is one.
        """
        if not self.samples or not x.dim() or not x.numel():
            return None
        channels = self.channels.get(name)
        if channels is not None and _has_planes(x, channels):
            return len(x) * channels
        if x.numel() < self.least_features * self.samples:
            return None
        if len(x) == self.samples:
            return self.samples
        return self.samples if len(x) % self.samples == 0 and x.is_contiguous() else None


class BitPolicy:
    """Those of one model: makes the plan of each forward."""

    def __init__(self):
        self.averages: dict[tuple[str, int], float] = {}
        self.magnitudes = GradientMagnitudes()
        self._places_of_samples = SampleNumbering()
        self._numbers = None  # of the samples of the next forward

    def begin(self, module, inputs, observation=None) -> BitAssignment:
        """At the beginning of a forward of that module in training. inputs: its arguments."""
        plan, self._numbers, numbers = self.plan(inputs, observation), None, self._numbers
        if numbers is not None and len(numbers) != plan.samples:
            raise InputError(
                f"expected the numbers of {counted(plan.samples, 'sample')}, as many as this forward has, "
                f"got {len(numbers)}"
            )
        plan.magnitudes, plan.numbers = self.magnitudes, numbers
        return plan

    def plan(self, inputs, observation=None) -> BitAssignment:
        """As things are."""
        return BitAssignment(self.averages, batch_size(inputs), observation)

    def number(self, numbers) -> None:
        """Of the samples of the next forward in training; see `SampleNumbering.of`."""
        self._numbers = self._places_of_samples.of(numbers)

    def unobserved(self, name: str, why: str) -> None:
        """A layer of that name keeps something of which no observation knows. why: COMPILED, REENTRANT or ALONE."""

    def state(self) -> dict:
        """What `load` makes again."""
        if not self.magnitudes:
            return {}
        return {"magnitudes": self.magnitudes.state(), "numbers": self._places_of_samples.state()}

    def load(self, state: dict) -> None:
        """Raises InputError, with nothing changed, for magnitudes that there cannot be."""
        magnitudes, places = GradientMagnitudes(), SampleNumbering()
        magnitudes.load(state.get("magnitudes", ()))
        places.load(state.get("numbers", places.state()))
        self.magnitudes, self._places_of_samples = magnitudes, places


def _has_planes(x, channels: int) -> bool:
    """Whether x, (N, channels, ...), has the elements of a channel of a sample together, enough for groups of their own."""
    fits = x.dim() > 2 and x.shape[1] == channels and x.is_contiguous()
    return fits and x.numel() >= LEAST_FEATURES * len(x) * channels


def batch_size(inputs) -> int | None:
    """Dimension 0 of the first tensor among a model's inputs."""
    for each in inputs:
        if isinstance(each, torch.Tensor) and each.dim():
            return len(each)
    return None
