"""The base of policies that measure some forward passes and choose bits by what they have found.

In some steps a probe goes along with the forward pass and its backward pass. Its results reach the host on their own, and
the policy learns from them in a later step. If several processes train the model, they exchange their results first, so
that all of them learn the same.
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
    """A measurement from its forward pass until the policy learns from its result.

    Args:
        path: the module whose forward pass was measured.
        since: the step of that forward pass; once the probe was sent, or has a result, the step of that.
        probe: the probe; None if the result was loaded from a state.
        is_sent: whether the probe has ended, and its numbers are on their way to the host.
        result: what the probe has found in this process, if that is known already.
        is_merged: whether the result is that of all processes.
        groups: the groups of processes that exchange results; () for a single process.
        lag: forward passes that those processes wait before they do so.
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
        """Return whether the run can go on.

        Several processes go by the count of steps alone, so that all of them go on in the same step.

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
        """Return whether another probe may take the place of this one, to which no backward pass has come."""
        if self.probe is None or self.is_sent or self.groups:
            return False
        is_passed_over = self.path == path and not self.probe.runs()
        return is_passed_over or step > self.since + PATIENCE

    def results(self):
        """Return what was found; waits until the numbers are on the host."""
        return self.result if self.probe is None else self.probe.results()

    def pending(self) -> ProbeRun | None:
        """Return a run with the result, for a state; None if the backward pass has not come."""
        if self.probe is None or self.is_sent:
            return replace(self, probe=None, result=self.results())
        if not self.probe.has_run():
            return None
        return replace(self, probe=None, result=self.probe.snapshot(), since=self.since + 1)


class ProbingPolicy(BitPolicy):
    """A policy that measures some forward passes and learns from them.

    A subclass has `Knowledge`, a `Record` with all that it has learned, `RESULT_SHAPE`, and the methods `new_probe`,
    `learn`, `adopt`, `apply_to`, `fit` and `merge`.

    Args:
        bits: the average number of bits per element before anything is known.
        names: the names of all quantizers that the model may have, the same in every process.
        interval: steps from one measurement to the next. The first measurements are in steps 1, 2, 4, 8 ...
        knowledge: what is known before the first measurement.
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
        """Note that no probe sees a layer."""
        self._unobserved.add(layer, reason)

    def unobserved_layers(self, model) -> dict[str, str]:
        """Return {layer: reason in words} of the layers of the model that probes do not see."""
        found = self._unobserved.found(model, {layer for layer, _ in self.knowledge.slots})
        return {layer: found[layer] for layer in self._layers if layer in found}

    # -- What a subclass says ------------------------------------------------------------------------------------

    def new_probe(self):
        """Return a probe for the forward pass that begins now."""
        raise NotImplementedError

    def learn(self, result) -> Record:
        """Return what is known after one more result; `self.knowledge` itself if the result says nothing."""
        raise NotImplementedError

    def adopt(self, knowledge: Record) -> None:
        """Set `self.knowledge`, and the bits that follow from it. Nothing changes if that fails."""
        raise NotImplementedError

    def apply_to(self, assignment: BitAssignment) -> None:
        """Set the bits of a forward pass."""
        assignment.averages = self.averages

    def merge(self, results: list):
        """Return one result of those of all processes, in rank order."""
        raise NotImplementedError

    def fit(self, knowledge: Record, settings: Mapping) -> Record:
        """Return what this policy takes over of a state's knowledge.

        Args:
            knowledge: the knowledge of the state.
            settings: the settings of the policy that made the state, as `settings` returns them.

        Raises:
            InputError: the knowledge is not of this model.
        """
        raise NotImplementedError

    def check_result(self, result) -> None:
        """Raise InputError if a state's result is not of this model."""

    # -- In a forward pass ---------------------------------------------------------------------------------------

    def assign(self, inputs, probe=None) -> BitAssignment:
        """Return the assignment of a forward pass, with the bits that this policy has chosen."""
        assignment = super().assign(inputs, probe)
        self.apply_to(assignment)
        return assignment

    def begin(self, module, inputs) -> BitAssignment:
        """Return the assignment of a forward pass that begins, with a probe if a measurement is due."""
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
        """Learn from a result. Nothing changes if that fails."""
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
        """Return the entries of a state that say by which settings the bits were chosen."""
        return {}

    def state_dict(self) -> dict:
        """Return what `load_state_dict` needs to continue: plain numbers and strings, and tensors of numbered samples.

        Waits for numbers that are on their way to the host. The policy does not change, so one of several processes may
        save, and others not.
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
        """Continue from a state. The bits that follow from it depend on this policy's own settings.

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
        """Return the shapes of the entries of `settings`."""
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
