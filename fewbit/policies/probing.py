"""The base class of policies that measure some forward passes, and choose bits by the measurements.

In some steps a probe measures the forward pass and its backward pass. The results are copied to the host without waiting,
and the policy learns from them in a later step. If several processes train the model, they exchange their results first, so
that all of them learn the same. The knowledge of a policy is all that it has learned.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from fewbit.errors import InputError
from fewbit.policies.processes import gather, groups_of, is_capturing, lag_of
from fewbit.policies.records import Record, plain
from fewbit.policies.schedule import PATIENCE, Schedule
from fewbit.policies.unobserved import Unobserved
from fewbit.runtime.interop.interrupts import hold
from fewbit.runtime.interop.module_calls import PATH
from fewbit.runtime.saved.assignment import BitAssignment
from fewbit.runtime.saved.bit_policy import SAMPLES, BitPolicy, wrong_state
from fewbit.schema import shorten
from fewbit.schema.shapes import (
    MOST_STEPS,
    Shape,
    capped,
    check_layer,
    choice,
    flag,
    optional,
    record,
    text,
    whole,
)

VERSION = 1
RESULT = {"path": text, "since": whole(), "is_summed": flag}
"""The shapes of the entries that belong to a pending result."""


@dataclass
class ProbeRun:
    """One measurement by a probe, from its forward pass until the policy learns from its result.

    Args:
        path: the module whose forward pass was measured.
        since: the step of the measured forward pass; after the results were sent to the host, the step in which they were
            sent.
        probe: the probe; None if the result was loaded from a state.
        is_sent: whether the probe has ended, and its numbers are on their way to the host.
        result: the result in this process, if it was loaded from a state.
        is_merged: whether the result is already that of all processes.
        groups: the groups of processes that exchange results; () for a single process.
        lag: the number of forward passes that these processes wait before they exchange the results that were sent.
    """

    path: str
    since: int
    probe: object = None
    is_sent: bool = False
    result: object = None
    is_merged: bool = False
    groups: tuple = ()
    lag: int = 0

    def is_ready(self, step: int, path: str) -> bool:
        """Return whether the next stage of the measurement can begin: sending the results, or learning from them.

        If several processes train the model, only the number of steps decides, so that the stage begins in the same step in
        all.

        Args:
            step: the number of forward passes that have begun.
            path: the module whose forward pass begins now.
        """
        if self.probe is None or self.is_sent:
            is_here = self.probe is None or self.probe.is_there()
            return step >= self.since + self.lag if self.groups else is_here
        if self.groups:
            return step >= self.since + (1 if path == self.path else PATIENCE)
        return self.probe.has_run()

    def is_stale(self, step: int, path: str) -> bool:
        """Return whether to give this measurement up for another, because no backward pass of its forward pass has come."""
        if self.probe is None or self.is_sent or self.groups:
            return False
        is_passed_over = self.path == path and not self.probe.runs()
        return is_passed_over or step > self.since + PATIENCE

    def results(self):
        """Return the result of the measurement. Waits until the numbers are on the host."""
        return self.result if self.probe is None else self.probe.results()

    def pending(self) -> ProbeRun | None:
        """Return this measurement with its result, to be stored in a state; None if the backward pass has not come."""
        if self.probe is None or self.is_sent:
            return replace(self, probe=None, result=self.results())
        if not self.probe.has_run():
            return None
        return replace(self, probe=None, result=self.probe.snapshot(), since=self.since + 1)


class ProbingPolicy(BitPolicy):
    """A policy that measures some forward passes and learns from the measurements.

    A probe is the object that measures one forward and backward pass. A subclass sets `Knowledge`, the `Record` class of
    all that the policy learns, and `RESULT_SHAPE`, which checks a probe's result in a controller's state. It implements
    `new_probe`, `learn`, `adopt`, `fit` and `merge`, and may override `apply_to`.

    Args:
        bits: the average number of bits per element before the first measurement.
        names: the names of all layers and functions that may save quantized tensors, the same in every process.
        interval: the number of steps from one measurement to the next. The first measurements are in steps 1, 2, 4, 8 ...
        knowledge: the knowledge before the first measurement.
    """

    name: str | None = None
    """The entry "policy" of this policy's states, or None if they have no such entry."""
    Knowledge: type[Record]
    RESULT_SHAPE: Shape
    """The shape of a probe's result in a state."""

    def __init__(self, bits: float, names: Iterable[str], interval: int, knowledge: Record):
        super().__init__(bits)
        self.interval = interval
        self.knowledge = knowledge
        self.schedule = Schedule()
        self._layers = dict.fromkeys(names)
        self._run: ProbeRun | None = None
        self._loaded: ProbeRun | None = None  # a result of a state, until the next forward pass
        self._is_joint = False  # whether several processes train the model
        self._before_alone = None  # the snapshot before forward passes outside of those processes
        self._unobserved = Unobserved()
        self._lock = threading.RLock()

    def __getstate__(self):
        return {**vars(self), "_run": None, "_lock": None, "_is_joint": False}

    def __setstate__(self, state):
        vars(self).update(state)
        self._lock = threading.RLock()

    @property
    def step(self) -> int:
        """The number of forward passes in training so far."""
        return self.schedule.step

    def report_unobserved(self, layer: str, reason: str) -> None:
        """Record that probes cannot measure the saved tensors of a layer.

        Args:
            layer: the layer's name.
            reason: one of the keys of `fewbit.policies.unobserved.REASONS`.
        """
        self._unobserved.add(layer, reason)

    def unobserved_layers(self, model) -> dict[str, str]:
        """Return {layer: reason in words} of the layers of the model whose saved tensors probes cannot measure."""
        found = self._unobserved.found(model, {layer for layer, _ in self.knowledge.slots})
        return {layer: found[layer] for layer in self._layers if layer in found}

    # -- What a subclass says ------------------------------------------------------------------------------------

    def new_probe(self):
        """Return a probe, an object that measures the forward pass that begins now."""
        raise NotImplementedError

    def learn(self, result) -> Record:
        """Return all that is known after one more measurement; `self.knowledge` itself if the result is of no use."""
        raise NotImplementedError

    def adopt(self, knowledge: Record) -> None:
        """Set `self.knowledge`, and the bits that follow from the knowledge. If that fails, nothing changes."""
        raise NotImplementedError

    def apply_to(self, assignment: BitAssignment) -> None:
        """Set the bits in the assignment of a forward pass."""
        assignment.averages = self.averages

    def merge(self, results: list):
        """Return one measurement for all processes, given those of each process in rank order."""
        raise NotImplementedError

    def fit(self, knowledge: Record, settings: Mapping) -> Record:
        """Return the part of the knowledge in a controller's state that is of use to this policy.

        Args:
            knowledge: the knowledge in the state.
            settings: the settings of the policy that made the state, as `settings` returns them.

        Raises:
            InputError: the knowledge is about another model.
        """
        raise NotImplementedError

    def check_result(self, result) -> None:
        """Raise InputError if the measurement in a state is of another model."""

    # -- In a forward pass ---------------------------------------------------------------------------------------

    def assign(self, inputs, probe=None) -> BitAssignment:
        """Return a bit assignment for a forward pass that does not count as a step, with the bits as they are now."""
        assignment = super().assign(inputs, probe)
        self.apply_to(assignment)
        return assignment

    def begin(self, module, inputs) -> BitAssignment:
        """Return the bit assignment of a forward pass that begins, with a probe if a measurement is due."""
        assignment = super().begin(module, inputs)
        if is_capturing() or torch._C._functorch.maybe_current_level() is not None:
            return assignment
        groups = groups_of(module)
        with hold(self._lock):
            path = vars(module).get(PATH, "")
            if self._counts(groups):
                assignment.probe = self._next_probe(path, groups, lag_of(module, groups))
        self.apply_to(assignment)
        return assignment

    def _counts(self, groups) -> bool:
        """Return whether a forward pass is a step of the training.

        If several processes train the model, forward passes of a process on its own do not count, because another
        process may have more or fewer of them.
        """
        if groups:
            self._is_joint = True
            if self._before_alone is not None:
                self._roll_back(self._before_alone)
        elif self._is_joint and torch.distributed.is_initialized():
            return False
        elif self._before_alone is None:
            self._is_joint, self._before_alone, self._run = False, self._snapshot(), None
        return True

    def _next_probe(self, path: str, groups, lag: int):
        """Go on with the measurement under way. Return a new probe if one is due, else None."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None and not groups:
            self.take_in(loaded.result)
        elif loaded is not None:
            self._run = replace(loaded, groups=groups, lag=lag)
        while self._run is not None and self._run.is_ready(self.step, path):
            self._go_on()
        self.schedule = self.schedule.after_step(path, self.interval)
        if not self.schedule.is_turn_of(path):
            return None
        if self._run is not None:
            if not self._run.is_stale(self.step, path):
                return None
            self._run.probe.end()
        self.schedule = self.schedule.measured(path)
        self._unobserved.new_measurement()
        probe = self.new_probe()
        self._run = ProbeRun(path, self.step, probe, groups=groups, lag=lag)
        return probe

    def _go_on(self) -> None:
        """Send the probe whose forward pass is over, or learn from the result that has arrived."""
        run, self._run = self._run, None
        if run.probe is not None and not run.is_sent:
            run.probe.send()
            self._run = replace(run, is_sent=True, since=self.step)
            return
        result = run.results()
        if run.groups and not run.is_merged:
            result = self.merge(gather(result, run.groups))
        self.take_in(result)

    def take_in(self, result) -> None:
        """Learn from the result of a measurement, and choose bits anew. If that fails, nothing changes."""
        knowledge = self.learn(result)
        if knowledge is not self.knowledge:
            self.adopt(knowledge)

    def _snapshot(self) -> tuple:
        return self.schedule, self._loaded, self.knowledge

    def _roll_back(self, snapshot: tuple) -> None:
        schedule, loaded, knowledge = snapshot
        if knowledge is not self.knowledge:
            self.adopt(knowledge)
        self.schedule, self._loaded = schedule, loaded
        self._before_alone = self._run = None

    # -- State ---------------------------------------------------------------------------------------------------

    def settings(self) -> dict:
        """Return the policy's settings on which its bits depend, as entries of a state."""
        return {}

    def state_dict(self) -> dict:
        """Return the state: plain numbers and strings, and tensors if the user has numbered the samples.

        The call waits for numbers that are on their way to the host. The policy does not change, so one of several
        processes may save the state while the others do not.
        """
        with hold(self._lock):
            run = self._loaded if self._run is None else self._run.pending()
        has_result = run is not None
        return {
            **self.settings(),
            **super().state_dict(),
            "version": VERSION,
            **self.schedule.capped().to_plain(),
            **self.knowledge.to_plain(),
            "pending": plain(run.result) if has_result else None,
            "path": run.path if has_result else "",
            "since": capped(run.since, MOST_STEPS) if has_result else 0,
            "is_summed": has_result and run.is_merged,
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Continue from a state. Bits are chosen from the state's knowledge by this policy's own settings.

        Args:
            state: the result of `state_dict`. The whole state is checked before the policy changes.

        Raises:
            InputError: the state is from another policy or model, or has invalid entries.
        """
        self._check_kind(state)
        own = {key: value for key, value in state.items() if key not in SAMPLES}
        shapes = {
            **self.setting_shapes(),
            "version": choice(VERSION),
            **Schedule.shapes(),
            **self.Knowledge.shapes(),
            "pending": optional(self.RESULT_SHAPE),
            **RESULT,
        }
        found = record(**shapes)(own, "")
        schedule = Schedule.from_entries(found)
        for path in schedule.turns:
            check_layer(path, self._layers, "module")
        loaded = self._read_result(found, schedule.step)
        knowledge = self.fit(self.Knowledge.from_entries(found), found)
        super().load_state_dict({key: state[key] for key in SAMPLES if key in state})
        with hold(self._lock):
            self._roll_back((schedule, loaded, knowledge))

    def setting_shapes(self) -> dict[str, Shape]:
        """Return the shapes of the entries that `settings` returns. A shape checks one entry (`fewbit.schema.shapes`)."""
        return {}

    def _check_kind(self, state: Mapping) -> None:
        """Raise InputError unless the state is from this kind of policy, and of this version."""
        name = state.get("policy") if "version" in state else None
        is_own = name is None if self.name is None else isinstance(name, str) and name == self.name
        if "version" not in state or not is_own:
            raise wrong_state(self.kind, state)
        version = state["version"]
        if type(version) is not int or version != VERSION:
            raise InputError(
                f"expected version {VERSION} of a controller's state, as its state_dict() gave it, "
                f"got {shorten(version)}"
            )

    def _read_result(self, found: Mapping, step: int) -> ProbeRun | None:
        if found["pending"] is None:
            return None
        check_layer(found["path"], self._layers, "module")
        since = whole(0, step + 1)(found["since"], "since")
        self.check_result(found["pending"])
        return ProbeRun(found["path"], since, result=found["pending"], is_merged=found["is_summed"])
