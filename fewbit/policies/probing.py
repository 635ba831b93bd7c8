"""The base class of policies that use probes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from fewbit.errors import InputError
from fewbit.policies.exchange import gather, groups_of, lag_of
from fewbit.policies.records import Record, check_layer, plain, read, read_fields, wrong
from fewbit.policies.schedule import PATIENCE, Schedule
from fewbit.policies.unobserved import Unobserved
from fewbit.printable import shorten
from fewbit.runtime.interop.cuda_streams import is_capturing
from fewbit.runtime.interop.module_calls import PATH
from fewbit.runtime.saved.assignment import BitAssignment
from fewbit.runtime.saved.bit_policy import SAMPLES, BitPolicy, wrong_state

VERSION = 2
_ENTRIES = "policy", "version", "settings", "schedule", "knowledge", "pending"
"""The entries of a state, besides those about numbered samples."""


@dataclass
class ProbeRun:
    """One measurement by a probe, from its forward pass until the policy learns from its result.

    Args:
        path: the path of the measured module.
        since: the step of the measured forward pass; later the step in which the results were sent to the host.
        probe: the probe; None if `result` was loaded from a state.
        is_sent: whether the copy of the numbers to the host was started.
        result: the result from a state, merged over all processes if `is_merged`.
        groups: the process groups that exchange results; () for a single process.
        lag: the number of steps between the start of the copy and the exchange.
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
        """Return whether the next stage can begin: sending the results, or learning from them.

        All processes must agree, so with several only numbers of steps and the path decide.
        """
        if self.probe is None or self.is_sent:
            is_here = self.probe is None or self.probe.is_there()
            return step >= self.since + self.lag if self.groups else is_here
        if self.groups:
            return step >= self.since + (1 if path == self.path else PATIENCE)
        return self.probe.has_run()

    def is_stale(self, step: int, path: str) -> bool:
        """Return whether the backward pass has not come in PATIENCE steps, or before the module's next forward pass."""
        if self.probe is None or self.is_sent or self.groups:
            return False
        is_passed_over = self.path == path and not self.probe.runs()
        return is_passed_over or step > self.since + PATIENCE

    def results(self):
        """Wait for the numbers, and return the result."""
        return self.result if self.probe is None else self.probe.results()

    def pending(self) -> ProbeRun | None:
        """Return a copy for a state, with the result instead of the probe; None before the backward pass."""
        if self.probe is None or self.is_sent:
            return replace(self, probe=None, result=self.results())
        if not self.probe.has_run():
            return None
        return replace(self, probe=None, result=self.probe.snapshot(), since=self.since + 1)


