"""Training steps of a model with given settings, on real or on fake tensors, of which `fewbit.fit_` needs the bytes.

A real step is recorded by torch's profiler, which sees all allocations on the device, also those inside of kernels. A fake
step runs a copy of the model on fake tensors, as `fewbit.fits` does, and sees the tensors that operations return.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from fewbit.analysis.gradients import Measured, explained, tensors_of
from fewbit.analysis.meter import identity_of, parts_of
from fewbit.analysis.unchanged import unchanged
from fewbit.fitting.settings import Settings
from fewbit.fitting.timeline import ENTER, LOSS, Event, Mark, Timeline
from fewbit.fitting.watching import watched
from fewbit.planning.training_step import FakeTraining, loss_of_output
from fewbit.runtime.saved.context import measuring

_NAME = "fewbit.mark:"
_QUIET = "KINETO_LOG_LEVEL", "6"
"""The variable, and its value, with which torch's profiler prints no lines of its own."""


class OptimizerBytes:
    """The memory of an optimizer, measured in steps on fake tensors.

    Attributes:
        name: The class name of the optimizer.
        state: The bytes of the optimizer's state.
        gradients: The bytes of the gradients of all parameters.
        step: The bytes that exist during the optimizer's step, without the state: weights, gradients, temporary tensors.
    """

    def __init__(self, model: nn.Module, optimizer, on_gpu: bool):
        def loss(model, _):
            parameters = [p for p in model.parameters() if p.requires_grad]
            return sum(p.sum().float() for p in parameters)

        training = FakeTraining(model, lambda copy: None, loss, optimizer, on_gpu)
        training.step(())
        found = training.step(())
        self.name = training.optimizer_name
        self.state, self.gradients = training.state_bytes, found.gradients
        self.step = training.update_peak - self.state

    def update(self, sample) -> int:
        """Return the bytes that exist during the optimizer's step of a training with this batch."""
        return self.step + self.state + sum(tensor.nbytes for tensor in tensors_of(sample))


