"""Measured forward and backward passes of a model: gradients, times, saved bytes, and allocations."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.autograd.profiler import profile, record_function

from fewbit.analysis.gradients import Loss, Measured, explained, tensors_of
from fewbit.analysis.meter import identity_of, parts_of, saved_bytes
from fewbit.analysis.unchanged import unchanged
from fewbit.checkpointing import CHECKPOINTING
from fewbit.compiler.compiling import compile_in_place
from fewbit.convert.swap import restore_
from fewbit.errors import InputError
from fewbit.planning.candidates import Candidate
from fewbit.planning.costs import clock_of
from fewbit.planning.loss import FewBitLoss
from fewbit.planning.timeline import LOSS, TRANSIENT, Event, Mark, Timeline
from fewbit.planning.watching import watched
from fewbit.runtime.interop.own_forward import ATTRIBUTES
from fewbit.runtime.saved.context import measuring

_NAME = "fewbit.mark:"
_QUIET = "KINETO_LOG_LEVEL", "6"
"""The variable with which torch's profiler prints no lines of its own."""
_CHANGED = *CHECKPOINTING, *ATTRIBUTES
"""The attributes of modules that `checkpoint_` and `chunk_loss_` change."""
_OF_FEWBIT = "layers", "overrides"
"""The options of candidates that compile which are fewbit's."""


class RealSteps(Measured):
    """Timed forward and backward passes of a model.

    Attributes:
        seconds: The duration of the latest forward and backward pass, in seconds.
        loss_bits: The bits with which the loss function's cross-entropy saves probabilities; None for torch's.
        passes: The number of passes with `loss_bits` so far.
    """

    seconds = math.nan
    loss_bits = None
    passes = 0

    def __init__(self, model: nn.Module, loss: Loss, seed: int):
        super().__init__(model, loss, seed)
        self.device = next(model.parameters()).device
        self.clock = clock_of(self.device)
        self._before = {
            module: {name: vars(module)[name] for name in _CHANGED if name in vars(module)}
            for module in model.modules()
        }

    def restore(self) -> None:
        """Undo what a candidate has changed."""
        restore_(self.model)
        self.code = None
        self.loss_bits = None
        for module, values in self._before.items():
            # Without an attribute of its own, a layer has that of its class.
            for name in _CHANGED:
                vars(module).pop(name, None)
            vars(module).update(values)

    @property
    def code(self):
        """The compiled code that calls of the model run, or None."""
        return self.model._compiled_call_impl

    @code.setter
    def code(self, code) -> None:
        self.model._compiled_call_impl = code

    def value(self, batch) -> torch.Tensor:
        """Return the loss of a batch, and start the clock."""
        self.wait()
        self._started = self.clock()
        with self._loss_mode():
            return super().value(batch)

    def saved_bytes(self, batch) -> int:
        """Return the bytes that one forward pass saves."""
        if self.code is not None:
            self.gradient(batch, 0)  # compile the code
        with self._loss_mode():
            return saved_bytes(partial(self.loss, self.model), batch).total

    def _loss_mode(self):
        if self.loss_bits is None:
            return nullcontext()
        self.passes += 1
        return FewBitLoss(self.loss_bits, self.seed + self.passes)

    def backward(self, value, again=False):
        """Return the gradients, and stop the clock."""
        found = super().backward(value, again)
        self.wait()
        self.seconds = self.clock() - self._started
        return found

    def wait(self) -> None:
        """Wait until the devices have done all work."""
        for device in {parameter.device for parameter in self.parameters}:
            if device.type not in ("cpu", "meta"):
                torch.get_device_module(device).synchronize(device)

    def timeline(
        self, batch, blocks: Iterable[nn.Module], state: int, accumulates: bool
    ) -> tuple[Timeline, list[torch.Tensor]]:
        """Return the timeline and the gradient of a step that marks the passes of `blocks`. The model's gradients do not change.

        `state` are the bytes of the optimizer's state. `accumulates` says whether gradients exist before the step.
        """
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        tensors = [*self.model.parameters(), *self.model.buffers(), *tensors_of(batch)]
        sizes = dict(identity_of(part) for tensor in tensors for part in parts_of(tensor))
        existing = {"weights": sum(sizes.values()), "optimizer": state}
        gradients = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if accumulates else None
        if accumulates:
            existing["gradients"] = sum(parameter.nbytes for parameter in parameters)
        marks: list[tuple] = []

        def mark(kind, block=-1, inputs=()):
            pointers = [x.untyped_storage().data_ptr() for x in inputs if x.layout is torch.strided]
            with record_function(f"{_NAME}{len(marks)}"):
                marks.append((kind, block, pointers))

        os.environ.setdefault(*_QUIET)
        try:
            with unchanged(dict(self.model.named_modules()), tensors_of(batch)), measuring():
                with watched(blocks, mark), explained(batch):
                    with profile(profile_memory=True, use_kineto=True) as profiler:
                        with self.forward(batch, 0) as value:
                            mark(LOSS)
                            value.backward()
                        del value
                        self.wait()
            gradient = [
                torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in parameters
            ]
            dense = [p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse]
            pointers = {grad.untyped_storage().data_ptr() for grad in dense}
        finally:
            for parameter, before in zip(parameters, gradients, strict=True):
                parameter.grad = before
        return Timeline(existing, _happened(profiler, marks, self.device, pointers)), gradient


