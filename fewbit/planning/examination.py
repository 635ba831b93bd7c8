"""The examination of a model: bytes, seconds and error of every option of every block."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from fewbit.analysis.progress import StepsProgress
from fewbit.convert.chunked_loss import head_of
from fewbit.errors import FewbitError, InputError
from fewbit.planning.all_ranks import ALONE, Processes
from fewbit.planning.block_settings import (
    BITS_OF_REST,
    EXACT,
    OFFLOADED,
    OPTIONS,
    RECOMPUTED,
    Option,
    Rest,
    Settings,
    everywhere,
)
from fewbit.planning.block_steps import FakeBlockSteps, OptimizerBytes, RealBlockSteps
from fewbit.planning.blocks import find_blocks
from fewbit.planning.choose import Part
from fewbit.planning.costs import costs_of
from fewbit.planning.timeline import PartBytes
from fewbit.printable import one_line
from fewbit.runtime.interop.module_calls import class_of

ROUNDS = 3
"""The number of times that each setting is timed."""
LONGEST = 90.0
"""The seconds after which no further round begins."""
PROBES = 4
"""The number of blocks in which an option's error is measured alone."""
ALIKE = 0.02
"""The relative difference of saved bytes up to which blocks of one class are alike."""
TIMED_BITS, LEAST_BITS = 4, 2
"""The bits whose times are measured. Those of others follow from the first, and from costs."""
EXACT_ARM = "blocks", EXACT
TIMED = (
    EXACT_ARM,
    ("blocks", Option(TIMED_BITS)),
    ("blocks", Option(LEAST_BITS)),
    ("blocks", RECOMPUTED),
    ("rest", Rest(TIMED_BITS)),
)
LEAST_GAIN = 0.01
"""The least part of the bytes during the loss by which chunks have to reduce them."""
COARSE, COARSE_INPUT = Option(2), Option(None, True, 8)
"""The options with which the errors of single blocks are measured."""


@dataclass
class Measurement:
    """The measurements of a training step.

    Attributes:
        bytes: the bytes of the parts of the step.
        seconds: the time of a forward and a backward pass.
        error: |g^ - g|^2 / |g|^2, with the exact gradient g and the gradient g^ with the settings.
    """

    bytes: PartBytes
    seconds: float = 0.0
    error: float = 0.0


