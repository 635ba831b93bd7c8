"""Level L3: bits go to the variables and samples where they lower the variance of the gradient most.

In some steps an `Observation` finds out what rounding each variable adds to that variance; from there ActNN's
Prob. (10) gives the bits of the following steps. In several processes all choose the same bits, as they follow from
sums over all of them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import distributed

from fewbit.compress.allocation import allocate
from fewbit.errors import InputError
from fewbit.runtime.arrival import Arrival
from fewbit.runtime.observation import SPREAD, Observation, Seen
from fewbit.runtime.sharing import PATH
from fewbit.runtime.variables import LEAST, MOST, Plan, Variables

INTERVAL = 200
SLOTS = 3
"""Inputs of one layer that it keeps, at most: q, k and v."""
MOMENTUM = 0.5
"""Of sensitivities, from one observation to the next."""
LAG = 2
"""Steps that several processes with GPUs give numbers to arrive; a process of its own looks whether they have."""
PATIENCE = 16
"""Forwards that an observation waits for a backward pass, or for a module of the model whose turn it is."""
FORGOTTEN = 8
"""Observations after which a variable that is not met any more is forgotten."""
COLUMNS = 9 + SPREAD
"""Numbers of one variable that processes sum up."""
VERSION = 1


def check_interval(interval) -> None:
    """Raises InputError if it is not a whole number of steps, 1 or more."""
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise InputError(
            f"expected a whole number of steps, 1 or more, for interval, got {interval!r}"
        )


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
class _Pending:
    """What was seen, to be learned from. path, since: as of its stage. is_summed: over all processes."""

    seen: dict[tuple, Seen]
    path: str
    since: int
    is_summed: bool = False

    def rows(self) -> list[dict]:
        return [_row(name, each, each.average) for name, each in self.seen.items()]


class Adaptation(Variables):
    """Averages of variables under a budget of `bits` an element, over all of them that are not fixed.

    names: of all quantisers that the model may have, the same in every process. interval: steps from one
    observation to the next; the first are in steps 1, 2, 4, 8 ... sizes: {name: elements} of those that the budget
    is for, in the forward that it is for; others then keep `bits`. None: all, as in the latest observation.
    budget: the bytes that `bits` and sizes follow from, or None.
    """

    def __init__(
        self,
        bits: float,
        names: Iterable[str],
        interval: int = INTERVAL,
        sizes: dict[tuple, int] | None = None,
        budget: int | None = None,
    ):
        super().__init__()
        self.bits = bits
        self.interval = interval
        self.sizes = sizes
        self.budget = budget
        self.step = 0
        self.seen: dict[tuple[str, int], Seen] = {}
        self._missed: dict[tuple[str, int], int] = {}  # observations in a row without a variable
        self._places = {name: number for number, name in enumerate(names)}
        self._is_joint = False  # whether several processes train the model
        self._before_alone = None  # what was known before steps outside of them
        self._is_due = False
        self._turns: dict[str, tuple[int, int]] = {}  # of modules: step now, when last observed
        self._stage: _Stage | None = None
        self._pending: _Pending | None = None  # seen before a stop
        self._lock = threading.Lock()

    def __getstate__(self):
        return {**vars(self), "_stage": None, "_lock": None, "_is_joint": False}

    def __setstate__(self, state):
        vars(self).update(state)
        self._lock = threading.Lock()

    # -- In a forward ------------------------------------------------------------------------------------

    def begin(self, module, inputs) -> Plan:
        plan = super().begin(module, inputs)
        if _is_capturing() or torch._C._functorch.maybe_current_level() is not None:
            return plan
        groups = _groups_of(module)
        with self._lock:
            path = vars(module).get(PATH, "")
            plan.observation = self._observation(path, groups, _device_of(module, groups))
        plan.averages = self.averages
        return plan

    def _observation(self, path, groups, device) -> Observation | None:
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
        observation = Observation(self.step)
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
        progress = self.step, self._is_due, dict(self._turns), self._pending
        return *progress, self.seen, self._missed, self.averages

    def _go_back(self, known: tuple) -> None:
        self.step, self._is_due, self._turns, self._pending, *found = known
        self.seen, self._missed, self.averages = found
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

    def _send(self, observation: Observation, groups, device):
        observation.send()
        return self._receive, observation

    def _receive(self, observation: Observation, groups, device):
        seen = observation.results()
        if groups:
            return self._reduce(seen, groups, device)
        self._learn(seen)
        return None

    def _reduce(self, seen: dict[tuple, Seen], groups, device):
        sums = self._table(seen)
        if device.type == "cuda":
            sums = sums.pin_memory().to(device, non_blocking=True)
        for group in groups:
            distributed.all_reduce(sums, group=group)
        return self._share, Arrival([sums])

    def _share(self, arrival: Arrival, groups, device):
        self._learn(self._of_sums(arrival))

    def _learn_from(self, seen: dict[tuple, Seen], groups, device):
        self._learn(seen)

    def _of_sums(self, arrival: Arrival) -> dict[tuple, Seen]:
        (entries,) = arrival.values().values()
        return self._of_table(torch.tensor(entries, dtype=torch.float64, device="cpu"))

    # -- Between processes -------------------------------------------------------------------------------

    def _table(self, seen: dict[tuple, Seen]) -> torch.Tensor:
        """A row for each variable that there may be, of fixed size and order: whether it was seen, and what."""
        rows = len(self._places) * SLOTS
        table = torch.zeros(rows, COLUMNS, dtype=torch.float64, device="cpu")
        for (name, slot), each in seen.items():
            place = self._places.get(name)
            if place is None or slot >= SLOTS:
                continue
            numbers = each.elements, each.samples, each.sensitivity, each.at_one, each.average
            flags = each.is_fixed, not each.is_known, each.spread is not None
            row = 1, *numbers, *flags, *(each.spread or [0.0] * SPREAD)
            table[place * SLOTS + slot] = torch.tensor(row, dtype=torch.float64, device="cpu")
        return table.flatten()

    def _of_table(self, sums: torch.Tensor) -> dict[tuple, Seen]:
        table = sums.view(-1, COLUMNS)
        names = list(self._places)
        seen = {}
        for index in table[:, 0].nonzero()[:, 0].tolist():
            count, *numbers = table[index].tolist()
            elements, samples, sensitivity, at_one, average = numbers[:5]
            is_fixed, is_unknown, has_spread = (each > 0 for each in numbers[5:8])
            seen[names[index // SLOTS], index % SLOTS] = Seen(
                average / count,
                is_fixed,
                round(elements),
                round(samples / count),
                sensitivity,
                at_one,
                numbers[8:] if has_spread else None,
                not is_unknown,
            )
        return seen

    # -- Bits --------------------------------------------------------------------------------------------

    def _learn(self, seen: dict[tuple, Seen]) -> None:
        """Takes an observation in, and chooses bits anew; nothing changes if that fails."""
        if not any(each.sensitivity > 0 for each in seen.values()):
            return
        merged = _in_units_of(seen, self.seen)
        for name, each in seen.items():
            before = merged.get(name)
            if before is not None and before.is_known:
                mixed = {
                    of: MOMENTUM * getattr(before, of) + (1 - MOMENTUM) * getattr(each, of)
                    for of in ("sensitivity", "at_one")
                }
                each = replace(each, **mixed)
            merged[name] = each
        missed = {name: self._missed.get(name, 0) + 1 for name in merged if name not in seen}
        merged = {name: each for name, each in merged.items() if missed.get(name, 0) <= FORGOTTEN}
        self.averages = self._allocated(merged)
        self.seen, self._missed = merged, missed

    def _allocated(self, seen: dict[tuple, Seen]) -> dict[tuple, float]:
        """Prob. (10) over parts of each variable: of its samples in the order of their ranges."""
        owners, sensitivity, at_one, elements = [], [], [], []
        for name, each in seen.items():
            size = each.elements if self.sizes is None else self.sizes.get(name, 0)
            if each.is_fixed or not each.is_known or not size:
                continue
            parts = _parts(each)
            owners += [name] * len(parts)
            sensitivity += [each.sensitivity * part for part in parts]
            # Between these the gain of a bit falls with bits, as the greedy algorithm needs it.
            first = min(max(each.at_one, 0.25 * each.sensitivity), 100 * each.sensitivity)
            at_one += [first * part for part in parts]
            elements += [max((size + i) // len(parts), 1) for i in range(len(parts))]
        if not owners:
            return {}
        budget = math.floor(self.bits * sum(elements) + 1e-6)
        found = {}
        bits = allocate(sensitivity, elements, budget, at_one=at_one)
        for name, size, each in zip(owners, elements, bits, strict=True):
            total, number = found.get(name, (0, 0))
            found[name] = total + int(each) * size, number + size
        averages = {name: total / number for name, (total, number) in found.items()}
        if self.sizes is not None:
            # (Else a variable that is new keeps the average of its layer, which is the same.)
            rest = {name for name, each in seen.items() if not each.is_fixed} - averages.keys()
            averages.update(dict.fromkeys(rest, self.bits))
        return averages

    # -- State -------------------------------------------------------------------------------------------

    def state(self) -> dict:
        """What `load` makes again: plain numbers and strings. Waits for numbers that are on their way.

        Nothing changes by it: one of several processes may save, and others not.
        """
        with self._lock:
            pending = self._under_way()
        return {
            **super().state(),
            "version": VERSION,
            "step": self.step,
            "due": self._is_due,
            "turns": [[path, *steps] for path, steps in self._turns.items()],
            "budget": self.budget,
            "bits": self.bits,
            "sizes": None if self.sizes is None else [[*name, n] for name, n in self.sizes.items()],
            "variables": [
                _row(name, each, self.bits_of(name, each), self._missed.get(name, 0))
                for name, each in self.seen.items()
            ],
            "pending": None if pending is None else pending.rows(),
            "path": "" if pending is None else pending.path,
            "since": 0 if pending is None else pending.since,
            "is_summed": pending is not None and pending.is_summed,
        }

    def bits_of(self, name: tuple[str, int], seen: Seen) -> float:
        """Of the variable, as forwards have them now."""
        return seen.average if seen.is_fixed else self.averages.get(name, self.bits)

    def _under_way(self) -> _Pending | None:
        """What was seen and has not been learned from."""
        stage = self._stage
        if stage is None:
            return self._pending
        if stage.do == self._send:
            if not stage.what.has_run():
                return None
            return _Pending(
                stage.what.snapshot(), stage.path, stage.since + 1
            )  # as when it has been sent
        if stage.do == self._receive:
            return _Pending(stage.what.results(), stage.path, stage.since)
        if stage.do == self._share:
            return _Pending(self._of_sums(stage.what), stage.path, stage.since, is_summed=True)
        return _Pending(stage.what, stage.path, stage.since, stage.do == self._learn_from)

    def load(self, state: dict) -> None:
        """Goes on with what was seen; the bits that follow are those of this budget.

        Raises InputError, with nothing changed, for a state that is not one of `state`, or is of another model.
        """
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            found = state.get("version") if isinstance(state, Mapping) else type(state).__name__
            raise InputError(
                f"expected version {VERSION} of a controller's state, as its state_dict() gave it, got {found!r}"
            )
        step, is_due = _read(state, "step", check_step), _read(state, "due", bool)
        turns, path = _read(state, "turns", _turns), _read(state, "path", str)
        rows = _read(state, "variables", self._rows)
        pending = _read(state, "pending", lambda rows: None if rows is None else self._rows(rows))
        since, is_summed = _read(state, "since", check_step), _read(state, "is_summed", bool)
        budget = _read(state, "budget", lambda size: size)
        bits, sizes = self.bits, self.sizes
        if budget is not None and budget == self.budget:
            # The same budget: what it comes to depends on weights, which may not be there yet.
            bits, sizes = _read(state, "bits", float), _read(state, "sizes", _sizes)
        seen = {name: each for name, each, _ in rows}
        before = self.bits, self.sizes
        self.bits, self.sizes = bits, sizes
        try:
            averages = self._allocated(seen)
            super().load(state)
        except BaseException:
            self.bits, self.sizes = before
            raise
        if pending is not None:
            pending = _Pending({name: each for name, each, _ in pending}, path, since, is_summed)
        missed = {name: missed for name, _, missed in rows if missed}
        with self._lock:
            self._go_back((step, is_due, turns, pending, seen, missed, averages))

    def _rows(self, rows) -> list:
        found = [_of_row(row) for row in rows]
        for (name, _), _, _ in found:
            if name not in self._places:
                raise InputError(
                    f"expected the state of this model's controller, got one with a layer {name!r}, which it lacks"
                )
        return found


def _in_units_of(seen: dict, before: dict) -> dict:
    """What was known before, where losses may have been scaled otherwise: as large in all as what is seen now."""
    both = [name for name, each in seen.items() if name in before and each.is_known]
    now, then = (sum(of[name].sensitivity for name in both) for of in (seen, before))
    ratio = now / then if now > 0 and then > 0 else 1.0
    return {
        name: replace(each, sensitivity=ratio * each.sensitivity, at_one=ratio * each.at_one)
        for name, each in before.items()
    }


def _sizes(rows) -> dict[tuple[str, int], int]:
    return {(str(name), int(slot)): check_step(size) for name, slot, size in rows}


def _turns(rows) -> dict[str, tuple[int, int]]:
    return {str(path): (check_step(now), check_step(then)) for path, now, then in rows}


def _read(state, key: str, of):
    """An entry of a state. Raises InputError where it is not one."""
    try:
        return of(state[key])
    except InputError:
        raise
    except (KeyError, TypeError, ValueError):
        raise InputError(
            f"expected what a controller's state_dict() gave, got one without usable {key!r}"
        ) from None


def check_step(step) -> int:
    """Raises InputError if it is not a whole number of 0 or more."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise InputError(f"expected a whole number of steps of 0 or more, got {step!r}")
    return step