class RealSteps:
    """Steps of the model itself, on its device. The model's parameters, gradients and buffers do not change.

    Args:
        model: the model.
        blocks: its blocks.
        sample: the batch.
        loss: called as loss(model, batch); returns a scalar tensor.
        state: the bytes of the optimizer's state.
        accumulates: whether gradients exist before the step.

    Attributes:
        gradient: the gradient of the latest step of `timeline`, a list of tensors.
    """

    gradient: list[torch.Tensor] | None = None

    def __init__(self, model, blocks, sample, loss, state: int, accumulates: bool):
        self.model, self.blocks, self.sample = model, list(blocks), sample
        self.loss = loss or loss_of_output
        self.device = next(model.parameters()).device
        self._accumulates = accumulates
        tensors = [*model.parameters(), *model.buffers(), *tensors_of(sample)]
        sizes = dict(identity_of(part) for tensor in tensors for part in parts_of(tensor))
        self._existing = sum(sizes.values()) + state
        self.measured = Measured(model, self.loss, 0)

    def timeline(self, settings: Settings, always: bool = False) -> Timeline:
        """Apply settings to the model, run one step, and return its timeline. `always` is that of `Settings.apply`."""
        # Without the context of compress_, regions draw seeds from torch's generator, and dropout draws other masks.
        settings.apply(self.model, always)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        gradients = [p.grad for p in parameters]
        existing = self._existing
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if self._accumulates else None
            existing += parameter.nbytes if self._accumulates else 0
        marks: list[tuple] = []

        def mark(kind, block=-1, inputs=()):
            pointers = [x.untyped_storage().data_ptr() for x in inputs if x.layout is torch.strided]
            with record_function(f"{_NAME}{len(marks)}"):
                marks.append((kind, block, pointers))

        os.environ.setdefault(*_QUIET)
        activities = [ProfilerActivity.CPU]
        try:
            with unchanged(dict(self.model.named_modules()), tensors_of(self.sample)), measuring():
                with watched(self.blocks, mark), explained(self.sample):
                    with profile(
                        activities=activities, profile_memory=True, acc_events=True
                    ) as profiler:
                        with self.measured.forward(self.sample, 0) as value:
                            mark(LOSS)
                            value.backward()
                        del value
                        self.wait()
            self.gradient = [
                torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in parameters
            ]
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        happened = _happened(profiler, marks, self.device)
        return Timeline(existing, happened)

    def wait(self) -> None:
        """Wait until the device has done all work."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)


def _happened(profiler, marks: list[tuple], device: torch.device) -> list:
    """Return the events and marks of a profiled step in their order."""
    found = []
    nodes = list(profiler.profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes += node.children
        tag, fields = node.typed
        if tag.name == "Allocation" and fields.device.type == device.type:
            found.append((node.start_time_ns, fields.ptr, fields.alloc_size))
        elif node.name.startswith(_NAME):
            found.append((node.start_time_ns, None, int(node.name[len(_NAME) :])))
    found.sort(key=lambda one: one[0])
    living, happened = {}, []
    for number, (_, pointer, value) in enumerate(found):
        if pointer is None:
            kind, block, inputs = marks[value]
            keys = tuple(living[each] for each in inputs if each in living)
            happened.append(Mark(kind, block, keys))
        elif value > 0:
            living[pointer] = number
            happened.append(Event(number, value))
        elif pointer in living:  # else the memory existed before the step
            happened.append(Event(living.pop(pointer), value))
    return happened


class FakeSteps:
    """Steps of copies of the model on fake tensors.

    Args:
        model, sample, loss, state, accumulates: as in `RealSteps`.
        paths: the paths of the blocks.
        on_gpu: whether attention takes the memory that it takes on a GPU.
        gradients: the bytes of all gradients.
    """

    def __init__(self, model, paths, sample, loss, state, accumulates, on_gpu, gradients):
        self._model, self._paths, self._sample, self._loss = model, list(paths), sample, loss
        self._extra = state + (gradients if accumulates else 0)
        self._on_gpu = on_gpu

    def timeline(self, settings: Settings) -> Timeline:
        """Apply settings to a copy of the model, run one step, and return its timeline."""
        training = FakeTraining(
            self._model, settings.apply, self._loss, torch.optim.SGD, self._on_gpu
        )
        tracker = training.tracker
        blocks = [training.model.get_submodule(path) for path in self._paths]
        marks: list[tuple[int, Mark]] = []

        def mark(kind, block=-1, inputs=()):
            marks.append((tracker.moment, Mark(kind, block, tuple(tracker.keys_of(inputs)))))

        existing = tracker.total() + self._extra
        with unchanged({}, []), measuring(), watched(blocks, mark), explained(self._sample):
            events = training.events(self._sample, lambda: mark(LOSS))
        events = [Event(*one) for one in events]
        happened, position = [], 0
        for moment, one in marks:
            happened += events[position:moment]
            happened.append(one)
            position = moment
        return Timeline(existing, happened + events[position:])

    def forward_seconds(self, costs) -> np.ndarray:
        """Return the times of the forward passes of the blocks that costs of a device imply, (blocks,)."""
        training = FakeTraining(self._model, lambda copy: None, self._loss, torch.optim.SGD, False)
        counted, begun = np.zeros(len(self._paths)), {}
        blocks = [training.model.get_submodule(path) for path in self._paths]
        counter = FlopCounterMode(display=False)

        def mark(kind, block, _):
            if kind == ENTER:
                begun[block] = counter.get_total_flops()
            elif block in begun:
                counted[block] = counter.get_total_flops() - begun.pop(block)

        with unchanged({}, []), watched(blocks, mark), explained(self._sample):
            training.forward(self._sample, counter)
        return counted * costs.per_flop
