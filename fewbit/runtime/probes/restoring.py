"""Run a layer's backward while a probe measures: record which tensors are dequantized, and add noise to one of them."""

from __future__ import annotations

import threading

from fewbit.runtime.format import layout

HAS_COLLECTIVES = "backward_has_collectives"
"""An attribute of autograd Functions, True if the backward calls collectives and so must run equally often in all processes."""
OBSERVED = "_fewbit_observed"
"""The attribute in which an autograd node has (probe, number that the probe gave the node) for each probe."""
_running = threading.local()


def observed(backward, context, grads):
    """Run a layer's backward, let probes measure, and return the results."""
    probes = getattr(context, OBSERVED, ())
    if probes:
        context = _ObservedContext(context)
    restoring = Restoring()
    results = restoring.run(backward, context, *grads)
    if not restoring.slots:
        return results
    for slot in restoring.slots.values():
        slot.assignment.note_gradient(slot, grads[0])
    found = restoring.slots.values()
    for probe in {slot.assignment.probe for slot in found} - {None}:
        # Only the probe of the forward that saved a tensor adds noise to it. For other probes the layer is any node.
        own = [slot for slot in found if slot.assignment.probe is probe]
        number = dict(probes).get(probe)
        if number is None or getattr(context._forward_cls, HAS_COLLECTIVES, False):
            probe.reached(own)
        else:
            probe.reached([slot for slot in own if slot.rounding is None])
            probe.probe(number, backward, context, grads, results, own)
    return results


class Restoring:
    """Records the slots of dequantized tensors while `run` runs a backward, and adds noise to the tensors of one slot.

    The noise is probe.noise(..., target, level, ...); without a target, there is none.
    """

    def __init__(self, target=None, level: int = 0, probe=None):
        self.target, self.level, self.probe = target, level, probe
        self.slots = {}
        self._noise = {}  # by address: a tensor that is dequantized twice gets the same noise

    def run(self, backward, *arguments):
        """Return backward(*arguments). Meanwhile, record and change the tensors that this thread dequantizes."""
        before = getattr(_running, "restoring", None)
        # This does what `undo_after` does, without generators, because every backward of a layer runs it.
        try:
            try:
                _running.restoring = self
                return backward(*arguments)
            finally:
                _running.restoring = before
        except BaseException:  # an interrupt may have stopped the first clean-up
            _running.restoring = before
            raise

    def is_target(self, slot) -> bool:
        return self.target is not None and slot.name == self.target.name

    def restored(self, values, spec, tensors):
        """Record the slot of a dequantized tensor, and return its values, with noise for the target."""
        slot = spec.slot
        self.slots.setdefault(slot.name, slot)
        return self.changed(values, spec, tensors) if self.is_target(slot) else values

    def changed(self, values, spec, tensors):
        slot = spec.slot
        if slot.rounding is not None:
            flat = layout.storage_order(values)
            rows = flat.view(spec.samples or (len(values) if values.dim() else 1), -1)
            address = tensors[0].data_ptr()
            noise = self._noise.get(address)
            if noise is None:
                noise = self.probe.noise(
                    rows,
                    slot,
                    self.level,
                    lambda *how: spec.rounding_errors(values, tensors, *how),
                )
                self._noise[address] = noise
            rows += noise.to(rows.dtype)
        return values


def restored(values, spec, tensors):
    """Return the values of a dequantized tensor, perhaps changed in place by a probe's noise."""
    if spec.slot is None:
        return values
    restoring = getattr(_running, "restoring", None)
    return values if restoring is None else restoring.restored(values, spec, tensors)


def record(spec) -> None:
    """Record the slot of a tensor that a kernel has used without writing its values to memory."""
    restored(None, spec, None)


def is_changed(spec) -> bool:
    """Return whether `restored` would add noise."""
    restoring = getattr(_running, "restoring", None)
    return restoring is not None and spec.slot is not None and restoring.is_target(spec.slot)


class _ObservedContext:
    """A copy of an autograd context whose saved tensors can be read repeatedly, also within a checkpoint."""

    def __init__(self, context):
        self._context = context
        self.saved_tensors = context.saved_tensors

    def __getattr__(self, name):
        return getattr(self._context, name)
