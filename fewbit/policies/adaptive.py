"""Level L3: bits go to the variables and samples where they lower the variance of the gradient most.

In some steps an `VarianceProbe` finds out what rounding each variable adds to that variance; from there ActNN's
Prob. (10) gives the bits of the following steps. In several processes all choose the same bits, as they follow from
sums over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from fewbit.config import MAX_BITS, MIN_BITS
from fewbit.policies.allocation import allocate
from fewbit.policies.probing import SLOTS, ProbingPolicy
from fewbit.policies.unobserved import FORGOTTEN
from fewbit.runtime.saved.probe import SPREAD, RoundingEffect
from fewbit.schema.shapes import (
    MOST_ELEMENTS,
    MOST_SLOTS,
    Shape,
    capped,
    check_layer,
    entries,
    flag,
    listed,
    optional,
    real,
    record,
    rows_by_name,
    text,
    whole,
)

INTERVAL = 200
MOMENTUM = 0.5
"""Of sensitivities, from one observation to the next."""
COLUMNS = 9 + SPREAD
"""Numbers of one variable that processes sum up."""

VARIABLE = record(
    name=text,
    input=whole(0, MOST_SLOTS - 1),
    bits=real(MIN_BITS, MAX_BITS),
    is_fixed=flag,
    is_known=flag,
    elements=whole(0, MOST_ELEMENTS),
    samples=whole(0, MOST_ELEMENTS),
    sensitivity=real(),
    at_one=real(),
    spread=optional(listed(real(), SPREAD, SPREAD)),
    missed=whole(0, FORGOTTEN),
)
SHAPES = {
    "budget": optional(whole(1)),
    "bits": real(MIN_BITS, MAX_BITS),
    "sizes": optional(listed(entries(text, whole(0, MOST_SLOTS - 1), whole(0, MOST_ELEMENTS)))),
    "variables": listed(VARIABLE),
    "pending": optional(listed(VARIABLE)),
}
"""The shapes (see `state_shapes`) of the entries in this policy's state."""


