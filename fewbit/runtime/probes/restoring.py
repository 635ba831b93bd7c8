"""Run a layer's backward while a probe measures, and again with other values in place of those of quantized tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fewbit.runtime.backends.reference_quantizer import in_dtype
from fewbit.runtime.format import layout
from fewbit.runtime.format.channels import map_affine

HAS_COLLECTIVES = "backward_has_collectives"
"""An attribute of autograd Functions, True if the backward calls collectives and so must run equally often in all processes."""
OBSERVED = "_fewbit_observed"
"""The attribute in which an autograd node has (probe, number that the probe gave the node) for each probe."""


def observed(backward, context, grads):
    """Run the backward of a layer that has saved tensors with slots, let probes measure, and return the results."""
    probes = dict(getattr(context, OBSERVED, ()))
    if probes:
        result = getattr(context, "result", None)
        context = ObservedContext(context, context.kept, context.saved_tensors, result)
    results = backward(context, *grads)
    slots = _slots_of(context)
    for slot in slots:
        slot.assignment.note_gradient(slot, grads[0])
    for probe in {slot.assignment.probe for slot in slots} - {None}:
        # Only the probe of the forward that saved a tensor adds noise to it. For other probes the layer is any node.
        own = [slot for slot in slots if slot.assignment.probe is probe]
        number = probes.get(probe)
        if number is None or getattr(context._forward_cls, HAS_COLLECTIVES, False):
            probe.reached(own)
        else:
            probe.reached([slot for slot in own if slot.rounding is None])
            probe.probe(number, backward, context, grads, results, own)
    return results


def _slots_of(context) -> list:
    """Return the slots of the tensors that a layer has saved, one of each name."""
    slots = {}

    def note(spec, _):
        slots.setdefault(spec.slot.name, spec.slot)
        return spec

    for entry in context.kept.values():
        if entry is not None and entry[2] is not None:
            mapped(entry[2], (), note)
    return list(slots.values())


def mapped(spec, tensors, function):
    """Return `spec` with function(s, its tensors) in place of each spec s in it that has a slot."""
    if hasattr(spec, "mapped"):
        return spec.mapped(tensors, function)
    return spec if getattr(spec, "slot", None) is None else function(spec, tensors)


class ObservedContext:
    """An autograd context whose saved tensors can be read repeatedly, also within a checkpoint."""

    def __init__(self, context, kept, saved_tensors, result):
        self._context, self.kept, self.saved_tensors = context, kept, saved_tensors
        self._result = result

    @property
    def result(self):
        return self._result

    @result.deleter
    def result(self):
        vars(self._context).pop("result", None)  # this context is read again

    def __getattr__(self, name):
        return getattr(self._context, name)

    def with_values(self, values_of: Callable) -> ObservedContext:
        """Return a context in which values_of(spec, tensors) replaces the values of tensors with a slot, unless it is None."""
        found = {}  # by address: a tensor that is dequantized twice has the same values

        def replaced(spec, tensors):
            address = tensors[0].data_ptr()
            if address not in found:
                found[address] = values_of(spec, tensors)
            values = found[address]
            return spec if values is None else _Restored(values, spec.count)

        kept = dict(self.kept)
        for name, entry in self.kept.items():
            if entry is not None and entry[2] is not None:
                begin, end, spec = entry
                spec = mapped(spec, self.saved_tensors[begin:end], replaced)
                kept[name] = begin, end, spec
        return ObservedContext(self._context, kept, self.saved_tensors, self._result)


def with_noise(context: ObservedContext, slot, level: int, probe) -> ObservedContext:
    """Return a context in which the tensors of a slot have noise: probe.noise(..., level, ...)."""

    def noisy(spec, tensors):
        own = spec.slot
        if own.name != slot.name or own.rounding is None:
            return None
        values = spec.dequantize(tensors)
        samples = spec.samples or (len(values) if values.dim() else 1)
        rows = layout.storage_order(values).view(samples, -1)
        errors = lambda *how: spec.rounding_errors(values, tensors, *how)  # noqa: E731
        rows += probe.noise(rows, own, level, errors).to(rows.dtype)
        return values

    return context.with_values(noisy)


class _Restored(NamedTuple):
    """The spec of `count` saved tensors that are not dequantized, because their values are there."""

    values: torch.Tensor
    count: int

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def stride(self) -> tuple[int, ...]:
        return self.values.stride()

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def dequantize(self, _, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        return in_dtype(map_affine(self.values.clone(), affine), dtype or self.dtype)
