"""The probe of the error-bound policy: it measures V^2 and D of each gradient (`GradientConstraint`) in one backward pass.

D follows from a formula (`runtime/probes/gradient_errors.py`), or from noise in one dequantized tensor.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

import torch

from fewbit.config import MAX_BITS
from fewbit.policies.error_bound.observations import (
    EXPECTED,
    MEASURED,
    ActivationNorms,
    ProbeResult,
    TensorNorms,
)
from fewbit.policies.error_bound.shares import (
    MeasuredGradient,
    MeasuredTensor,
    Share,
    channel_weights,
    constraints_of,
    monitored_norms,
    shares_by_slot,
)
from fewbit.policies.records import merge_by_key
from fewbit.runtime.format.distortion import distortion
from fewbit.runtime.probes import gradient_errors
from fewbit.runtime.probes.gradient_errors import Cost, ErrorOfGradient
from fewbit.runtime.probes.norms import is_dense, norm, squared
from fewbit.runtime.probes.restoring import with_noise
from fewbit.runtime.probes.variance_probe import SPREAD, VarianceProbe
from fewbit.runtime.quantizers.copies import Kept
from fewbit.runtime.quantizers.spec import QuantizationRecord
from fewbit.runtime.saved.assignment import TensorSlot


@dataclass(eq=False)
class _Rounding:
    """The measurements and perhaps the exact values of a saved tensor, which only the autograd graph keeps alive."""

    tensor: MeasuredTensor
    exact: torch.Tensor | None = None


class ErrorBoundProbe(VarianceProbe):
    """A probe of one step for the error-bound policy.

    For slots in `monitored`, the layer's backward also runs with exact values, which are kept until the pass ends.
    """

    def __init__(self, seed: int, monitored: frozenset[tuple[str, int]] = frozenset()):
        super().__init__(seed)
        self.monitored = monitored
        self._tensors: list[MeasuredTensor] = []
        self._exact = weakref.WeakSet()  # _Rounding objects with exact values
        self._bytes: dict[tuple[str, int], int] = {}  # of one element, by slot
        self._found: dict[int, list[MeasuredGradient]] = {}  # by number of a layer's node
        self._calls: dict[int, tuple] = {}  # activations, by node: name, function, parameters
        self._passes: dict[int, tuple] = {}  # norms of their gradients: of the input, of the result

    # -- In the forward pass ---------------------------------------------------------------------------------

    def record_rounding(self, slot: TensorSlot, record: QuantizationRecord) -> _Rounding | None:
        """Measure a saved tensor's rounding errors, and return an object for the autograd graph to hold."""
        if not self._is_open:
            return None
        exact = record.exact() if slot.name in self.monitored else None
        difference = record.errors(exact)
        rows = difference if difference.dim() > 1 else difference.reshape(-1, 1)
        errors = gradient_errors.squares(rows, tuple(range(1, rows.dim()))).flatten()
        squares = record.squares().double()
        error2, elements = errors.sum(), difference.numel()
        least = distortion(slot.kind, MAX_BITS) * squares
        deviation = (torch.maximum(error2, least) / elements).sqrt()
        has_samples = record.spec.samples is not None
        numbers = errors, error2.sqrt(), squares, deviation
        tensor = MeasuredTensor(slot.name, elements, has_samples, *numbers)
        self._tensors.append(tensor)
        self._bytes[slot.name] = difference.element_size()
        rounding = _Rounding(tensor, exact)
        if exact is not None:
            self._exact.add(rounding)
        return rounding

    def _attach(self, node, number) -> None:
        super()._attach(node, number)
        called = getattr(node, "observed_as", None)
        if called is not None:
            self._calls[number] = called

    # -- In the backward pass --------------------------------------------------------------------------------

    def _passed(self, number, leaving, arriving) -> None:
        self._begins()
        if number in self._calls and self._is_open and _are_dense((*leaving, *arriving)):
            sizes = norm(leaving[:1]), norm(arriving[:1])
            if None not in sizes:
                self._passes[number] = sizes

    def probe(self, number: int, backward, context, grads, results, slots) -> None:
        """See `assignment.Probe.probe`."""
        self._begins()
        results = _as_tuple(results)
        if not self._is_open or not _are_dense((*grads, *results)):
            self.reached(slots)
            return
        slots = [slot for slot in slots if slot.rounding is not None]
        parts = None
        if len(slots) == 1:
            errors = slots[0].rounding.tensor.errors
            parts = gradient_errors.of_layer(context, Kept(context), grads, results, errors)
        exact = None
        if any(slot.rounding.exact is not None for slot in slots):
            exact = _as_tuple(backward(context.with_values(_exact_values), *grads))
        kind, found = EXPECTED if parts is not None else MEASURED, []
        labels = gradient_errors.labels(context._forward_cls)
        for slot in slots:
            own = parts
            if own is None:
                noisy = _as_tuple(backward(with_noise(context, slot, 0, self), *grads))
                own = _measured(results, noisy, slot.rounding.tensor)
            found += [_gradient(slot, part, labels, kind, results, exact) for part in own]
        self._found[number] = found

    def noise(self, rows: torch.Tensor, slot: TensorSlot, level: int, errors) -> torch.Tensor:
        """Return noise with the slot's deviation, float32 in the shape of `rows`."""
        deviation = slot.rounding.tensor.deviation
        return self._uniform(rows).sub_(0.5).mul_(math.sqrt(12.0) * deviation)

    def _let_go(self) -> None:
        for rounding in list(self._exact):
            rounding.exact = None

    # -- Afterwards ------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End the measurement, and free the exact values."""
        super().end()
        self._let_go()

    def _measured(self):
        for tensor in self._tensors:
            yield from (tensor.error, tensor.squares, tensor.deviation)
        for found in self._found.values():
            for gradient in found:
                yield from (gradient.size, *gradient.part.numbers)
                if gradient.exact is not None:
                    yield gradient.exact
        for sizes in self._passes.values():
            yield from sizes

    def _summed_up(self, host) -> ProbeResult | None:
        # A backward pass in another thread may have measured more after the copy to the host had begun.
        if self.is_void or any(id(number) not in host for number in self._measured()):
            return None
        if not all(math.isfinite(number) for numbers in host.values() for number in numbers):
            return None
        if not (self._found or self._passes):
            return None
        tensors = {}
        for tensor in self._tensors:
            tensors.setdefault(tensor.name, []).append(tensor)
        shares = shares_by_slot(host, list(self._found.values()))
        slots = {
            name: self._tensor_norms(host, name, own, shares.get(name, []))
            for name, own in tensors.items()
        }
        return ProbeResult(slots, self._activation_norms(host))

    def _tensor_norms(
        self, host, name, tensors: list[MeasuredTensor], shares: list[Share]
    ) -> TensorNorms:
        seen = self.slots[name]
        elements = sum(tensor.elements for tensor in tensors)
        errors = sum(squared(host, tensor.error) for tensor in tensors)
        squares = sum(host[id(tensor.squares)][0] for tensor in tensors)
        spread = (squares, *[0.0] * (SPREAD - 1))
        has_samples = all(tensor.has_samples for tensor in tensors)
        if has_samples:
            spread = self._spread(host, name)
        tried = sum(squared(host, tensor.deviation) * tensor.elements for tensor in tensors)
        costs = constraints_of(host, shares, tried / elements)
        return TensorNorms(
            *name,
            seen.bits,
            seen.is_fixed,
            elements,
            seen.samples if has_samples else 0,
            spread,
            errors / elements,
            self._bytes[name],
            tuple(constraint for constraint, _ in costs),
            channel_weights(costs),
            seen.is_known and (bool(costs) or name not in self._reached_within),
            monitored_norms(host, shares),
            seen.quantizer,
        )

    def _activation_norms(self, host) -> dict[str, ActivationNorms]:
        found = []
        for number, sizes in self._passes.items():
            name, function, parameters = self._calls[number]
            squares = (squared(host, size) for size in sizes)
            found.append({name: ActivationNorms(name, function, tuple(parameters), *squares)})
        return merge_by_key(found)


