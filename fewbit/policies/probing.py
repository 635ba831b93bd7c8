"""When a model is observed, and how what was seen comes to all processes: the steps, turns and stages of a policy.

In some steps an observation goes along with the forward. What it has measured comes to the host by itself and is
learned from in a later step; in several processes it is summed up over all of them first, so that all learn the
same. What is seen, and what is made of it, is the policy's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import distributed

from fewbit.errors import InputError
from fewbit.policies.unobserved import Unobserved
from fewbit.runtime.interop.async_host_copy import AsyncHostCopy
from fewbit.runtime.interop.interrupts import hold
from fewbit.runtime.interop.module_calls import PATH
from fewbit.runtime.saved.assignment import BitAssignment, BitPolicy
from fewbit.runtime.saved.probe import VarianceProbe
from fewbit.schema import shorten
from fewbit.schema.shapes import (
    MOST_STEPS,
    Shape,
    capped,
    check_layer,
    choice,
    entries,
    flag,
    listed,
    record,
    text,
    whole,
    wrong,
)

SLOTS = 3
"""Inputs of one layer that it keeps, at most: q, k and v."""
LAG = 2
"""Steps that several processes with GPUs give numbers to arrive; a process of its own looks whether they have."""
PATIENCE = 16
"""Forwards that an observation waits for a backward pass, or for a module of the model whose turn it is."""
VERSION = 1
SAMPLES = ("magnitudes", "numbers")
"""Entries of a state in which samples are numbered. A state has both or neither; `BitPolicy` reads them."""
COMMON = {
    "version": choice(VERSION),
    "step": whole(),
    "due": flag,
    "turns": listed(entries(text, whole(), whole(0))),
    "path": text,
    "since": whole(),
    "is_summed": flag,
}
"""The shapes of the entries that every policy's state has."""


@dataclass
class _Stage:
    """What is under way since a step: what is to be done next, with what, between which processes, on which device.

    path: of the module whose forward began it.
    """

    path: str
    since: int
    do: Callable
    what: object
    groups: tuple
    device: torch.device


@dataclass
class Pending:
    """What was seen, to be learned from. path, since: as of its stage. is_summed: over all processes."""

    seen: object
    path: str
    since: int
    is_summed: bool = False


