"""`fewbit.fit_`: the fastest training of a model that fits in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import copy
from functools import cached_property, partial

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from fewbit.analysis.gradients import (
    check_loss,
    check_model,
    check_optimizer,
    size_of,
    tensors_of,
    with_dict,
)
from fewbit.analysis.unchanged import alone, unchanged
from fewbit.checkpointing import CHECKPOINTING, uncheckpoint_
from fewbit.config import check_verbose
from fewbit.convert.chunked_loss import unchunk_loss_
from fewbit.convert.swap import restore_
from fewbit.convert.undo import whole_or_not_at_all
from fewbit.errors import InputError
from fewbit.planning.all_ranks import Processes
from fewbit.planning.block_settings import Rest, Settings
from fewbit.planning.block_steps import FakeBlockSteps, OptimizerBytes
from fewbit.planning.blocks import find_blocks
from fewbit.planning.choose import Choice, Part, choose, peak_of, totals
from fewbit.planning.compiled import in_eager_mode, uncompiled
from fewbit.planning.examination import Examination, examine, is_gpu
from fewbit.planning.fake_steps import own_loss
from fewbit.planning.fastest_fit import FastestFit, FrontPoint, parameters_of, rows_of
from fewbit.planning.fits import capacity_of
from fewbit.planning.sharding import mixed_precision
from fewbit.planning.shortage import fixed_shortage, shortage
from fewbit.printable import shorten
from fewbit.render import terminal
from fewbit.render.formats import module_name

ERROR = 0.1
"""The default bound of the error."""
TOLERANCE = 0.002
"""The part of the step's time by which the solver's result may be slower."""
SLOWER = 0.01
"""The part of an exact step's time that a smaller error may cost."""
NOISE = 1e-9
"""The error that may come from the order of floating-point sums."""
ATTEMPTS = 6
"""The most choices whose peak is measured, until one fits."""
POINTS, FEW_LABELS = 12, 300
"""The number of points of the front, and of labels with which the solver finds them."""


@whole_or_not_at_all
def fit_(
    model: nn.Module,
    sample,
    memory: str | int | torch.device,
    *,
    optimizer=torch.optim.AdamW,
    loss: Callable | None = None,
    error: float = ERROR,
    blocks: str | Iterable[str] | None = None,
    accumulates: bool = False,
    parallel=None,
    progress: bool = True,
    verbose: bool = True,
) -> FastestFit:
    """Choose what each block of a model saves so that a training step fits in memory in the least time, and apply it.

    A block is a repeated module, such as a layer of a transformer, with the options of docs/guides/fit.md. Their bytes,
    times and errors are measured in about 40 steps on the sample, then the peak of the choice. Weights, gradients and
    buffers of the model and torch's random state stay as they were. A model on the meta device, and one whose exact step
    takes more memory than the device has, is examined on fake tensors: times then follow from measured costs of the device,
    and errors are not known.

    Args:
        model: A model in training mode on the device on which it will be trained, before DDP and FSDP. Earlier
            conversions are undone. One that torch.compile has compiled is measured in eager mode, and compiled anew.
        sample: A batch of the size with which you will train, as `fewbit.fits` takes it.
        memory: A size such as "24 GiB", a number of bytes, or a device whose whole memory counts. It has to hold the weights,
            gradients, the optimizer's state, the batch and all tensors of a step. What the allocator adds is not counted.
        optimizer: As in `fewbit.fits`.
        loss: Called as ``loss(model, batch)``; returns a scalar tensor. Autocast belongs in here. None: the model's output is
            the loss, or has it as its attribute `loss`.
        error: The largest error of the gradient, |g^ - g|^2 / |g|^2, with the sample's exact gradient g and the gradient g^
            after the call.
        blocks: Glob patterns of the paths of the blocks. None: the modules of lists in which modules repeat.
        accumulates: Whether gradients of earlier batches exist when a step begins (gradient accumulation).
        parallel: "ddp" or "fsdp" if all processes of torch.distributed call `fit_` and then wrap the model: in
            DistributedDataParallel, or by `fully_shard` of each block and of the model. A MixedPrecisionPolicy stands for
            "fsdp" with this policy. The peak is then that of a process, and all processes take the same choice.
        progress: Whether to show a bar on standard error after two seconds.
        verbose: Whether to print the result.

    Returns:
        The choice: a table, which can be saved, loaded, applied to another model and pasted as plain calls.

    Raises:
        InputError: An argument is not valid, the step does not run, or no choice fits. The message then says what is missing,
            and what would help. The model stays unchanged after an exception or Ctrl-C.
    """
    check_verbose(verbose)
    capacity = capacity_of(memory, "memory")
    if capacity is None:
        raise InputError("memory: expected a size such as '24 GiB', got None")
    given, model = model, uncompiled(model)
    with in_eager_mode(model) if isinstance(model, nn.Module) else nullcontext() as compiled:
        check_model(model)
        result = _fitted(
            model, sample, capacity, optimizer, loss, error, blocks, accumulates, parallel, progress
        )
    if compiled or given is not model:
        result.notes += (
            "the model is compiled: bytes and times are those of eager mode, a compiled step may take more, and the next call compiles it anew",
        )
    if verbose:
        terminal.show(result)
    return result


