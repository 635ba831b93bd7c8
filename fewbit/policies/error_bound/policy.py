"""policy="error-bound": the fewest bits with which the error of the gradient stays within a bound (AC-GC).

In some steps a `ErrorBoundProbe` finds out how large errors of what each layer keeps may be: of every gradient that it
goes into V^2, and D as a function of the mean squared error dx^2. D(dx*) = e^2 V^2 gives dx*; the smallest dx* of a
variable's demands gives its bits for the steps up to the next observation (docs/error_bound.md).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch

from fewbit.errors import BoundWarning, FewbitError, InputError
from fewbit.policies.error_bound.codecs import CodecKeeper, Exactly, Latest
from fewbit.policies.error_bound.estimates import (
    WINDOWS,
    Estimate,
    Known,
    KnownActivation,
    Pair,
    Row,
    latest,
    ratio_of,
    total_of,
)
from fewbit.policies.error_bound.probe import BoundsSeen, ErrorBoundProbe, TensorNorms
from fewbit.policies.error_bound.state import (
    ACTIVATION,
    KNOWN,
    SEEN,
    plain_known,
    plain_seen,
    read_activations,
    read_known,
    read_seen,
)
from fewbit.policies.error_bound.sums import BoundTables, by_number, pairs_by_number
from fewbit.policies.error_bound.tables import is_known, least_bits, table_error
from fewbit.policies.probing import ProbingPolicy
from fewbit.policies.unobserved import FORGOTTEN
from fewbit.runtime.codecs import DEFAULT as QUANT
from fewbit.runtime.codecs.payload import EXACT
from fewbit.runtime.format.groups import LEAST_FEATURES
from fewbit.runtime.saved.assignment import LEAST, MOST, BitAssignment, Weights
from fewbit.runtime.saved.probe import SPREAD
from fewbit.schema.shapes import (
    MOST_RATIO,
    MOST_STEPS,
    Shape,
    capped,
    choice,
    flag,
    optional,
    real,
    text,
    whole,
)

E2, INTERVAL, WINDOW = 0.5, 100, "mean"
POLICY = "error-bound"
NAMED = 3
"""Layers that a warning names."""
WORST = "worst case"
"""The kind of an activation's bound."""
_NOTHING = BoundsSeen({}, {}, {})


@dataclass(frozen=True)
class Bound:
    """What may err, and how it is kept. e2: of the gradient's squared error, in units of V^2.

    window: "mean" or "max" of the last observations. codec: a name of `codecs`. by_channel: bits go to channels of samples.
    """

    e2: float = E2
    window: str = WINDOW
    codec: str = QUANT
    by_channel: bool = False


class Choice(NamedTuple):
    """For one variable. average: bits; None: kept exactly, or by a codec. dx2: dx*^2. demand: whose it is."""

    average: float | None
    dx2: float
    demand: Estimate | None = None