@dataclass
class Examination:
    """The measurements of a model and a batch.

    Attributes:
        paths: the paths of the blocks in the order of their calls.
        failing: {name of settings: the error that a step with them raises}.
        repeated: the paths of modules that would be blocks, but are not called exactly once.
        uniform: {option: the measurement with this option in all blocks}.
        rest: {option of the rest: the measurement with exact blocks}.
        forward: the forward times of the blocks in seconds, (blocks,).
        shares: {COARSE or COARSE_INPUT: the shares of the blocks in the error of this option, (blocks,)}.
        update: the bytes that exist during the optimizer's step.
        is_measured: whether seconds and errors are measured, or computed from costs and 0.
    """

    paths: list[str]
    repeated: list[str]
    failing: dict[str, str]
    options: tuple[Option, ...]
    uniform: dict[Option, Measurement]
    rest: dict[Rest, Measurement]
    forward: np.ndarray
    shares: dict[Option, np.ndarray]
    optimizer: OptimizerBytes
    update: int
    steps: RealBlockSteps | FakeBlockSteps
    processes: Processes
    is_measured: bool

    @property
    def exact(self) -> Measurement:
        """The measurement of the exact model."""
        return self.uniform[EXACT]

    def parts(self, rest: Rest) -> list[Part]:
        """Return the parts of a step for the solver."""
        of_rest = self.rest[rest]
        added = of_rest.seconds - self.exact.seconds, of_rest.error
        gaps, blocks = range(len(self.paths) + 1), range(len(self.paths))
        found: list[Part] = []
        for gap in gaps:
            saved, peak = of_rest.bytes.saved[2 * gap], of_rest.bytes.alone[2 * gap]
            # The time and the error of the rest are those of one part, because they are chosen together.
            seconds, error = added if gap == 0 else (0.0, 0.0)
            found.append(Part(*(np.array([float(v)]) for v in (saved, peak, seconds, error))))
            if gap in blocks:
                found.append(self._block(gap))
        return found

    def _block(self, block: int) -> Part:
        place = 2 * block + 1
        saved = [self.uniform[option].bytes.saved[place] for option in self.options]
        peak = [self.uniform[option].bytes.alone[place] for option in self.options]
        seconds = [self._seconds(option, block) for option in self.options]
        error = [self._error(option, block) for option in self.options]
        return Part(*(np.array(values, dtype=float) for values in (saved, peak, seconds, error)))

    def _seconds(self, option: Option, block: int) -> float:
        added = self.uniform[option].seconds - self.exact.seconds
        if option.is_recomputed:
            shares = self.forward
        else:
            shares = self.exact.bytes.saved[1::2] - self.uniform[option].bytes.saved[1::2]
        shares = np.maximum(shares, 0.0)
        total = shares.sum()
        return added * (shares[block] / total if total else 1 / len(shares))

    def _error(self, option: Option, block: int) -> float:
        kind = COARSE_INPUT if option.bits is None else COARSE
        shares = self.shares.get(kind)
        share = 1 / len(self.paths) if shares is None else shares[block]
        return max(self.uniform[option].error, 0.0) * share

    def measured(self, settings: Settings) -> tuple[int, float]:
        """Run a step, and return the most bytes with the optimizer's step, and the error, in any process.

        The error is NaN if it cannot be measured.
        """

        def run():
            return self.steps.timeline_of(settings).peak().size, self.steps.error()

        peak, error = self.processes.together(run)
        return max(self.processes.all(max(peak, self.update))), max(self.processes.all(error))

    def agree(self) -> None:
        """Take the largest bytes, seconds and errors of all processes, and the options that all have.

        Raises:
            InputError: the processes have different blocks.
        """
        others = self.processes.all(
            (
                self.paths,
                self.uniform,
                self.rest,
                self.forward,
                self.shares,
                self.update,
                self.failing,
            )
        )
        if len(others) == 1:
            return
        paths, uniform, rest, forward, shares, update, failing = zip(*others, strict=True)
        if any(one != self.paths for one in paths):
            raise InputError(
                "parallel: expected the same blocks in all processes, got different ones"
            )
        self.uniform, self.rest = _largest_of(uniform), _largest_of(rest)
        self.options = tuple(self.uniform)
        self.failing = {name: error for one in failing for name, error in one.items()}
        self.forward, self.update = np.max(forward, 0), max(update)
        self.shares = {key: np.max([one[key] for one in shares], 0) for key in self.shares}


def _largest_of(tables: tuple[dict, ...]) -> dict:
    found = {}
    for key in tables[0]:
        if all(key in table for table in tables):
            same = [table[key] for table in tables]
            bytes_ = PartBytes(*np.max([one.bytes for one in same], 0))
            seconds, error = np.max([(one.seconds, one.error) for one in same], 0)
            found[key] = Measurement(bytes_, float(seconds), float(error))
    return found