class ProbingPolicy(BitPolicy):
    """A policy that observes some steps and learns from them.

    names: of all quantizers that the model may have, the same in every process. interval: steps from one
    observation to the next; the first are in steps 1, 2, 4, 8 ...
    """

    def __init__(self, names: Iterable[str], interval: int):
        super().__init__()
        self.interval = interval
        self.step = 0
        self._places = {name: number for number, name in enumerate(names)}
        self._is_joint = False  # whether several processes train the model
        self._before_alone = None  # what was known before steps outside of them
        self._is_due = False
        self._turns: dict[str, tuple[int, int]] = {}  # of modules: step now, when last observed
        self._stage: _Stage | None = None
        self._pending: Pending | None = None  # seen before a stop
        self._unobserved = Unobserved()
        self._lock = threading.RLock()

    def __getstate__(self):
        return {**vars(self), "_stage": None, "_lock": None, "_is_joint": False}

    def __setstate__(self, state):
        vars(self).update(state)
        self._lock = threading.RLock()

    def unobserved(self, name: str, why: str) -> None:
        self._unobserved.tell(name, why)

    def unobserved_layers(self, model) -> dict[str, str]:
        """Return {name: why} of layers of the model of which no observation knows what they keep."""
        found = self._unobserved.found(model, self._seen_names())
        return {name: found[name] for name in self._places if name in found}

    # -- What a policy says ------------------------------------------------------------------------------

    def _new_observation(self):
        """What goes along with the forward that begins: a `VarianceProbe`, or what has its methods."""
        return VarianceProbe(self.step)

    def _seen_names(self) -> set[str]:
        """Return the names of the layers that an observation has seen."""
        raise NotImplementedError

    def _learn(self, seen) -> None:
        """Takes in what an observation's `results` gave, or `_of_table`; nothing changes if that fails."""
        raise NotImplementedError

    def _tell(self, plan: BitAssignment) -> None:
        """Says in the plan of a forward that begins what has been learned."""
        plan.averages = self.averages

    def _learned(self) -> tuple:
        """All that `_learn` changes; nothing in it is written to afterwards."""
        raise NotImplementedError

    def _relearn(self, learned: tuple) -> None:
        """Puts that back."""
        raise NotImplementedError

    def _table(self, seen) -> torch.Tensor:
        """What was seen as a vector, float64, on the CPU, of the same size in all processes, to be summed up."""
        raise NotImplementedError

    def _of_table(self, sums: torch.Tensor):
        """What was seen in all processes."""
        raise NotImplementedError

    def _plain(self, seen):
        """What was seen as plain numbers."""
        raise NotImplementedError

    def _shapes(self) -> dict[str, Shape]:
        """Return the shapes (see `state_shapes`) of the entries that `_plain` and `_plain_learned` return."""
        raise NotImplementedError

    def _of_plain(self, plain):
        """Invert `_plain`, for an entry whose shape is checked. Raises InputError if the entry does not fit the model."""
        raise NotImplementedError

    def _plain_learned(self) -> dict:
        """What was learned as plain numbers: entries of the state."""
        raise NotImplementedError

    def _of_plain_learned(self, state) -> tuple:
        """Return `_learned` from entries whose shapes are checked. Raises InputError if an entry does not fit the model."""
        raise NotImplementedError

    # -- In a forward ------------------------------------------------------------------------------------

    def begin(self, module, inputs) -> BitAssignment:
        plan = super().begin(module, inputs)
        if _is_capturing() or torch._C._functorch.maybe_current_level() is not None:
            return plan
        groups = _groups_of(module)
        with hold(self._lock):
            path = vars(module).get(PATH, "")
            plan.observation = self._observation(path, groups, _device_of(module, groups))
        self._tell(plan)
        return plan

    def _observation(self, path, groups, device) -> VarianceProbe | None:
        """Goes on with what is under way, and begins something new if it is time."""
        if groups:
            self._is_joint = True
            if self._before_alone is not None:
                # What a process did on its own, perhaps more often than another, does not count.
                self._go_back(self._before_alone)
        elif self._is_joint and distributed.is_initialized():
            return None
        elif self._before_alone is None:
            self._is_joint, self._before_alone, self._stage = False, self._known(), None
        pending, self._pending = self._pending, None
        if pending is not None and not groups:
            self._learn(pending.seen)
        elif pending is not None:
            do = self._learn_from if pending.is_summed else self._reduce
            self._stage = _Stage(pending.path, pending.since, do, pending.seen, groups, device)
        while self._stage is not None and self._go_on(path):
            pass
        self.step += 1
        self._is_due |= self._is_scheduled(self.step)
        _, observed = self._turns.get(path, (0, 0))
        self._turns[path] = self.step, observed
        if not (self._is_due and self._is_free(path) and self._is_turn_of(path)):
            return None
        if self._stage is not None:
            self._stage.what.end()
        self._is_due = False
        self._turns[path] = self.step, self.step
        self._unobserved.observation_begins()
        observation = self._new_observation()
        self._stage = _Stage(path, self.step, self._send, observation, groups, device)
        return observation

    def _is_free(self, path) -> bool:
        """Whether nothing is under way, or an observation that no backward pass has come to in its time."""
        stage = self._stage
        if stage is None:
            return True
        if stage.do != self._send or stage.groups:
            return False
        is_passed_over = stage.path == path and not stage.what.runs()
        return is_passed_over or self.step > stage.since + PATIENCE

    def _is_turn_of(self, path) -> bool:
        """Whether no other module of the model, of those that are called one by one, has waited longer."""
        _, own = self._turns[path]
        return all(
            observed >= own
            for latest, observed in self._turns.values()
            if latest + PATIENCE >= self.step
        )

    def _known(self) -> tuple:
        return self.step, self._is_due, dict(self._turns), self._pending, self._learned()

    def _go_back(self, known: tuple) -> None:
        self.step, self._is_due, self._turns, self._pending, learned = known
        self._relearn(learned)
        self._before_alone = self._stage = None

    def _is_scheduled(self, step: int) -> bool:
        return step % self.interval == 0 or (step < self.interval and step & (step - 1) == 0)

    def _go_on(self, path) -> bool:
        """Does what is to be done next, if it can be done; says whether it was."""
        stage = self._stage
        is_first = stage.do == self._send
        if not stage.groups:
            is_ready = stage.what.has_run() if is_first else stage.what.is_there()
        else:
            wait = LAG if stage.device.type == "cuda" else 0
            if is_first:
                wait = 1 if stage.path == path else PATIENCE
            is_ready = self.step >= stage.since + wait
        if not is_ready:
            return False
        self._stage = None
        following = stage.do(stage.what, stage.groups, stage.device)
        if following is not None:
            self._stage = _Stage(stage.path, self.step, *following, stage.groups, stage.device)
        return True

    def _send(self, observation: VarianceProbe, groups, device):
        observation.send()
        return self._receive, observation

    def _receive(self, observation: VarianceProbe, groups, device):
        seen = observation.results()
        if groups:
            return self._reduce(seen, groups, device)
        self._learn(seen)
        return None

    def _reduce(self, seen, groups, device):
        sums = self._table(seen)
        if device.type == "cuda":
            sums = sums.pin_memory().to(device, non_blocking=True)
        for group in groups:
            distributed.all_reduce(sums, group=group)
        return self._share, AsyncHostCopy([sums])

    def _share(self, arrival: AsyncHostCopy, groups, device):
        self._learn(self._of_sums(arrival))

    def _learn_from(self, seen, groups, device):
        self._learn(seen)

    def _of_sums(self, arrival: AsyncHostCopy):
        (entries,) = arrival.values().values()
        return self._of_table(torch.tensor(entries, dtype=torch.float64, device="cpu"))

    # -- State -------------------------------------------------------------------------------------------

    def state(self) -> dict:
        """What `load` makes again: plain numbers and strings. Waits for numbers that are on their way.

        Nothing changes by it: one of several processes may save, and others not.
        """
        with hold(self._lock):
            pending = self._under_way()
        return {
            **super().state(),
            "version": VERSION,
            "step": capped(self.step, MOST_STEPS),
            "due": self._is_due,
            "turns": [
                [path, *(capped(step, MOST_STEPS) for step in steps)]
                for path, steps in self._turns.items()
            ],
            **self._plain_learned(),
            "pending": None if pending is None else self._plain(pending.seen),
            "path": "" if pending is None else pending.path,
            "since": 0 if pending is None else capped(pending.since, MOST_STEPS),
            "is_summed": pending is not None and pending.is_summed,
        }

    def _under_way(self) -> Pending | None:
        """What was seen and has not been learned from."""
        stage = self._stage
        if stage is None:
            return self._pending
        if stage.do == self._send:
            if not stage.what.has_run():
                return None
            # As when it has been sent.
            return Pending(stage.what.snapshot(), stage.path, stage.since + 1)
        if stage.do == self._receive:
            return Pending(stage.what.results(), stage.path, stage.since)
        if stage.do == self._share:
            return Pending(self._of_sums(stage.what), stage.path, stage.since, is_summed=True)
        return Pending(stage.what, stage.path, stage.since, stage.do == self._learn_from)

    def load(self, state: dict) -> None:
        """Continue with the observations of a state. The bits that follow from them depend on this policy's settings.

        Args:
            state: the result of `state`. The whole state is checked before the policy changes.

        Raises:
            InputError: the argument was not returned by `state`, or is from another model.
        """
        found = state.get("version") if isinstance(state, Mapping) else type(state).__name__
        if type(found) is not int or found != VERSION:
            raise InputError(
                f"expected version {VERSION} of a controller's state, as its state_dict() gave it, got {shorten(found)}"
            )
        of_samples = {key: state[key] for key in SAMPLES if key in state}
        found = record(**COMMON, **self._shapes())(
            {key: value for key, value in state.items() if key not in SAMPLES}, ""
        )
        step, turns = found["step"], self._read_turns(found)
        pending = None
        if found["pending"] is not None:
            check_layer(found["path"], self._places, "module")
            since = whole(0, step + 1)(found["since"], "since")
            pending = Pending(
                self._of_plain(found["pending"]), found["path"], since, found["is_summed"]
            )
        learned = self._of_plain_learned(found)
        super().load(of_samples)
        with hold(self._lock):
            self._go_back((step, found["due"], turns, pending, learned))

    def _read_turns(self, found: dict) -> dict[str, tuple[int, int]]:
        turns = {}
        for i, (path, now, then) in enumerate(found["turns"]):
            check_layer(path, self._places, "module")
            if path in turns or not then <= now <= found["step"]:
                expected = f"each module once, and steps in order up to {found['step']}"
                raise wrong(f"turns[{i}]", expected, (path, now, then))
            turns[path] = now, then
        return turns


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _device_of(module, groups) -> torch.device:
    """That of the model; of its processes' collectives where those do not reach it (parameters on the host)."""
    parameter = next(module.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    reached = groups[0]._device_types if groups else [device]
    if device.type in {each.type for each in reached}:
        return device
    return torch.device(reached[0].type, torch.accelerator.current_device_index())


def _groups_of(module) -> tuple:
    """The groups of processes that train this model together, to be summed over one after the other; () for none.

    Those of the DistributedDataParallel whose forward runs, or of the mesh over which fully_shard has parameters.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return ()
    from torch.nn.parallel import DistributedDataParallel

    running = DistributedDataParallel._active_ddp_module
    if isinstance(module, DistributedDataParallel):
        running = module
    groups = (running.process_group,) if running is not None else _sharded_over(module)
    return tuple(each for each in groups if distributed.get_world_size(each) > 1)


def _sharded_over(module) -> tuple:
    from torch.distributed.fsdp import FSDPModule

    for each in module.modules():
        if isinstance(each, FSDPModule):
            state = each._get_fsdp_state()
            of_parameters = getattr(state, "_fsdp_param_group", None)
            if of_parameters is not None:
                mesh = of_parameters.mesh_info.mesh
                return tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
    return ()