class ErrorBoundPolicy(ProbingPolicy):
    """Bits of each variable and activation by what its error may be.

    names, interval: as for `ProbingPolicy`. channels: {name: how many} of layers that have some. activations: names of the
    few-bit activations that take part. given: {name: bits} of few-bit activations that do not, as their bits were given.
    """

    def __init__(
        self,
        bound: Bound,
        names: Iterable[str],
        interval: int = INTERVAL,
        channels: Mapping[str, int] | None = None,
        activations: Iterable[str] = (),
        given: Mapping[str, int] | None = None,
    ):
        names = list(names)
        super().__init__(names, interval)
        self.bound = bound
        self.known: dict[tuple[str, int], Known] = {}
        self.known_activations: dict[str, KnownActivation] = {}
        self.choices: dict[tuple[str, int], Choice] = {}
        self.activations: dict[str, int] = {}
        self._channels = dict(channels or {}) if bound.by_channel else {}
        self.given = dict(given or {})
        self._of_activations = frozenset(activations) | self.given.keys()
        self._tables = BoundTables(names, self._channels, sorted(self._of_activations))
        self._next = 0  # number among the known variables, which the monitor takes in turn
        self._has_warned = False
        self._keepers = {}
        self._weights = {}
        self._latest: dict[tuple[str, int], Latest] = {}  # of what codecs have kept in this process

    # -- In a forward ------------------------------------------------------------------------------------

    def plan(self, inputs, observation=None) -> BitAssignment:
        plan = super().plan(inputs, observation)
        self._tell(plan)
        return plan

    def _tell(self, plan: BitAssignment) -> None:
        super()._tell(plan)
        plan.keepers, plan.activations = self._keepers, self.activations
        plan.channels, plan.weights = self._channels, self._weights
        # Groups run across shorter samples, and so do their errors.
        plan.least_features = LEAST_FEATURES
        plan.rounds_up = True

    def _new_observation(self) -> ErrorBoundProbe:
        return ErrorBoundProbe(self.step, frozenset(self._monitored()))

    def _monitored(self) -> list[tuple[str, int]]:
        """The variables whose exact values are kept beside: those whose turn it is, as many as the largest has room for."""
        names, taken = list(self.known), []
        sizes = {
            name: each.elements * each.dtype_bytes
            for name, each in self.known.items()
            if not self._is_exact(name)
        }
        room, start = max(sizes.values(), default=0), self._next % max(len(names), 1)
        for name in names[start:] + names[:start]:
            if name not in sizes:
                continue
            if sizes[name] > room:
                break
            room -= sizes[name]
            taken.append(name)
        return taken

    def _following(self, seen: BoundsSeen, known) -> int:
        """`_next` after that observation, what is known then being `known`.

        Only what was seen moves it: of forwards that were passed over, or that did not meet those whose turn it was,
        as of another module of the model, that turn is still to come.
        """
        names, turn = list(self.known), self._monitored()
        if not turn:
            return self._next
        unmet = [name for name in turn if name not in seen.variables]
        end = names.index(unmet[0]) if unmet else names.index(turn[-1]) + 1
        return sum(name in known for name in names[:end]) % max(len(known), 1)

    def _is_exact(self, name) -> bool:
        return not self.known[name].is_fixed and isinstance(self._keepers.get(name), Exactly)

    # -- Learning ----------------------------------------------------------------------------------------

    def _learn(self, seen: BoundsSeen | None) -> None:
        seen = seen or _NOTHING
        total = math.fsum(each.v2 for of in seen.variables.values() for each in of.demands)
        total = total or math.fsum(each.v2 for each in seen.activations.values())
        if not 0 < total < math.inf:
            return
        known = {}
        for name in {**self.known, **seen.variables}:
            before, now = self.known.get(name), seen.variables.get(name)
            if now is not None:
                if name[0] not in self._channels or name[1]:
                    now = replace(now, channel_weights=None)
                known[name] = _updated(before, now, seen.monitored.get(name, ()), total)
            elif before.missed < FORGOTTEN:
                known[name] = replace(before, missed=before.missed + 1)
        activations = self._learned_activations(seen.activations, total)
        chosen, self._next = self._chosen(known, activations), self._following(seen, known)
        self.known, self.known_activations = known, activations
        self._choose(*chosen)
        self._warn()

    def _learned_activations(self, seen, total: float) -> dict[str, KnownActivation]:
        found = {}
        for name in {**self.known_activations, **seen}:
            before, now = self.known_activations.get(name), seen.get(name)
            if now is None and before.missed < FORGOTTEN:
                found[name] = replace(before, missed=before.missed + 1)
            elif now is not None and name in self._of_activations:
                rows = () if before is None else before.rows
                function, parameters = now.function, tuple(now.parameters)
                if not function and before is not None:
                    function, parameters = before.function, before.parameters
                row = capped(now.v2 / total), capped(now.grad2 / total)
                found[name] = KnownActivation(function, parameters, latest(rows, row))
        return found

    def _chosen(self, known, activations) -> tuple[dict, dict]:
        """(choices by variable, bits by activation)."""
        choices = {name: self._choice(each) for name, each in known.items() if not each.is_fixed}
        e2, window = self.bound.e2, self.bound.window
        bits = {
            name: least_bits(each.function, each.parameters, each.allowed(e2, window)) or MOST
            for name, each in activations.items()
            if name not in self.given and _has_tables(each)
        }
        return choices, bits

    def _choice(self, known: Known) -> Choice:
        dx2, demand = known.deciding(self.bound.e2, self.bound.window)
        if demand is None and known.is_known:
            return Choice(float(LEAST), dx2)  # no gradient is made of it
        if known.is_known and (dx2 == 0 or self.bound.codec != QUANT):
            return Choice(None, dx2, demand)
        average = known.least_average(dx2, self.bound.window)
        if average is not None and not known.is_known:
            average = float(MOST)  # of gradients that were not seen nothing is known
        return Choice(average, dx2, demand)

    def _choose(self, choices: dict, bits: dict) -> None:
        self.choices, self.activations = choices, bits
        self.averages = {
            name: each.average for name, each in choices.items() if each.average is not None
        }
        self._weights = {
            name: Weights(each.weights)
            for (name, slot), each in self.known.items()
            if slot == 0 and each.weights is not None and name in self._channels
        }
        self._keepers = {
            name: self._keeper(name, each) for name, each in choices.items() if each.average is None
        }

    def _keeper(self, name, choice: Choice):
        is_known = self.known[name].is_known
        if choice.dx2 == 0 or not is_known or self.bound.codec == QUANT:
            return Exactly()
        weights, channels = self.known[name].weights, None
        if self.bound.by_channel and weights is not None:
            channels = tuple(choice.dx2 / each if each > 0 else math.inf for each in weights)
        latest = self._latest.setdefault(name, Latest())
        return CodecKeeper(self.bound.codec, choice.dx2, channels, latest)

    # -- The monitor -------------------------------------------------------------------------------------

    @property
    def ratio(self) -> float | None:
        """E|g^|^2 / E|g|^2 in all, of parameters' gradients if any were seen; None before the monitor has seen any.

        What is kept exactly counts as exact; the monitor does not look at it.
        """
        of_parameters, of_all = total_of(self._monitored_so_far())
        return ratio_of(of_parameters if of_parameters.exact2 > 0 else of_all)

    def _monitored_so_far(self) -> list[tuple[Known, bool]]:
        """With whether it is kept exactly."""
        return [(known, self._is_exact(name)) for name, known in self.known.items()]

    def _is_exceeded(self) -> bool:
        """Whether the ratio is above 1 + e2, by more than three standard errors: each observation is one draw."""
        known, limit = self._monitored_so_far(), 1 + self.bound.e2
        of_parameters = total_of(known)[0].exact2 > 0
        means, squares = zip(
            *(each.excess(limit, of_parameters, is_exact) for each, is_exact in known), strict=True
        )
        return math.fsum(means) > 3 * math.sqrt(math.fsum(squares))

    def _warn(self) -> None:
        """If the bound is exceeded, and not by chance."""
        ratio, limit = self.ratio, 1 + self.bound.e2
        if self._has_warned or ratio is None or not ratio > limit or not self._is_exceeded():
            return
        self._has_warned = True
        ratios = [(each.ratio, name) for name, each in self.known.items() if each.ratio is not None]
        worst = ", ".join(
            f"{name[0] or 'the model'} ({ratio:.3g}{', its bits are given' * self.known[name].is_fixed})"
            for ratio, name in sorted(ratios, reverse=True)[:NAMED]
        )
        warnings.warn(
            f"gradients are larger than their bound allows: E|g^|^2 / E|g|^2 is {ratio:.3g}, above 1 + e2 = {limit:.3g}; "
            f"most in {worst}. See controller.bounds; a smaller e2 keeps more bits, where they are not given",
            BoundWarning,
            stacklevel=2,
        )

    # -- What was found ----------------------------------------------------------------------------------

    def rows(self) -> list[tuple]:
        """The fields of `bounds.Bounded`, of all variables and activations."""
        e2, window, found = self.bound.e2, self.bound.window, []
        for name, known in self.known.items():
            choice = self.choices.get(name) or self._choice(known)
            keeper = None if known.is_fixed else self._keepers.get(name)
            average = known.average if known.is_fixed else choice.average
            demand = choice.demand or Estimate()
            kept = "bits"
            if isinstance(keeper, Exactly):
                kept, average = EXACT, None
            elif keeper is not None:
                kept, average = keeper.latest.kept or keeper.name, keeper.latest.bits
                average = None if kept == EXACT else average
            decides = demand.label, demand.kind, math.sqrt(choice.dx2)
            is_met = not known.is_fixed or self._are_enough(known, choice)
            rest = known.elements, known.is_fixed, is_met, known.ratio
            found.append((*name, *decides, kept, average, *rest))
        for name, each in reversed(self.known_activations.items()):  # the backward's order, turned
            bits = self.given.get(name, self.activations.get(name))
            if bits is None:
                continue
            allowed = each.allowed(e2, window)
            is_met = not _has_tables(each) or (
                table_error(each.function, each.parameters, bits) <= allowed
            )
            decides = "input", WORST, allowed
            is_given = name in self.given
            found.append((name, None, *decides, "bits", float(bits), None, is_given, is_met, None))
        return found

    def _are_enough(self, known: Known, choice: Choice) -> bool:
        """Whether bits that were given are as many as the bound asks for, as far as that is known."""
        if not known.is_known or choice.demand is None:
            return True
        least = known.least_average(choice.dx2, self.bound.window) if choice.dx2 > 0 else None
        return least is not None and known.average >= least

    def _seen_names(self) -> set[str]:
        return {name for name, _ in self.known}

    # -- Between processes -------------------------------------------------------------------------------

    def _table(self, seen: BoundsSeen | None) -> torch.Tensor:
        return self._tables.table(seen or _NOTHING)

    def _of_table(self, sums: torch.Tensor) -> BoundsSeen:
        return self._tables.of_table(sums)

    # -- State -------------------------------------------------------------------------------------------

    def state(self) -> dict:
        return {"policy": POLICY, **self._settings(), **super().state()}

    def _settings(self) -> dict:
        """What bits depend on, beside what is known."""
        return asdict(self.bound)

    def _learned(self) -> tuple:
        return self.known, self.known_activations, self._next, self._has_warned

    def _relearn(self, learned: tuple) -> None:
        self.known, self.known_activations, self._next, self._has_warned = learned
        self._choose(*self._chosen(self.known, self.known_activations))

    def _plain(self, seen: BoundsSeen | None) -> dict:
        return plain_seen(seen or _NOTHING)

    def _of_plain(self, plain) -> BoundsSeen:
        return read_seen(plain, self._places)

    def _plain_learned(self) -> dict:
        return {
            **plain_known(self.known, self.known_activations),
            "next": capped(self._next, MOST_STEPS),
            "has_warned": self._has_warned,
        }

    def _shapes(self) -> dict[str, Shape]:
        return {
            "policy": choice(POLICY),
            "e2": real(),
            "window": choice(*WINDOWS),
            "codec": text,
            "by_channel": choice(self.bound.by_channel),
            "variables": KNOWN,
            "activations": ACTIVATION,
            "next": whole(),
            "has_warned": flag,
            "pending": optional(SEEN),
        }

    def _of_plain_learned(self, state) -> tuple:
        known = read_known(state["variables"], self._places)
        activations = read_activations(state["activations"])
        taken = {name: each for name, each in activations.items() if name in self._of_activations}
        following, has_warned = state["next"], state["has_warned"]
        for (name, slot), each in known.items():
            count = self._channels.get(name) if slot == 0 else None
            if each.weights is not None and len(each.weights) != count:
                raise InputError(
                    f"expected weights of {count or 0} channels of {name!r}, got {len(each.weights)}"
                )
        try:  # only to find errors: `_chosen` runs again after all checks have passed
            self._chosen(known, taken)
        except FewbitError as error:  # there is no table for the function with these parameters
            raise InputError(f"activations: {error}") from None
        if any(state.get(key, value) != value for key, value in self._settings().items()):
            # What the monitor saw is of other bits.
            known, has_warned = {name: each.unmonitored() for name, each in known.items()}, False
        return known, taken, following, has_warned


