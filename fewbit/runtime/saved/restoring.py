"""The backward pass of a layer while a probe follows: which tensors it dequantizes, and noise in one of them."""

from __future__ import annotations

import threading
from contextlib import contextmanager

from fewbit.runtime.format import layout
from fewbit.runtime.interop.interrupts import undo_after

HAS_COLLECTIVES = "backward_has_collectives"
"""The name of a Function's attribute that is True if its backward calls collectives, and so must not run more often."""
OBSERVED = "_fewbit_observed"
"""The attribute of an autograd node with the probes that follow it: tuples (probe, number of the node)."""
_running = threading.local()


def observed(backward, context, grads):
    """Return the results of a layer's backward, and let the probes of its saved tensors measure on the way.

    Args:
        backward: the backward of the layer's autograd Function, called with `context` and `grads`.
    """
    probes = getattr(context, OBSERVED, ())
    if probes:
        context = _Context(context)
    with Restoring().running() as restoring:
        results = backward(context, *grads)
    if not restoring.variables:
        return results
    for variable in restoring.variables.values():
        variable.plan.note(variable, grads[0])
    found = restoring.variables.values()
    for observation in {variable.plan.observation for variable in found} - {None}:
        # A probe of another forward through the same graph knows this layer only as a node like any other.
        own = [variable for variable in found if variable.plan.observation is observation]
        number = dict(probes).get(observation)
        if number is None or getattr(context._forward_cls, HAS_COLLECTIVES, False):
            observation.reached(own)
        else:
            observation.reached([variable for variable in own if variable.rounding is None])
            observation.probe(number, backward, context, grads, results, own)
    return results


class Restoring:
    """Records the variables of tensors that are dequantized in `running`, and adds noise to tensors of a target variable.

    Args:
        target: the variable whose tensors get noise, or None.
        level: the bits whose rounding the noise imitates, see `VarianceProbe.noise`.
        observation: the probe that makes the noise.
    """

    def __init__(self, target=None, level: int = 0, observation=None):
        self.target, self.level, self.observation = target, level, observation
        self.variables = {}
        self._noise = {}  # by address: a tensor that is dequantized twice gets the same noise

    @contextmanager
    def running(self):
        """Record the tensors that are dequantized in this block."""
        before = getattr(_running, "restoring", None)
        with undo_after(lambda: setattr(_running, "restoring", before)):
            _running.restoring = self
            yield self

    def is_target(self, variable) -> bool:
        return self.target is not None and variable.name == self.target.name

    def restored(self, values, spec, packed):
        variable = spec.variable
        self.variables.setdefault(variable.name, variable)
        return self.changed(values, spec, packed) if self.is_target(variable) else values

    def changed(self, values, spec, packed):
        """Add noise to the values in place and return them."""
        variable = spec.variable
        if variable.rounding is not None:
            flat = layout.storage_order(values)
            rows = flat.view(spec.samples or (len(values) if values.dim() else 1), -1)
            noise = self._noise.get(packed.data_ptr())
            if noise is None:
                noise = self.observation.noise(rows, variable, self.level)
                self._noise[packed.data_ptr()] = noise
            rows += noise.to(rows.dtype)
        return values


def restored(values, spec, packed):
    """Return the values of a saved tensor that a layer's backward has dequantized, with noise if a probe tries that.

    Args:
        values: dequantized values, which may be changed in place.
        spec: of the saved tensor.
        packed: its packed codes, which identify it.
    """
    if spec.variable is None:
        return values
    restoring = getattr(_running, "restoring", None)
    return values if restoring is None else restoring.restored(values, spec, packed)


def is_changed(spec) -> bool:
    """Return whether `restored` adds noise to the tensor with that spec."""
    restoring = getattr(_running, "restoring", None)
    return (
        restoring is not None and spec.variable is not None and restoring.is_target(spec.variable)
    )


class _Context:
    """An autograd context whose saved tensors can be read repeatedly, while a checkpoint allows one read."""

    def __init__(self, context):
        self._context = context
        self.saved_tensors = context.saved_tensors

    def __getattr__(self, name):
        return getattr(self._context, name)