def _exact_values(spec, _) -> torch.Tensor | None:
    rounding = spec.slot.rounding
    return None if rounding is None else rounding.exact


def _gradient(
    slot: TensorSlot, part: ErrorOfGradient, labels, kind, results, exact
) -> MeasuredGradient:
    label = labels[part.place]
    if slot.user is not None:
        label = f"{slot.user}: {label}"
    exact_size = None
    if exact is not None and slot.rounding.exact is not None:
        exact_size = norm([part.of(exact)])
    size = norm([part.of(results)])
    tensor = slot.rounding.tensor
    return MeasuredGradient(part, label, kind, tensor, size, exact_size)


def _measured(results, noisy, tensor: MeasuredTensor) -> list[ErrorOfGradient]:
    parts = []
    for place, (clean, other) in enumerate(zip(results, noisy, strict=True)):
        if clean is not None and other is not None:
            numbers = norm([other - clean]).double()[None], tensor.deviation[None]
            parts.append(ErrorOfGradient(place, numbers, _measured_cost))
    return parts


def _measured_cost(entries, _):
    (change,), (deviation,) = entries
    return Cost(change / deviation if deviation > 0 else 0.0)


def _as_tuple(results) -> tuple:
    return results if isinstance(results, tuple) else (results,)


def _are_dense(tensors) -> bool:
    return all(tensor is None or is_dense(tensor) for tensor in tensors)