def _fitted(
    model, sample, capacity: int, optimizer, loss, error, blocks, accumulates, parallel, progress
) -> FastestFit:
    """Check the arguments of `fit_`, choose settings of a model in eager mode, and apply them."""
    if loss is None:
        loss = own_loss
    check_loss(loss)
    check_optimizer(optimizer)
    is_number = isinstance(error, int | float) and not isinstance(error, bool)
    if not is_number or not error >= 0:
        raise InputError(f"error: expected a number of at least 0, got {shorten(error)}")
    if not isinstance(accumulates, bool):
        raise InputError(f"accumulates: expected True or False, got {shorten(accumulates)}")
    # The meter would count all of a tensor of which the sample is a slice.
    sample = tree_map(alone, with_dict(sample))
    if not size_of(sample, "sample"):
        raise InputError("sample: expected at least one sample, got none")
    processes = Processes.of(parallel)
    capacity = min(processes.all(capacity))
    _undo(model)
    regions = [path for path, one in model.named_modules() if getattr(one, CHECKPOINTING[0], False)]
    if regions:
        raise InputError(
            "model: expected one without gradient checkpointing, because fit_ chooses the blocks that are computed again, "
            f"got it in {module_name(regions[0])}; call model.gradient_checkpointing_disable()"
        )
    with unchanged(dict(model.named_modules()), tensors_of(sample)):
        result = _chosen(
            model,
            sample,
            capacity,
            optimizer,
            loss,
            error,
            blocks,
            accumulates,
            processes,
            progress,
        )
    result.controller = result.settings.apply(model)
    return result


def _undo(model) -> None:
    """Make a model exact."""
    uncheckpoint_(model)
    unchunk_loss_(model)
    restore_(model)


def _chosen(
    model, sample, capacity: int, optimizer, loss, error, blocks, accumulates, processes, progress
) -> FastestFit:
    on_gpu = is_gpu(next(model.parameters()).device)
    bytes_ = processes.together(partial(OptimizerBytes, model, optimizer, on_gpu))
    if max(processes.all(bytes_.update(sample, processes))) > capacity:
        raise InputError(fixed_shortage(bytes_, model, sample, capacity, processes))
    settings = {"accumulates": accumulates, "which": blocks, "progress": progress}
    look = partial(examine, model, sample, loss, bytes_, processes=processes, **settings)

    def on_fake_tensors() -> Examination:
        _undo(model)
        return look(is_real=False)

    def examined() -> Examination:
        try:
            return look()
        except (torch.OutOfMemoryError, MemoryError):
            return on_fake_tensors()

    with mixed_precision([*find_blocks(model, blocks).values(), model], processes.precision):
        found = processes.together(examined)
        are_measured = processes.all(found.is_measured)
        if any(are_measured) and not all(are_measured):
            first = found
            found = processes.together(lambda: on_fake_tensors() if first.is_measured else first)
        found.agree()
        search = Search(found, error)
        chosen = search.fastest(capacity)
        relaxed = None
        if chosen is None and found.is_measured:
            relaxed = Search(found, math.inf).fastest(capacity)
            if relaxed is not None and relaxed.error <= error:  # its predicted error was too large
                chosen = relaxed
        if chosen is None:
            steps = FakeBlockSteps(
                model, found.paths, sample, loss, bytes_, accumulates, processes, on_gpu
            )
            raise InputError(shortage(search, relaxed, model, sample, capacity, steps))
        return _result(search, chosen, model, sample, capacity)