def _row(name, seen: Seen, bits: float, missed: int = 0) -> dict:
    """A variable as plain numbers."""
    return {
        "name": name[0],
        "input": name[1],
        "bits": bits,
        "is_fixed": seen.is_fixed,
        "is_known": seen.is_known,
        "elements": seen.elements,
        "samples": seen.samples,
        "sensitivity": seen.sensitivity,
        "at_one": seen.at_one,
        "spread": seen.spread,
        "missed": missed,
    }


def _of_row(row) -> tuple[tuple[str, int], Seen, int]:
    """(name, what was seen, observations missed). Raises InputError, KeyError, TypeError or ValueError."""
    name = str(row["name"]), int(row["input"])
    spread = row["spread"]
    numbers = [float(row[each]) for each in ("bits", "sensitivity", "at_one")]
    bits, sensitivity, at_one = numbers
    if not LEAST <= bits <= MOST:
        raise InputError(f"{name[0]}: expected bits from {LEAST} to {MOST}, got {bits}")
    if spread is not None:
        spread = [float(each) for each in spread]
    if not all(math.isfinite(each) and each >= 0 for each in (*numbers, *(spread or ()))):
        raise InputError(f"{name[0]}: expected finite sensitivities of 0 or more, got {dict(row)}")
    if spread is not None and len(spread) != SPREAD:
        raise InputError(f"{name[0]}: expected {SPREAD} numbers for spread, got {len(spread)}")
    seen = Seen(
        bits,
        bool(row["is_fixed"]),
        check_step(row["elements"]),
        check_step(row["samples"]),
        sensitivity,
        at_one,
        spread,
        bool(row["is_known"]),
    )
    return name, seen, check_step(row["missed"])


def _parts(seen: Seen) -> list[float]:
    """Shares of a variable's sensitivity, in parts of equal size, each of samples with like ranges."""
    count = min(seen.samples, SPREAD) or 1
    if seen.spread is None or count == 1:
        return [1.0 / count] * count
    points = seen.spread[:count]
    total = sum(points)
    return [each / total for each in points] if total > 0 else [1.0 / count] * count


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