def _has_tables(known: KnownActivation) -> bool:
    """Whether there are tables of its function, if that is known."""
    return bool(known.function) and is_known(known.function, known.parameters)


def _updated(before: Known | None, now: TensorNorms, monitored, total: float) -> Known:
    """What is known of a variable after one more observation."""
    parts = min(now.samples, SPREAD) or 1
    scale = (now.samples or 1) / now.elements if now.elements else 0.0
    spread = tuple(capped(scale * each) for each in now.squares[:parts])
    weights, weighed, spreads = None, 0, ()
    if before is not None:
        weights, weighed, spreads = before.weights, before.weighed, before.spreads
    if weighed == 1:
        spreads = ()  # they were those of channels that count alike
    if now.channel_weights is not None:
        if weights is None or len(weights) != len(now.channel_weights):
            weights, weighed = (0.0,) * len(now.channel_weights), 0
        weighed = min(weighed + 1, 10)
        pairs = zip(weights, now.channel_weights, strict=True)
        weights = tuple(old + (new - old) / weighed for old, new in pairs)
    return Known(
        now.average,
        now.is_fixed,
        now.is_known,
        now.elements,
        now.samples,
        now.dtype_bytes,
        latest(spreads, spread),
        weights,
        weighed,
        _updated_demands({} if before is None else before.demands, now, monitored, total),
    )


def _updated_demands(before: dict[int, Estimate], now, monitored, total) -> dict[int, Estimate]:
    seen = by_number(now.demands)
    pairs = pairs_by_number(monitored)
    found = {}
    for number in {**before, **seen}:
        each, demand = before.get(number, Estimate()), seen.get(number)
        if demand is None:
            if each.missed < FORGOTTEN:
                found[number] = replace(each, missed=each.missed + 1)
            continue
        squares = (capped(each**2 / total, MOST_RATIO) for each in (demand.first, demand.second))
        row = Row(demand.v2 / total, *squares)
        seen_pairs = each.pairs
        if number in pairs:
            seen_pairs = latest(
                seen_pairs, Pair(*(capped(value / total) for value in pairs[number]))
            )
        found[number] = Estimate(demand.label, demand.kind, latest(each.rows, row), seen_pairs)
    return found