class _Allocation:
    role = TRANSIENT


def _happened(profiler, marks: list[tuple], device: torch.device, gradients: set[int]) -> list:
    """Return the events and marks of a profiled step in order. `gradients` has the pointers of gradients."""
    found = []
    nodes = list(profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes += node.children
        tag, fields = node.typed
        if tag.name == "Allocation" and fields.device.type == device.type:
            found.append((node.start_time_ns, fields.ptr, fields.alloc_size))
        elif node.name.startswith(_NAME):
            found.append((node.start_time_ns, None, int(node.name[len(_NAME) :])))
    found.sort(key=lambda one: one[0])
    living: dict[int, _Allocation] = {}
    happened: list[Event | Mark] = []
    for _, pointer, value in found:
        if pointer is None:
            kind, block, inputs = marks[value]
            keys = tuple(living[each] for each in inputs if each in living)
            happened.append(Mark(kind, block, keys))
        elif value > 0:
            living[pointer] = _Allocation()
            happened.append(Event(living[pointer], value))
        elif pointer in living:  # else the memory existed before the step
            happened.append(Event(living.pop(pointer), value))
    for pointer in gradients & living.keys():
        living[pointer].role = "gradients"
    return happened


class CompiledSteps:
    """The model as torch.compile compiles it, with exact saved tensors: the reference of candidates that compile.

    Args:
        steps: The copy of the model.
        candidates: The candidates that compile, with the same arguments for torch.compile.

    Attributes:
        saved_bytes: The bytes that one forward pass saves for the backward pass.
        seconds: The durations of the forward and backward passes, in seconds.
    """

    def __init__(self, steps: RealSteps, batch, candidates: list[Candidate]):
        settings = [
            {name: value for name, value in each.options.items() if name not in _OF_FEWBIT}
            for each in candidates
        ]
        for other in settings:
            if other != settings[0]:
                raise InputError(
                    "candidates: expected the same arguments of torch.compile in all with the method compile, "
                    f"got {settings[0]} and {other}"
                )
        steps.restore()
        with naming(candidates[0]):
            compile_in_place(steps.model, overrides={"": None}, **settings[0])
        self._code = steps.code
        self.saved_bytes = steps.saved_bytes(batch)
        self.seconds = []

    def gradient(self, steps: RealSteps, batch, number: int) -> list[torch.Tensor]:
        """Return the gradients of a pass."""
        steps.restore()
        steps.code = self._code
        found = steps.gradient(batch, number)
        self.seconds.append(steps.seconds)
        return found


@contextmanager
def naming(candidate: Candidate):
    """Return a context manager that adds the candidate's name to errors."""
    try:
        yield
    except (InputError, TypeError) as error:
        name = f"{candidate.policy}, {candidate.label}"
        raise InputError(f"candidates: {name}: {error}") from error