class Chosen:
    """A choice, with the bytes, seconds and error that the examination gives for it.

    Attributes:
        rest: the option of the rest of the model.
        options: the numbers of the parts' options.
        seconds: the seconds that are added to an exact step, and `bound`, a lower bound for all choices that fit.
        error, peak: those of a step, as predicted. `Search.fastest` measures the peak, and the error if a layer has few bits.
    """

    def __init__(self, examination: Examination, rest, choice, parts):
        blocks = choice.options[1::2]
        options = [examination.options[number] for number in blocks]
        self.settings = Settings(dict(zip(examination.paths, options, strict=True)), *rest)
        self.rest, self.options = rest, choice.options
        self.seconds, self.bound = choice.seconds, choice.bound
        self.error = totals(parts, choice.options)[1]
        self.peak = max(peak_of(parts, choice.options), examination.update)

    def take(self, peak: float, error: float) -> None:
        """Take measurements in place of predictions."""
        self.peak = peak
        if error > NOISE:
            self.error = error


def least_error(parts: list[Part], memory: float, seconds: float) -> tuple[int, ...] | None:
    """Return options with about the least error that fit and take at most these seconds."""
    floors = [float(part.seconds.min()) for part in parts]
    swapped = [
        Part(part.saved, part.peak, part.error, part.seconds - floor)
        for part, floor in zip(parts, floors, strict=True)
    ]
    found = choose(swapped, memory, seconds - sum(floors), most=FEW_LABELS)
    return None if found is None else found.options