def examine(
    model: nn.Module,
    sample,
    loss,
    memory: OptimizerBytes,
    *,
    accumulates: bool = False,
    which=None,
    is_real: bool = True,
    progress: bool = True,
    processes: Processes = ALONE,
) -> Examination:
    """Measure every option of every block of a model in training mode, without conversion. The caller restores the model.

    `loss` is called as loss(model, batch), `memory` has the optimizer's bytes, and `accumulates` says whether gradients
    exist before the step. `is_real` says whether steps may run on the model itself, if its tensors are real.
    """
    parameters = list(model.parameters())
    device = parameters[0].device
    is_real = is_real and not any(p.is_meta or isinstance(p, FakeTensor) for p in parameters)
    here = torch.device("cpu") if device.type == "meta" else device
    blocks = find_blocks(model, which)

    def steps_for(paths):
        arguments = sample, loss, memory, accumulates, processes
        if is_real:
            return RealBlockSteps(model, [blocks[path] for path in paths], *arguments)
        return FakeBlockSteps(model, paths, *arguments, is_gpu(device))

    paths = list(blocks)
    calls = steps_for(paths).timeline_of(everywhere(paths, EXACT)).calls()
    counts = Counter(calls)
    order = [paths[number] for number in calls if counts[number] == 1]
    repeated = [path for number, path in enumerate(paths) if counts[number] > 1]
    steps = steps_for(order)
    options = (*OPTIONS, *(OFFLOADED if device.type == "cuda" else ())) if order else (EXACT,)
    head = head_of(model, tuple(order))
    rests = [Rest(bits) for bits in BITS_OF_REST[1:]]
    rests += [] if head is None else [Rest(bits, head) for bits in BITS_OF_REST]
    arms = {("blocks", option): everywhere(order, option) for option in options}
    arms |= {("rest", one): Settings(dict.fromkeys(order, EXACT), *one) for one in rests}
    bar = StepsProgress("fit_", progress)
    probes = 2 * min(PROBES, len(order)) if is_real else 0
    count = len(arms) + len(TIMED) * ROUNDS * is_real + probes
    done = partial(bar.step, count)
    found: dict = {}
    failing: dict[str, str] = {}
    numbers = list(range(len(order)))
    with bar.shown():
        if is_real:
            forward, shares = _measure(steps, arms, found, failing, order, done)
        else:
            for key, settings in arms.items():
                if _is_useless(key, found):
                    continue
                found[key] = Measurement(steps.timeline_of(settings).bytes_of(numbers))
                done()
            forward, shares = steps.forward_seconds(costs_of(here)), {}
    exact = found[EXACT_ARM]
    useless = [key for key in arms if _is_useless(key, found)]
    for key in useless:
        found.pop(key, None)
    options = tuple(option for option in options if ("blocks", option) in found)
    uniform = {option: found["blocks", option] for option in options}
    rest = {Rest(): exact} | {one: found["rest", one] for one in rests if ("rest", one) in found}
    update = memory.update(sample, processes)
    examination = Examination(
        order,
        repeated,
        failing,
        options,
        uniform,
        rest,
        forward,
        shares,
        memory,
        update,
        steps,
        processes,
        is_real,
    )
    examination.forward = _pooled(examination, blocks)
    _fill_in(examination, here)
    return examination


def is_gpu(device: torch.device) -> bool:
    """Return whether the optimizer and attention take the memory that they take on a GPU."""
    return device.type not in ("cpu", "meta")


# -- Measuring -------------------------------------------------------------------------------------------------


def _measure(steps: RealBlockSteps, arms, found, failing, paths, done) -> tuple[np.ndarray, dict]:
    """Fill `found` and `failing`. Return the blocks' forward times, and their shares in errors."""
    numbers = list(range(len(paths)))
    times: dict = {
        key: [] for key in arms if key in TIMED or (key[0] == "rest" and key[1].bits is None)
    }
    forward: list[np.ndarray] = []

    for key, settings in arms.items():
        if _is_useless(key, found):
            times.pop(key, None)
            continue
        try:
            timeline = steps.timeline_of(settings, always=True)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except (RuntimeError, FewbitError) as error:
            if key == EXACT_ARM:
                raise
            times.pop(key, None)
            option = key[1].name + " in the rest" * (key[0] == "rest")
            failing[option] = one_line(error.__cause__ or error).rstrip(" ;,.")
            continue  # the model cannot train with this option
        found[key] = Measurement(timeline.bytes_of(numbers))
        is_exact = settings.rest is None and (key[0] == "rest" or key[1] in (EXACT, RECOMPUTED))
        error = steps.error()
        found[key].error = 0.0 if is_exact else error
        done()
    times = {key: values for key, values in times.items() if not _is_useless(key, found)}
    arms[EXACT_ARM].apply(steps.model)
    steps.timed()
    start = time.perf_counter()
    for number in range(ROUNDS):
        if number and time.perf_counter() - start > LONGEST:
            break
        for key in times:
            arms[key].apply(steps.model)
            # From the second pass on, layers make some copies in the same pass as activations.
            steps.timed()
            seconds, blocks = steps.timed()
            times[key].append(seconds)
            if key == EXACT_ARM:
                forward.append(blocks)
            done()
    least = min(times[EXACT_ARM])  # other programs only add time
    for key, values in times.items():
        found[key].seconds = least + _added_seconds(values, times[EXACT_ARM])
    shares = {}
    probed = np.unique(np.linspace(0, len(paths) - 1, min(PROBES, len(paths))).round().astype(int))
    for option in (COARSE, COARSE_INPUT):
        if not paths or ("blocks", option) not in found:
            continue
        alone = []
        for block in probed:
            steps.timeline_of(
                Settings({**dict.fromkeys(paths, EXACT), paths[block]: option}), always=True
            )
            alone.append(steps.error())
            done()
        values = np.interp(numbers, probed, alone)
        total = values.sum()
        shares[option] = values / total if total > 0 else np.full(len(paths), 1 / len(paths))
    return np.min(forward, 0), shares


