"""`fewbit.plan`: the saved bytes and gradient errors of several settings of `compress_`, measured before a long run.

With the exact gradient g of a batch and the gradient g^ of the same batch with a setting, the error of the setting is

    error = E|g^ - g|^2 = variance + |bias|^2.

It is compared with the variance of g between minibatches (ActNN, section 3.2), because |g|^2 differs much more from batch to batch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from fewbit.analysis.gradients import (
    CHUNKS,
    batches_of,
    check_count,
    check_loss,
    check_model,
    copied,
    difference,
    sampling_of,
    size_of,
    squared,
    tensors_of,
)
from fewbit.analysis.progress import StepsProgress
from fewbit.analysis.unchanged import alone, unchanged
from fewbit.errors import InputError
from fewbit.planning.candidates import (
    CROSS_ENTROPY,
    Candidate,
    check_candidates,
    default_candidates,
)
from fewbit.planning.real_steps import CompiledSteps, RealSteps, naming
from fewbit.planning.training_plan import Planned, TrainingPlan
from fewbit.runtime.saved.context import measuring
from fewbit.sizes import counted

ADAPTING_STEPS = 3
"""The steps before a candidate whose bits adapt is measured: two measured ones, and one that chooses."""

LARGE = 0.9
""""cross-entropy" is a default if it saves at most this part of the bytes of "fixed"."""


def plan(
    model: nn.Module,
    batch: object,
    loss: Callable[[nn.Module, object], torch.Tensor],
    *,
    candidates: Iterable[Candidate] | None = None,
    share: float = 0.1,
    draws: int = 2,
    chunks: int = CHUNKS,
    seed: int = 0,
    progress: bool = True,
) -> TrainingPlan:
    """Measure saved bytes and gradient errors for settings of `compress_` before a long run, and recommend a setting.

    The model and torch's random state do not change. With bits that adapt during training (`AdaptiveBits`, `ErrorBound`), three steps without
    an update of the weights come first. Each candidate takes about draws * batches forward and backward passes, and the memory of a copy of
    the model and of three gradients.

    Args:
        model: A model in training mode, compressed already or not.
        batch: A tensor, or a tuple or mapping of tensors, with samples in dimension 0. A list, or another iterable, is
            several batches: 4 or more show how errors differ. Give several if the model has batch norm: parts of a single
            batch have batch statistics of their own, so the variance between minibatches would be too large.
        loss: Called as ``loss(model, batch)`` with a copy of the model. It returns a scalar tensor, the mean of the
            loss over the samples, such as ``lambda model, batch: cross_entropy(model(batch[0]), batch[1])``.
        candidates: The settings to measure: as `fewbit.fits` takes them, or names such as "fixed"
            (docs/guides/plan.md). By default `default_candidates(model)`, and those of "cross-entropy" if the
            loss function itself calls cross_entropy and they save at least 10 % fewer bytes than those of "fixed".
        share: The largest error with which a candidate may be recommended, as a multiple of the variance between
            minibatches.
        draws: The number of passes with independent rounding for each candidate and batch, at least 2.
        chunks: The number of equal parts of a single batch from which the variance between minibatches is estimated, an
            even number of at least 4.
        seed: The seed of the rounding and of dropout. All passes over a batch have the same dropout.
        progress: Whether to show a bar on standard error after two seconds, or lines every 15 seconds in a file or a pipe.

    Raises:
        InputError: A setting is not valid, the model is in evaluation mode or cannot be copied, or the batch or the
            loss cannot be used.
    """
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    if not is_number or not 0 < share < math.inf:
        raise InputError(f"share: expected a finite number above 0, got {share!r}")
    check_count("draws", draws, 2)
    check_count("chunks", chunks, 4, even=True)
    check_count("seed", seed, 0)
    check_model(model)
    check_loss(loss)
    # If batches are parts of a larger tensor, the meter would count the larger tensor.
    batches = [tree_map(alone, one) for one in batches_of(batch)]
    bar = StepsProgress("plan", progress)
    with unchanged(dict(model.named_modules()), tensors_of(batches)):
        steps = RealSteps(copied(model), loss, seed)
        steps.restore()
        if candidates is not None:
            candidates = check_candidates(candidates, model=steps.model)
        else:
            candidates = default_candidates(steps.model)
            if _has_large_logits(steps, batches[0]):
                candidates += default_candidates(steps.model, [CROSS_ENTROPY])
        sampling, sampled = sampling_of(steps, batch, batches, chunks)
        exact_bytes = steps.saved_bytes(batches[0])
        with bar.shown():
            done = partial(bar.step, len(candidates) * (1 + len(batches) * draws))
            compiling = [each for each in candidates if each.method == "compile"]
            compiled = CompiledSteps(steps, batches[0], compiling) if compiling else None
            found = [_Found(candidate, steps, batches, done) for candidate in candidates]
            squares, seconds = _passes(steps, batches, found, draws, compiled)
    variances = sampling.sum(1)
    return TrainingPlan(
        model=type(model).__name__,
        device=_device_of(steps),
        batches=len(batches),
        batch_size=size_of(batches[0]),
        draws=draws,
        share=share,
        exact_bytes=exact_bytes,
        exact_seconds=statistics.median(seconds),
        exact_seconds_least=min(seconds),
        exact_seconds_most=max(seconds),
        compiled_bytes=None if compiled is None else compiled.saved_bytes,
        compiled_seconds=None if compiled is None else statistics.median(compiled.seconds),
        gradient=float(np.mean(squares)),
        sampling=float(variances.mean()),
        sampling_error=_standard_error(variances),
        sampled=sampled,
        rows=tuple(candidate.planned() for candidate in found),
    )


# -- Measuring -----------------------------------------------------------------------------------------------


class _Found:
    """The measurements of one candidate. The constructor lets a candidate whose bits adapt choose them."""

    def __init__(self, candidate: Candidate, steps: RealSteps, batches: list, done):
        self.candidate = candidate
        self.errors = []  # (draws,) for each batch: |g^ - g|^2
        self.sums = []  # for each batch: |sum over draws of (g^ - g)|^2
        self.seconds = []
        self._code = None
        controller = self._apply(steps)
        self._state = {} if controller is None else controller.state_dict()
        if self._state:
            for step in range(ADAPTING_STEPS):
                number = step % len(batches)
                steps.gradient(batches[number], number)
            self._state = controller.state_dict()
            controller.load_state_dict(self._state)
        self.saved_bytes = steps.saved_bytes(batches[0])
        self._code = steps.code
        self._done = done
        done()

    def _apply(self, steps):
        steps.restore()
        if self._code is not None:
            steps.code = self._code
            return None
        if self.candidate.method == "cross_entropy":
            steps.loss_bits = self.candidate.bits.bits
        with naming(self.candidate):
            return self.candidate.apply(steps.model)

    def measure(self, steps: RealSteps, batch, number: int, exact, draws: int) -> None:
        controller, total, errors = self._apply(steps), None, []
        if self._state:
            controller.load_state_dict(self._state)
        for draw in range(draws):
            if controller is not None:
                controller.context.salt = draw.to_bytes(8)
            with measuring():
                error = difference(steps.gradient(batch, number), exact)
            # The first pass is not timed. From the second on, layers make some copies in the same pass as activations.
            if draw:
                self.seconds.append(steps.seconds)
            errors.append(squared(error))
            total = (
                error if total is None else [a.add_(b) for a, b in zip(total, error, strict=True)]
            )
            self._done()
        self.errors.append(errors)
        self.sums.append(squared(total))

    def planned(self) -> Planned:
        errors, sums = np.array(self.errors), np.array(self.sums)
        batches, draws = errors.shape
        # Half the mean squared difference of two draws, over all pairs.
        variances = (errors.sum(1) - sums / draws) / (draws - 1)
        biases = (sums - errors.sum(1)) / (draws * (draws - 1))
        # With a single batch the standard error of `error` comes from the draws, and that of `variance` is unknown.
        alike = errors.mean(1) if batches > 1 else errors[0]
        return Planned(
            self.candidate,
            self.saved_bytes,
            float(errors.mean()),
            _standard_error(alike),
            float(variances.mean()),
            _standard_error(variances),
            float(biases.mean()),
            statistics.median(self.seconds),
            min(self.seconds),
            max(self.seconds),
        )


def _passes(
    steps: RealSteps, batches, found: list[_Found], draws: int, compiled: CompiledSteps | None
) -> tuple[list, list]:
    """Measure all candidates batch by batch. Return |g|^2 of each batch, and the seconds of exact passes.

    So the passes of each candidate are spread over the whole time.
    """
    squares, seconds = [], []
    for number, batch in enumerate(batches):
        steps.restore()
        exact = steps.gradient(batch, number)
        seconds.append(steps.seconds)
        squares.append(squared(exact))
        if not squares[-1] > 0 or not math.isfinite(squares[-1]):
            raise InputError(
                f"loss: expected a gradient that is finite and not 0, got |g|^2 = {squares[-1]} in batch {number}"
            )
        exact_compiled = None if compiled is None else compiled.gradient(steps, batch, number)
        for each in found:
            reference = exact_compiled if each.candidate.method == "compile" else exact
            each.measure(steps, batch, number, reference, draws)
        if compiled is not None:
            compiled.gradient(steps, batch, number)
        steps.restore()
        steps.gradient(batch, number)
        seconds.append(steps.seconds)
    return squares, seconds


def _has_large_logits(steps: RealSteps, batch) -> bool:
    """Return whether the loss function calls cross_entropy, and saves many fewer bytes with fewbit's."""
    sizes = []
    for policy in ("fixed", CROSS_ENTROPY):
        candidate = default_candidates(steps.model, [policy])[-1]
        steps.restore()
        candidate.apply(steps.model)
        steps.loss_bits = candidate.bits.bits if policy == CROSS_ENTROPY else None
        sizes.append(steps.saved_bytes(batch))
    steps.restore()
    return sizes[1] < LARGE * sizes[0]


def _standard_error(values: np.ndarray) -> float:
    count = len(values)
    return float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan


def _device_of(steps: RealSteps) -> str:
    devices = sorted({str(parameter.device) for parameter in steps.parameters})
    threads = f", {counted(torch.get_num_threads(), 'thread')}" if devices == ["cpu"] else ""
    return ", ".join(devices) + threads
