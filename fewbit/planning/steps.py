"""The passes of a copy of the model that `fewbit.plan` measures: with a candidate, without one, and compiled."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

from fewbit.analysis.gradients import Loss, Measured
from fewbit.analysis.meter import saved_bytes
from fewbit.checkpointing import CHECKPOINTING
from fewbit.compiler.compiling import compile_in_place
from fewbit.convert.swap import restore_
from fewbit.errors import InputError
from fewbit.planning.candidates import Candidate
from fewbit.planning.loss import FewBitLoss

_OF_FEWBIT = "layers", "overrides"
"""The options of candidates that compile which are fewbit's; it passes all others on to torch.compile."""


class Steps(Measured):
    """A copy of the model whose passes are timed.

    Attributes:
        seconds: The duration of the latest forward and backward pass, in seconds.
        loss_bits: The bits with which the loss function's cross-entropy saves probabilities. None: torch's
            cross-entropy.
        passes: The number of passes with `loss_bits` so far.
    """

    seconds = math.nan
    loss_bits = None
    passes = 0

    def __init__(self, model: nn.Module, loss: Loss, seed: int):
        super().__init__(model, loss, seed)
        self._checkpoints = {
            module: {name: vars(module)[name] for name in CHECKPOINTING if name in vars(module)}
            for module in model.modules()
            if hasattr(module, CHECKPOINTING[0])
        }

    def restore(self) -> None:
        """Undo what a candidate has changed in the model."""
        restore_(self.model)
        self.code = None
        self.loss_bits = None
        for module, values in self._checkpoints.items():
            # Without an attribute of its own, a layer has that of its class.
            for name in CHECKPOINTING:
                vars(module).pop(name, None)
            vars(module).update(values)

    @property
    def code(self):
        """The compiled code that calls of the model run; None if the model is not compiled."""
        return self.model._compiled_call_impl

    @code.setter
    def code(self, code) -> None:
        self.model._compiled_call_impl = code

    def value(self, batch) -> torch.Tensor:
        """Return the loss of a batch, as `Measured.value` does, and start the clock."""
        self._wait()
        self._started = time.perf_counter()
        with self._loss_mode():
            return super().value(batch)

    def saved_bytes(self, batch) -> int:
        """Return the bytes that one forward pass saves for the backward pass."""
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
        """Return the gradients, as `Measured.backward` does, and stop the clock."""
        found = super().backward(value, again)
        self._wait()
        self.seconds = time.perf_counter() - self._started
        return found

    def _wait(self) -> None:
        for device in {parameter.device for parameter in self.parameters}:
            if device.type not in ("cpu", "meta"):
                torch.get_device_module(device).synchronize(device)


class CompiledSteps:
    """The model as torch.compile compiles it, with exact saved tensors: the reference of candidates that compile.

    Compiled code draws other dropout masks than the model itself, and which masks it draws depends on the backend.

    Args:
        steps: The copy of the model.
        batch: The first batch.
        candidates: The candidates that compile. The arguments that they pass on to torch.compile must be the same.

    Attributes:
        saved_bytes: The bytes that one forward pass saves for the backward pass.
        seconds: The durations of the forward and backward passes, in seconds.
    """

    def __init__(self, steps: Steps, batch, candidates: list[Candidate]):
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

    def gradient(self, steps: Steps, batch, number: int) -> list[torch.Tensor]:
        """Return the gradients of a pass, as `Measured.gradient` does."""
        steps.restore()
        steps.code = self._code
        found = steps.gradient(batch, number)
        self.seconds.append(steps.seconds)
        return found


@contextmanager
def naming(candidate: Candidate):
    """Return a context manager that adds the candidate's name to errors about its arguments."""
    try:
        yield
    except (InputError, TypeError) as error:
        name = f"{candidate.policy}, {candidate.label}"
        raise InputError(f"candidates: {name}: {error}") from error