class Search:
    """Searches settings of an examined model, with `error` at most."""

    def __init__(self, examination: Examination, error: float):
        self.examination, self.error = examination, error
        self.parts = {rest: examination.parts(rest) for rest in examination.rest}
        exact = Choice((0,) * len(self.parts[Rest()]), 0.0, 0.0)
        self._exact = Chosen(examination, Rest(), exact, self.parts[Rest()])

    def solve(
        self, memory: float | dict, most: int | None = None, error: float | None = None
    ) -> Chosen | None:
        """Return the fastest choice by the examination, or None if no choice fits. `memory` may be {rest: memory}."""
        limits = memory if isinstance(memory, dict) else dict.fromkeys(self.parts, memory)
        tolerance = TOLERANCE * self.examination.exact.seconds
        if self._exact.peak <= limits[Rest()]:
            return copy(self._exact)  # no other choice is faster
        limit = self.error if error is None else error
        found = {}
        for rest, parts in self.parts.items():
            if self.examination.update > limits[rest]:
                continue
            choice = choose(parts, limits[rest], limit, tolerance, most)
            if choice is not None:
                found[rest] = choice
        if not found:
            return None
        rest = min(found, key=lambda rest: found[rest].seconds)
        calmer = least_error(
            self.parts[rest],
            limits[rest],
            found[rest].seconds + SLOWER * self.examination.exact.seconds,
        )
        bound = min(choice.bound for choice in found.values())
        chosen = found[rest]._replace(bound=bound)
        if calmer is not None:
            seconds, error = totals(self.parts[rest], calmer)
            if error < totals(self.parts[rest], chosen.options)[1]:
                chosen = chosen._replace(options=calmer, seconds=seconds)
        return Chosen(self.examination, rest, chosen, self.parts[rest])

    def fastest(self, memory: int) -> Chosen | None:
        """Return the fastest choice whose measured peak and error are allowed, or None."""
        limits, known, limit = dict.fromkeys(self.parts, float(memory)), {}, self.error
        for _ in range(ATTEMPTS):
            chosen = self.solve(limits, error=limit)
            if chosen is None:
                break
            key = chosen.rest, chosen.options
            if key not in known:
                known[key] = self.examination.measured(chosen.settings)
            predicted, expected = chosen.peak, chosen.error
            chosen.take(*known[key])
            if chosen.peak <= memory and chosen.error <= self.error:
                return chosen
            if chosen.peak > memory:
                # Bytes that the parts do not explain count as if they were always there, with this rest.
                over = max(chosen.peak - memory, memory / 2048)
                limits[chosen.rest] = min(limits[chosen.rest], predicted) - over
            if chosen.error > self.error:
                limit = 0.9 * min(limit, expected) * self.error / chosen.error
        kept = [one for one in self._smallest if one.peak <= memory and one.error <= self.error]
        return min(kept, key=lambda one: one.seconds, default=None)

    def smallest(self) -> Chosen | None:
        """Return the choice with about the smallest peak, which is measured, or None."""
        return min(self._smallest, key=lambda one: one.peak, default=None)

    @cached_property
    def _smallest(self) -> list[Chosen]:
        """For each option of the rest, the measured choice with about the smallest peak."""
        found = [one for rest in self.parts if (one := self.least(rest=rest)) is not None]
        for one in found:
            one.take(*self.examination.measured(one.settings))
        return found

    def least(self, rest: Rest | None = None) -> Chosen | None:
        """Return the choice with about the smallest predicted peak, with this rest if given, or None."""
        others = {} if rest is None else dict.fromkeys(self.parts.keys() - {rest}, 0.0)
        high = 2 * max(self.examination.exact.bytes.peak.max(), self.examination.update)
        low, best = self.examination.update - 1, self._within(high, others)
        if best is None:
            return None
        while best.peak - low > 0.005 * best.peak:
            middle = (low + best.peak) / 2
            found = self._within(middle, others)
            if found is None:
                low = middle
            else:
                best = found
        return best

    def _within(self, memory: float, others: dict) -> Chosen | None:
        return self.solve(dict.fromkeys(self.parts, memory) | others, FEW_LABELS)

    def front(self, chosen: Chosen) -> list[FrontPoint]:
        """Return choices with more and with less memory, by ascending peak."""
        exact = self.examination.exact
        most = max(float(exact.bytes.peak.max()), self.examination.update)
        least = self.least()
        low = chosen.peak if least is None else least.peak
        points = {}
        for memory in np.geomspace(low * 1.0001, max(most, low) * 1.0001, POINTS):
            one = self.solve(float(memory), FEW_LABELS)
            if one is not None:
                seconds = exact.seconds + one.seconds
                points[one.peak] = FrontPoint(int(one.peak), seconds, one.error)
        found: list[FrontPoint] = []
        for point in (points[peak] for peak in sorted(points)):
            if not found or point.seconds < found[-1].seconds:
                found.append(point)
        return found


def _result(search: Search, chosen: Chosen, model, sample, capacity) -> FastestFit:
    found = search.examination
    exact = found.exact
    notes = []
    if found.repeated:
        notes.append(
            f"{', '.join(found.repeated[:3])}: called several times in a forward pass, so it counts as a part of the rest"
        )
    if not found.paths:
        notes.append(
            "no blocks were found, so all layers have the same bits: name blocks, as blocks='encoder.*'"
        )
    for error in dict.fromkeys(found.failing.values()):
        names = [name for name, one in found.failing.items() if one == error]
        notes.append(f"{' and '.join(names)}: not considered, because a step raises {error}")
    if not found.is_measured:
        notes.append(
            "nothing was run: times follow from measured costs of this device, and errors are not known"
        )
    return FastestFit(
        model=type(model).__name__,
        optimizer=found.optimizer.name,
        batch=size_of(sample),
        memory=capacity,
        peak=int(chosen.peak),
        seconds=exact.seconds + chosen.seconds,
        bound=exact.seconds + min(chosen.bound, chosen.seconds),
        error=chosen.error if found.is_measured else math.nan,
        limit=search.error,
        exact_peak=int(max(exact.bytes.peak.max(), found.update)),
        exact_seconds=exact.seconds,
        settings=chosen.settings,
        rows=rows_of(chosen.settings, search.parts[chosen.rest], chosen.options),
        front=tuple(search.front(chosen)),
        notes=tuple(notes),
        parameters=parameters_of(model),
    )