def _is_useless(key: tuple, found: dict) -> bool:
    """Return whether a loss in chunks is known to save nothing."""
    kind, option = key
    if kind != "rest" or option.head is None:
        return False
    chunked = found.get(("rest", Rest(None, option.head)))
    if chunked is None:
        return option.bits is not None  # the step with it raises an error
    during = found[EXACT_ARM].bytes.alone[-1]
    return during - chunked.bytes.alone[-1] < LEAST_GAIN * during


def _added_seconds(values: list[float], exact: list[float]) -> float:
    """Return the median difference of times measured in turns, at least 0: faster than exact is chance."""
    return max(median(a - b for a, b in zip(values, exact, strict=True)), 0.0)


def _pooled(examination: Examination, blocks: dict[str, nn.Module]) -> np.ndarray:
    alike: dict[tuple, list[int]] = {}
    saved = examination.exact.bytes.saved[1::2]
    for number, path in enumerate(examination.paths):
        key = class_of(blocks[path]), round(math.log(max(saved[number], 1.0)) / ALIKE)
        alike.setdefault(key, []).append(number)
    found = examination.forward.copy()
    for numbers in alike.values():
        found[numbers] = np.median(found[numbers])
    return found


# -- Seconds of options that are not timed ----------------------------------------------------------------------


def _fill_in(examination: Examination, device: torch.device) -> None:
    costs = costs_of(device)
    exact, forward = examination.exact, float(examination.forward.sum())
    uniform = examination.uniform
    if not examination.is_measured:
        exact.seconds = 3 * forward

    def of_bits(bits: int, option: Measurement, timed: Measurement | None) -> float:
        if option.seconds:
            return max(option.seconds - exact.seconds, 0.0)
        freed = max(float((exact.bytes.saved - option.bytes.saved).sum()), 0.0)
        if timed is None or not timed.seconds:
            return freed / 4 * costs.per_element[bits]
        more = costs.per_element[bits] - costs.per_element[TIMED_BITS]
        return max(timed.seconds - exact.seconds + freed / 4 * more, 0.0)

    for option, one in uniform.items():
        if one.seconds or one is exact:
            continue
        added = 0.0
        if option.bits is not None:
            plain = uniform.get(Option(option.bits), one)
            added += of_bits(option.bits, plain, uniform.get(Option(TIMED_BITS)))
        if option.is_recomputed:
            recomputed = uniform.get(RECOMPUTED, one)
            added += recomputed.seconds - exact.seconds if recomputed.seconds else forward
            if option.input_bits is not None:
                inputs = float(recomputed.bytes.saved[1::2].sum())
                added += inputs / 4 * costs.per_element[option.input_bits]
                if option.offload:
                    sent = inputs / 4 * option.input_bits / 8
                    added += max(0.0, sent * costs.per_transferred_byte - forward)
        one.seconds = exact.seconds + added
    for rest, one in examination.rest.items():
        if one.seconds:
            continue
        chunked = examination.rest[Rest(None, rest.head)]
        if not chunked.seconds:  # fake tensors: the logits are computed again
            chunked.seconds = exact.seconds
        if rest.bits is not None:
            timed = examination.rest.get(Rest(TIMED_BITS))
            bits = examination.rest.get(Rest(rest.bits), one)
            one.seconds = chunked.seconds + of_bits(rest.bits, bits, timed)
