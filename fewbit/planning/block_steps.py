"""Training steps with given settings of the blocks, on real or on fake tensors."""

from __future__ import annotations

import math
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fewbit.analysis.gradients import difference, explained, squared, tensors_of
from fewbit.analysis.unchanged import unchanged
from fewbit.errors import FewbitError, InputError
from fewbit.planning.all_ranks import ALONE, FSDP, Processes
from fewbit.planning.block_settings import Settings
from fewbit.planning.fake_steps import FakeTraining, loss_of_output
from fewbit.planning.real_steps import RealSteps
from fewbit.planning.sharding import ShardedWeights
from fewbit.planning.timeline import ENTER, STEP, Timeline
from fewbit.planning.watching import watched
from fewbit.runtime.saved.context import measuring


@contextmanager
def _noting(settings: Settings):
    """Return a context manager that adds to the user's exceptions which step raised them."""
    try:
        yield
    except FewbitError:
        raise
    except Exception as error:
        error.add_note(
            f"raised in a training step in which fewbit.fit_ examined the model ({settings.name}); the model is unchanged"
        )
        raise


class OptimizerBytes:
    """The memory of an optimizer in bytes, measured in steps on fake tensors.

    Attributes:
        weights: All parameters.
        gradients: The gradients of all parameters.
        step: All that exists during its step, without the state: weights, gradients, temporary tensors.
    """

    def __init__(self, model: nn.Module, optimizer, on_gpu: bool):
        def loss(model, _):
            parameters = [p for p in model.parameters() if p.requires_grad]
            return sum(p.sum().float() for p in parameters)

        training = FakeTraining(model, lambda copy: None, loss, optimizer, on_gpu)
        training.step(())
        most = training.step(()).peak(STEP).size
        self.name = training.optimizer_name
        self.state, self.gradients = training.state_bytes, training.gradient_bytes
        self.step = most - self.state
        self.weights = sum(p.nbytes for p in model.parameters())

    def update(self, sample, processes: Processes = ALONE, part: float = 1.0) -> int:
        """Return the bytes of one process during the optimizer's step with this part of a batch."""
        whole = self.step + self.state + processes.buckets(self.gradients)
        batch = sum(tensor.nbytes for tensor in tensors_of(sample))
        return whole // processes.shards + math.ceil(part * batch)


class _OfProcess:
    """Computes the timeline of one process from that of the whole model."""

    def __init__(self, model, blocks, memory: OptimizerBytes, accumulates, processes: Processes):
        self._buckets, self._accumulates = processes.buckets(memory.gradients), accumulates
        self._sharded = None
        if processes.kind == FSDP:
            self._sharded = ShardedWeights(model, blocks, memory, processes)

    def __call__(self, whole: Timeline) -> Timeline:
        if self._sharded is not None:
            return self._sharded.timeline(whole, self._accumulates)
        return Timeline({**whole.existing, "buckets": self._buckets}, whole.happened)


class RealBlockSteps(RealSteps):
    """Steps of the model itself. Its parameters, gradients and buffers do not change.

    Args:
        model, blocks, sample, loss: as in `examine`.
        memory: the bytes of the optimizer.
        accumulates: whether gradients exist before the step.
    """

    def __init__(
        self, model, blocks, sample, loss, memory: OptimizerBytes, accumulates: bool, processes: Processes
    ):  # fmt: skip
        super().__init__(model, loss or loss_of_output, 0)
        self.blocks, self.sample = list(blocks), sample
        self._latest: list[torch.Tensor] = []
        self._exact: list[torch.Tensor] = []
        # Processes with shards accumulate these, and for a moment have a whole gradient of one batch.
        self._step = memory.state, accumulates and processes.kind != FSDP
        self._of_process = _OfProcess(model, self.blocks, memory, accumulates, processes)

    def timeline_of(self, settings: Settings, always: bool = False) -> Timeline:
        """Return the timeline of a step. `always` is that of `Settings.apply`."""
        controller = settings.apply(self.model, always)
        with _noting(settings):
            found, latest = self.timeline(self.sample, self.blocks, *self._step)
        # Without the context of compress_, regions draw seeds from torch's generator, and dropout draws other masks.
        self._latest = latest if controller is not None else []
        return self._of_process(found)

    def error(self) -> float:
        """Return |g^ - g|^2 / |g|^2 with the latest gradient g^, and the gradient g of the first call.

        NaN if dropout had other masks in the latest step.

        Raises:
            InputError: g is 0 or not finite.
        """
        latest, self._latest = self._latest, []
        if not latest:
            return math.nan
        self._exact = self._exact or latest
        square = squared(self._exact)
        if not square > 0 or not math.isfinite(square):
            raise InputError(
                f"loss: expected a gradient that is finite and not 0, got |g|^2 = {square}"
            )
        return squared(difference(latest, self._exact)) / square

    def timed(self) -> tuple[float, np.ndarray]:
        """Return the seconds of a step, and of the forward passes of the blocks, (blocks,)."""
        begun, seconds = {}, np.zeros(len(self.blocks))

        def mark(kind, block, _):
            self.wait()
            if kind == ENTER:
                begun[block] = self.clock()
            elif block in begun:
                seconds[block] = self.clock() - begun.pop(block)

        with measuring(), watched(self.blocks, mark):
            self.gradient(self.sample, 0)
        return self.seconds, seconds


class FakeBlockSteps:
    """Steps of copies of the model on fake tensors, with the arguments of `RealBlockSteps`.

    Args:
        on_gpu: whether attention takes the memory that it takes on a GPU.
    """

    def __init__(self, model, paths, sample, loss, memory, accumulates, processes, on_gpu):
        self._model, self._paths, self._sample, self._loss = model, list(paths), sample, loss
        self._state, self._on_gpu = memory.state, on_gpu
        self._accumulates = accumulates and processes.kind != FSDP
        blocks = [model.get_submodule(path) for path in paths]
        self._of_process = _OfProcess(model, blocks, memory, accumulates, processes)

    def timeline_of(self, settings: Settings, samples: int | None = None) -> Timeline:
        """Return the timeline of a step, with another number of samples if given."""
        training = self._training(settings.apply)
        blocks = [training.model.get_submodule(path) for path in self._paths]
        with _noting(settings), unchanged({}, []), measuring(), explained(self._sample):
            found = training.step(
                self._sample, blocks, updates=False, accumulates=self._accumulates, size=samples
            )
        found.existing = {**found.existing, "optimizer": self._state}
        return self._of_process(found)

    def error(self) -> float:
        """Return NaN, because values are not known."""
        return math.nan

    def _training(self, convert) -> FakeTraining:
        return FakeTraining(self._model, convert, self._loss, torch.optim.SGD, self._on_gpu)

    def forward_seconds(self, costs) -> np.ndarray:
        """Return the times of the blocks' forward passes by costs of a device, (blocks,)."""
        training = self._training(lambda copy: None)
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
