"""Level L3: bits go to the variables and samples where they lower the variance of the gradient most.

In some steps an `Observation` finds out what rounding each variable adds to that variance; from there ActNN's
Prob. (10) gives the bits of the following steps. Nothing here waits for a device within a step, and in several
processes all do the same, as bits follow from sums over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import distributed

from fewbit.compress.allocation import allocate
from fewbit.errors import InputError
from fewbit.runtime.arrival import Arrival
from fewbit.runtime.observation import SPREAD, Observation, Seen
from fewbit.runtime.variables import LEAST, MOST, Plan, Variables

INTERVAL = 200
SLOTS = 3
"""Inputs of one layer that it keeps, at most: q, k and v."""
MOMENTUM = 0.5
"""Of sensitivities, from one observation to the next."""
LAG = 2
"""Steps after which several processes go on with what they began; one process goes on when it can."""
VERSION = 1


def check_interval(interval) -> None:
    """Raises InputError if it is not a whole number of steps, 1 or more."""
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise InputError(
            f"expected a whole number of steps, 1 or more, for interval, got {interval!r}"
        )


class Adaptation(Variables):
    """Averages of variables under a budget of `bits` an element, over all of them that are not fixed.

    names: of all quantisers that the model may have, the same in every process. interval: steps from one
    observation to the next; the first are in steps 1, 2, 4, 8 ...
    """

    def __init__(self, bits: float, names: Iterable[str], interval: int = INTERVAL):
        super().__init__()
        self.bits = bits
        self.interval = interval
        self.step = 0
        self.seen: dict[tuple[str, int], Seen] = {}
        self._places = {name: number for number, name in enumerate(names)}
        self._group = None  # of processes that train one model
        self._stage = (
            None  # what is under way: (since which step, what is to be done next, with what)
        )

    def __getstate__(self):
        return {**vars(self), "_group": None, "_stage": None}

    # -- In a forward ------------------------------------------------------------------------------------

    def begin(self, module, inputs) -> Plan:
        if _is_capturing():
            return super().begin(module, inputs)
        self._group = _group_of(module)
        while self._stage is not None and self._go_on():
            pass
        self.step += 1
        observation = None
        if self._is_observed(self.step):
            # (What an earlier one has not come to by now, it will not.)
            observation = Observation(self.step)
            self._stage = self.step, self._send, observation
        return super().begin(module, inputs, observation)

    def _is_observed(self, step: int) -> bool:
        return step % self.interval == 0 or (step < self.interval and step & (step - 1) == 0)

    def _go_on(self) -> bool:
        """Does what is to be done next, if it can be done; says whether it was."""
        since, do, what = self._stage
        if self._group is None:
            if not (what.has_run() if do == self._send else what.is_there()):
                return False
        elif self.step < since + LAG:
            return False
        following = do(what)
        self._stage = None if following is None else (self.step, *following)
        return True

    def _send(self, observation: Observation):
        observation.send()
        return self._receive, observation

    def _receive(self, observation: Observation):
        seen = observation.results()
        if self._group is None:
            self._learn(seen)
            return None
        sums = torch.tensor(self._rows(seen), dtype=torch.float64)
        if distributed.get_backend(self._group) == "nccl":
            sums = sums.pin_memory().to("cuda", non_blocking=True)
        distributed.all_reduce(sums, group=self._group)
        return self._share, Arrival([sums])

    def _share(self, arrival: Arrival):
        ((entries),) = arrival.values().values()
        self._learn(self._of_rows(entries))

    # -- Between processes -------------------------------------------------------------------------------

    _WIDTH = 6 + SPREAD

    def _rows(self, seen: dict[tuple, Seen]) -> list[float]:
        """A row for each variable that there may be: its number in a process is its number in all."""
        rows = [0.0] * (len(self._places) * SLOTS * self._WIDTH)
        for (name, slot), each in seen.items():
            number = self._places.get(name)
            if number is None or slot >= SLOTS:
                continue
            at = (number * SLOTS + slot) * self._WIDTH
            spread = each.spread or [0.0] * SPREAD
            rows[at : at + self._WIDTH] = [
                1.0,
                float(each.elements),
                float(each.samples),
                each.sensitivity,
                each.average,
                float(each.is_fixed),
                *spread,
            ]
        return rows

    def _of_rows(self, rows: list[float]) -> dict[tuple, Seen]:
        seen = {}
        for name, number in self._places.items():
            for slot in range(SLOTS):
                at = (number * SLOTS + slot) * self._WIDTH
                count, *sums = rows[at : at + self._WIDTH]
                if count:
                    elements, samples, sensitivity, average, is_fixed, *spread = sums
                    each = Seen(average / count, is_fixed > 0)
                    each.elements, each.samples = round(elements), round(samples / count)
                    each.sensitivity = sensitivity
                    each.spread = spread if each.samples else None
                    seen[name, slot] = each
        return seen

    # -- Bits --------------------------------------------------------------------------------------------

    def _learn(self, seen: dict[tuple, Seen]) -> None:
        """Takes an observation in, and chooses bits anew."""
        if not any(each.sensitivity > 0 for each in seen.values()):
            return
        for name, each in seen.items():
            before = self.seen.get(name)
            if before is not None:
                old, new = MOMENTUM, 1 - MOMENTUM
                each.sensitivity = old * before.sensitivity + new * each.sensitivity
            self.seen[name] = each
        self.averages = self._allocated()

    def _allocated(self) -> dict[tuple, float]:
        """Prob. (10) over parts of each variable: of its samples in the order of their ranges."""
        owners, sensitivity, elements = [], [], []
        for name, each in self.seen.items():
            if each.is_fixed:
                continue
            parts = _parts(each)
            owners += [name] * len(parts)
            sensitivity += [each.sensitivity * part for part in parts]
            elements += [max(each.elements // len(parts), 1)] * len(parts)
        if not owners:
            return {}
        budget = math.floor(self.bits * sum(elements) + 1e-6)
        found = {}
        for name, bits in zip(owners, allocate(sensitivity, elements, budget), strict=True):
            found.setdefault(name, []).append(int(bits))
        return {name: sum(bits) / len(bits) for name, bits in found.items()}

    # -- State -------------------------------------------------------------------------------------------

    def state(self) -> dict:
        """What `load` makes again: plain numbers and strings."""
        if self._group is None:
            while self._stage is not None and self._go_on():  # as the next forward would
                pass
        return {
            **super().state(),
            "version": VERSION,
            "bits": self.bits,
            "interval": self.interval,
            "step": self.step,
            "variables": [
                {
                    "name": name,
                    "input": slot,
                    "bits": self.averages.get((name, slot), each.average),
                    "is_fixed": each.is_fixed,
                    "elements": each.elements,
                    "samples": each.samples,
                    "sensitivity": each.sensitivity,
                    "spread": each.spread,
                }
                for (name, slot), each in self.seen.items()
            ],
        }

    def load(self, state: dict) -> None:
        """Raises InputError, with nothing changed, for a state that is not one of `state`."""
        seen, averages = {}, {}
        try:
            if state["version"] != VERSION:
                raise InputError(
                    f"expected version {VERSION} of a controller's state, got {state['version']!r}"
                )
            bits, interval, step = float(state["bits"]), int(state["interval"]), int(state["step"])
            for row in state["variables"]:
                name = str(row["name"]), int(row["input"])
                each = Seen(float(row["bits"]), bool(row["is_fixed"]))
                each.elements, each.samples = int(row["elements"]), int(row["samples"])
                each.sensitivity, each.spread = float(row["sensitivity"]), row["spread"]
                seen[name] = each
                if not LEAST <= each.average <= MOST:
                    raise InputError(
                        f"expected bits from {LEAST} to {MOST} for {name[0]}, got {each.average}"
                    )
                if not each.is_fixed:
                    averages[name] = each.average
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"expected what a controller's state_dict() gave, got {type(state).__name__} "
                f"without a usable {error}"
            ) from None
        super().load(state)
        self.bits, self.interval, self.step = bits, interval, step
        self.seen, self.averages, self._stage = seen, averages, None


def _parts(seen: Seen) -> list[float]:
    """Shares of a variable's sensitivity, in parts of equal size, each of samples with like ranges."""
    count = min(seen.samples, SPREAD) or 1
    if seen.spread is None or count == 1 or not sum(seen.spread) > 0:
        return [1.0 / count] * count
    points = [seen.spread[int((i + 0.5) / count * SPREAD)] for i in range(count)]
    total = sum(points)
    return [each / total for each in points] if total > 0 else [1.0 / count] * count


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _group_of(module):
    """The processes that train this model together; None for a process of its own.

    Those of the DistributedDataParallel whose forward runs, and all where fully_shard has the parameters.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    running = DistributedDataParallel._active_ddp_module
    if running is not None:
        group = running.process_group
    elif isinstance(module, FSDPModule):
        group = distributed.group.WORLD
    else:
        return None
    return None if distributed.get_world_size(group) == 1 else group