class AdaptivePolicy(ProbingPolicy):
    """Averages of variables under a budget of `bits` an element, over all of them that are not fixed.

    names, interval: as for `ProbingPolicy`. sizes: {name: elements} of those that the budget is for, in the forward that
    it is for; others then keep `bits`. None: all, as in the latest observation. budget: the bytes that `bits` and sizes
    follow from, or None.
    """

    def __init__(
        self,
        bits: float,
        names: Iterable[str],
        interval: int = INTERVAL,
        sizes: dict[tuple, int] | None = None,
        budget: int | None = None,
    ):
        super().__init__(names, interval)
        self.bits = bits
        self.sizes = sizes
        self.budget = budget
        self.seen: dict[tuple[str, int], RoundingEffect] = {}
        self._missed: dict[tuple[str, int], int] = {}  # observations in a row without a variable

    # -- Between processes -------------------------------------------------------------------------------

    def _table(self, seen: dict[tuple, RoundingEffect]) -> torch.Tensor:
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

    def _of_table(self, sums: torch.Tensor) -> dict[tuple, RoundingEffect]:
        table = sums.view(-1, COLUMNS)
        names = list(self._places)
        seen = {}
        for index in table[:, 0].nonzero()[:, 0].tolist():
            count, *numbers = table[index].tolist()
            elements, samples, sensitivity, at_one, average = numbers[:5]
            is_fixed, is_unknown, has_spread = (each > 0 for each in numbers[5:8])
            seen[names[index // SLOTS], index % SLOTS] = RoundingEffect(
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

    def _seen_names(self) -> set[str]:
        return {name for name, _ in self.seen}

    def _learn(self, seen: dict[tuple, RoundingEffect]) -> None:
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
        self.averages = _allocated(merged, self.bits, self.sizes)
        self.seen, self._missed = merged, missed

    # -- State -------------------------------------------------------------------------------------------

    def bits_of(self, name: tuple[str, int], seen: RoundingEffect) -> float:
        """Of the variable, as forwards have them now."""
        return seen.average if seen.is_fixed else self.averages.get(name, self.bits)

    def _learned(self) -> tuple:
        return self.bits, self.sizes, self.seen, self._missed, self.averages

    def _relearn(self, learned: tuple) -> None:
        self.bits, self.sizes, self.seen, self._missed, self.averages = learned

    def _plain(self, seen: dict[tuple, RoundingEffect]) -> list[dict]:
        return [_row(name, each, each.average) for name, each in seen.items()]

    def _of_plain(self, rows) -> dict[tuple, RoundingEffect]:
        named = rows_by_name(rows, "pending", self._places)
        return {name: _seen(each) for name, each in named.items()}

    def _shapes(self) -> dict[str, Shape]:
        return SHAPES

    def _plain_learned(self) -> dict:
        sizes = self.sizes
        return {
            "budget": self.budget,
            "bits": self.bits,
            "sizes": None if sizes is None else [[*name, n] for name, n in sizes.items()],
            "variables": [
                _row(name, each, self.bits_of(name, each), self._missed.get(name, 0))
                for name, each in self.seen.items()
            ],
        }

    def _of_plain_learned(self, state) -> tuple:
        rows = rows_by_name(state["variables"], "variables", self._places)
        bits, sizes = self.bits, self.sizes
        if state["budget"] is not None and state["budget"] == self.budget:
            # The same budget: what it comes to depends on weights, which may not be there yet.
            bits, sizes = state["bits"], _sizes(state["sizes"], self._places)
        seen = {name: _seen(each) for name, each in rows.items()}
        missed = {name: each["missed"] for name, each in rows.items() if each["missed"]}
        return bits, sizes, seen, missed, _allocated(seen, bits, sizes)


def _allocated(seen: dict[tuple, RoundingEffect], average: float, of) -> dict[tuple, float]:
    """Prob. (10) over parts of each variable: of its samples in the order of their ranges.

    average: of bits. of: {name: elements} that it is of, or None: as seen.
    """
    owners, sensitivity, at_one, elements = [], [], [], []
    for name, each in seen.items():
        size = each.elements if of is None else of.get(name, 0)
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
    budget = math.floor(average * sum(elements) + 1e-6)
    found = {}
    bits = allocate(sensitivity, elements, budget, at_one=at_one)
    for name, size, each in zip(owners, elements, bits, strict=True):
        total, number = found.get(name, (0, 0))
        found[name] = total + int(each) * size, number + size
    averages = {name: total / number for name, (total, number) in found.items()}
    if of is not None:
        # (Else a variable that is new keeps the average of its layer, which is the same.)
        rest = {name for name, each in seen.items() if not each.is_fixed} - averages.keys()
        averages.update(dict.fromkeys(rest, average))
    return averages


def _in_units_of(seen: dict, before: dict) -> dict:
    """What was known before, where losses may have been scaled otherwise: as large in all as what is seen now."""
    both = [name for name, each in seen.items() if name in before and each.is_known]
    now, then = (sum(of[name].sensitivity for name in both) for of in (seen, before))
    ratio = now / then if now > 0 and then > 0 else 1.0
    return {
        name: replace(
            each,
            sensitivity=capped(ratio * each.sensitivity),
            at_one=capped(ratio * each.at_one),
        )
        for name, each in before.items()
    }


def _sizes(rows, names) -> dict[tuple[str, int], int] | None:
    if rows is None:
        return None
    for name, _, _ in rows:
        check_layer(name, names)
    return {(name, slot): size for name, slot, size in rows}


def _row(name, seen: RoundingEffect, bits: float, missed: int = 0) -> dict:
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


def _seen(row: dict) -> RoundingEffect:
    return RoundingEffect(
        row["bits"],
        row["is_fixed"],
        row["elements"],
        row["samples"],
        row["sensitivity"],
        row["at_one"],
        row["spread"],
        row["is_known"],
    )


def _parts(seen: RoundingEffect) -> list[float]:
    """Shares of a variable's sensitivity, in parts of equal size, each of samples with like ranges."""
    count = min(seen.samples, SPREAD) or 1
    if seen.spread is None or count == 1:
        return [1.0 / count] * count
    points = seen.spread[:count]
    total = sum(points)
    return [each / total for each in points] if total > 0 else [1.0 / count] * count