class ProbingPolicy(BitPolicy):
    """A policy that measures some forward passes and learns from the measurements.

    A subclass sets `Knowledge`, the `Record` class of all that the policy learns, and `Result`, the type of a probe's
    result.

    Args:
        bits: the average number of bits per element before the first measurement.
        names: the names of all layers and functions that may save quantized tensors, the same in every process.
        interval: the number of steps from one measurement to the next. The first are in steps 1, 2, 4, 8 and so on.
        knowledge: the knowledge before the first measurement.
    """

    Knowledge: type[Record]
    Result: type

    def __init__(self, bits: float, names: Iterable[str], interval: int, knowledge: Record):
        super().__init__(bits)
        self.interval = interval
        self.knowledge = knowledge
        self.schedule = Schedule()
        self._layers = dict.fromkeys(names)
        self._run: ProbeRun | None = None
        self._loaded: ProbeRun | None = None  # from a state, until the next forward pass
        self._is_joint = False  # whether several processes train the model
        self._before_alone = None  # schedule, loaded run and knowledge, see _counts
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
        """Record why probes cannot measure a layer's saved tensors, one of `unobserved.REASONS`."""
        self._unobserved.add(layer, reason)

    def unobserved_layers(self, model) -> dict[str, str]:
        """Return {layer: reason in words} of layers that probes cannot measure."""
        found = self._unobserved.found(model, {layer for layer, _ in self.knowledge.slots})
        return {layer: found[layer] for layer in self._layers if layer in found}

    # -- What a subclass implements -------------------------------------------------------------------------------

    def new_probe(self):
        """Return a probe for the forward pass that begins now."""
        raise NotImplementedError

    def learn(self, result) -> Record:
        """Return the knowledge after one more measurement, or `self.knowledge` if the result is of no use."""
        raise NotImplementedError

    def adopt(self, knowledge: Record) -> None:
        """Set `self.knowledge`, and the bits that follow from it. If an exception is raised, nothing changes."""
        raise NotImplementedError

    def apply_to(self, assignment: BitAssignment) -> None:
        """Write the policy's bits into a bit assignment."""
        assignment.averages = self.averages

    def merge(self, results: list):
        """Merge the results of all processes, in rank order, into one."""
        raise NotImplementedError

    def fit(self, knowledge: Record, settings: Mapping) -> Record:
        """Return the part of a state's knowledge that is of use to this policy; the state's policy had `settings`.

        Raises:
            InputError: the knowledge is about another model.
        """
        raise NotImplementedError

    def check_result(self, result) -> None:
        """Raise InputError if a state's result, {slot's name: measurement}, is from another model."""
        for layer, _ in result:
            check_layer(layer, self._layers)

    # -- In a forward pass ---------------------------------------------------------------------------------------

    def assign(self, inputs, probe=None) -> BitAssignment:
        """See `BitPolicy.assign`."""
        assignment = super().assign(inputs, probe)
        self.apply_to(assignment)
        return assignment

    def begin(self, module, inputs) -> BitAssignment:
        """See `BitPolicy.begin`. If a measurement is due, the assignment has a probe."""
        assignment = super().begin(module, inputs)
        if is_capturing() or torch._C._functorch.maybe_current_level() is not None:
            return assignment
        groups = groups_of(module)
        with self._lock:
            attributes = module.__dict__
            path = attributes[PATH] if PATH in attributes else ""
            if self._counts(groups):
                lag = lag_of(module, groups) if groups else 0
                assignment.probe = self._next_probe(path, groups, lag)
        self.apply_to(assignment)
        return assignment

    def _counts(self, groups) -> bool:
        if groups:
            self._is_joint = True
            if self._before_alone is not None:
                self._roll_back(self._before_alone)
        elif self._is_joint and torch.distributed.is_initialized():
            return False
        elif self._before_alone is None:
            self._before_alone = self.schedule, self._loaded, self.knowledge
            self._is_joint, self._run = False, None
        return True

    def _next_probe(self, path: str, groups, lag: int):
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
        """Run the measurement's next stage: send the numbers, or learn from the result."""
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
        """Learn from a result, and choose bits anew."""
        knowledge = self.learn(result)
        if knowledge is not self.knowledge:
            self.adopt(knowledge)

    def _roll_back(self, snapshot: tuple) -> None:
        schedule, loaded, knowledge = snapshot
        if knowledge is not self.knowledge:
            self.adopt(knowledge)
        self.schedule, self._loaded = schedule, loaded
        self._before_alone = self._run = None

    # -- State ---------------------------------------------------------------------------------------------------

    def settings(self) -> dict:
        """Return the settings on which the policy's bits depend."""
        return {}

    def state_dict(self) -> dict:
        """See `BitPolicy.state_dict`."""
        with self._lock:
            run = self._loaded if self._run is None else self._run.pending()
        pending = None
        if run is not None and run.result is not None:
            pending = {"path": run.path, "since": run.since, "is_merged": run.is_merged}
            pending["result"] = plain(run.result)
        values = plain(self.schedule), plain(self.knowledge), pending
        own = self.kind, VERSION, self.settings(), *values
        return {**dict(zip(_ENTRIES, own, strict=True)), **super().state_dict()}

    def load_state_dict(self, state: Mapping) -> None:
        """Continue from a state, with this policy's own settings.

        Raises:
            InputError: the state is invalid or from another policy or model. The policy has not changed.
        """
        self._check_kind(state)
        schedule = read_fields(Schedule, state["schedule"], "schedule")
        for path in schedule.turns:
            check_layer(path, self._layers, "module")
        loaded = self._read_result(state["pending"])
        knowledge = read_fields(self.Knowledge, state["knowledge"], "knowledge")
        if not isinstance(state["settings"], Mapping):
            raise wrong("settings", "a mapping", state["settings"])
        knowledge = self.fit(knowledge, state["settings"])
        super().load_state_dict({key: state[key] for key in SAMPLES if key in state})
        with self._lock:
            self._roll_back((schedule, loaded, knowledge))

    def _check_kind(self, state: Mapping) -> None:
        if "version" not in state or state.get("policy", self.kind) != self.kind:
            raise wrong_state(self.kind, state)
        if state["version"] != VERSION:
            raise InputError(
                f"expected version {VERSION} of a controller's state, as its state_dict() gave it, "
                f"got {shorten(state['version'])}"
            )
        missing = [name for name in _ENTRIES if name not in state]
        if missing or state.keys() - {*_ENTRIES, *SAMPLES}:
            raise InputError(
                f"expected the entries {', '.join(_ENTRIES)} of a controller's state, got {shorten(list(state))}"
            )

    def _read_result(self, pending) -> ProbeRun | None:
        if pending is None:
            return None
        if not isinstance(pending, Mapping):
            raise wrong("pending", "the entries path, since, is_merged, result", pending)
        kinds = {"path": str, "since": int, "is_merged": bool, "result": self.Result}
        found = {
            name: read(kind, pending.get(name), f"pending.{name}") for name, kind in kinds.items()
        }
        check_layer(found["path"], self._layers, "module")
        self.check_result(found["result"])
        return ProbeRun(**found)
