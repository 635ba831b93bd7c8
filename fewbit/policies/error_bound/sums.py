"""What processes that train together saw of error bounds, as one vector of fixed size that they sum up.

A variable has a row, with places for DEMANDS demands. Those are known by a number that follows from their label; what
processes do not agree on is left out, in all of them alike. With independent rounding in each process squared errors
add up, and the roots of sums of squared coefficients bound the root of the sum of all D (Minkowski).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping

import torch

from fewbit.policies.error_bound.probe import (
    EXPECTED,
    MEASURED,
    ActivationNorms,
    BoundsSeen,
    GradientConstraint,
    TensorNorms,
)
from fewbit.policies.probing import SLOTS
from fewbit.runtime.saved.probe import SPREAD

DEMANDS = 6
"""Of one variable; any others are one demand at the place of the last."""
OTHERS = "others"
_UNKNOWN = "gradient "  # and its number: what only other processes have seen
_NUMBERS = 1 << 20  # so that squares of sums over many processes are exact in float64
_FACTS = 7 + SPREAD
_COLUMNS = 9  # of a demand
_KINDS = (EXPECTED, MEASURED)


def number_of(label: str) -> int:
    """What a demand of that label is known by in all processes."""
    if label.startswith(_UNKNOWN) and label.removeprefix(_UNKNOWN).isdigit():
        return int(label.removeprefix(_UNKNOWN))
    return zlib.crc32(label.encode()) % _NUMBERS


class BoundTables:
    """For one model. names: of all quantizers there may be; channels: {name: how many}; activations: names of those.

    The same in every process.
    """

    def __init__(
        self, names: Iterable[str], channels: Mapping[str, int], activations: Iterable[str]
    ):
        self.names = list(names)
        self.channels = dict(channels)
        self.activations = list(activations)
        self._places = {name: number for number, name in enumerate(self.names)}
        self._functions = {}  # of activations, as this process has seen them
        self._labels = {}

    def table(self, seen: BoundsSeen) -> torch.Tensor:
        """(of fixed size,) float64 on the CPU."""
        rows = _zeros(len(self.names) * SLOTS, _FACTS + DEMANDS * _COLUMNS)
        for (name, slot), each in seen.variables.items():
            place = self._places.get(name)
            if place is not None and slot < SLOTS:
                row = self._row(each, seen.monitored.get((name, slot), ()))
                rows[place * SLOTS + slot] = torch.tensor(row, dtype=torch.float64, device="cpu")
        vectors = []
        for name, count in self.channels.items():
            found = seen.variables.get((name, 0))
            weights = None if found is None else found.channel_weights
            vector = _zeros(1 + count)
            if weights is not None and len(weights) == count:
                vector = torch.tensor([1.0, *weights], dtype=torch.float64, device="cpu")
            vectors.append(vector)
        activations = _zeros(len(self.activations), 3)
        for place, name in enumerate(self.activations):
            found = seen.activations.get(name)
            if found is not None:
                self._functions[name] = found.function, found.parameters
                numbers = 1.0, found.v2, found.grad2
                activations[place] = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return torch.cat([rows.flatten(), *vectors, activations.flatten()])

    def of_table(self, sums: torch.Tensor) -> BoundsSeen:
        """What all processes saw together."""
        width = _FACTS + DEMANDS * _COLUMNS
        sizes = [1 + count for count in self.channels.values()]
        parts = len(self.names) * SLOTS * width, *sizes, 3 * len(self.activations)
        rows, *vectors, activations = sums.split(parts)
        variables, monitored = {}, {}
        rows = rows.view(-1, width)
        for index in rows[:, 0].nonzero()[:, 0].tolist():
            name = self.names[index // SLOTS], index % SLOTS
            variables[name], monitored[name] = self._of_row(rows[index].tolist())
        for name, vector in zip(self.channels, vectors, strict=True):
            if vector[0] > 0 and (name, 0) in variables:
                variables[name, 0].channel_weights = (vector[1:] / vector[0]).tolist()
        found = {}
        for name, (count, v2, grad2) in zip(
            self.activations, activations.view(-1, 3).tolist(), strict=True
        ):
            if count:
                function, parameters = self._functions.get(name, ("", ()))
                found[name] = ActivationNorms(function, parameters, v2, grad2)
        return BoundsSeen(
            variables, found, {name: pairs for name, pairs in monitored.items() if pairs}
        )

    def _row(self, seen: TensorNorms, monitored) -> list[float]:
        numbers = seen.average, seen.elements, seen.samples, seen.dtype_bytes
        flags = seen.is_fixed, not seen.is_known
        squares = (*seen.squares, *[0.0] * SPREAD)[:SPREAD]
        row = [1.0, *map(float, (*numbers, *flags, *squares))]
        pairs = pairs_by_number(monitored)
        demands = combined(seen.demands)
        for number, each in demands:
            self._labels[number] = each.label
            kind = _KINDS.index(each.kind) if each.kind in _KINDS else 0
            coefficients = each.v2, each.first**2, each.second**2
            row += [1.0, number, number**2, kind, *coefficients, *pairs.get(number, (0.0, 0.0))]
        return row + [0.0] * (_COLUMNS * (DEMANDS - len(demands)))

    def _of_row(self, row) -> tuple[TensorNorms, list]:
        count, average, elements, samples, dtype_bytes, is_fixed, is_unknown, *rest = row
        squares, rest = rest[:SPREAD], rest[SPREAD:]
        demands, pairs, agrees = [], [], True
        for start in range(0, len(rest), _COLUMNS):
            times, number, square, kind, v2, first2, second2, hat2, exact2 = rest[
                start : start + _COLUMNS
            ]
            if not times:
                continue
            if times * square != number**2:  # not the same demand everywhere
                agrees = False
                continue
            number = round(number / times)
            label = self._labels.get(number, f"{_UNKNOWN}{number}")
            kind = _KINDS[kind > 0]
            demands.append(
                GradientConstraint(label, kind, v2, math.sqrt(first2), math.sqrt(second2))
            )
            if exact2 > 0:
                pairs.append((label, hat2, exact2))
        seen = TensorNorms(
            average / count,
            is_fixed > 0,
            round(elements),
            round(samples / count),
            squares,
            dtype_bytes=round(dtype_bytes / count),
            demands=demands,
            is_known=agrees and not is_unknown,
        )
        return seen, pairs


def combined(demands: Iterable[GradientConstraint]) -> list[tuple[int, GradientConstraint]]:
    """(number, demand), DEMANDS at most: those that have no place are one that stands for all."""
    found = sorted(by_number(demands).items())
    if len(found) > DEMANDS:
        rest = _strictest([each for _, each in found[DEMANDS - 1 :]])
        found[DEMANDS - 1 :] = [(number_of(OTHERS), rest)]
    return found


def by_number(demands: Iterable[GradientConstraint]) -> dict[int, GradientConstraint]:
    """Those of one number are one demand."""
    found: dict[int, list[GradientConstraint]] = {}
    for each in demands:
        found.setdefault(number_of(each.label), []).append(each)
    return {number: _strictest(each) for number, each in found.items()}


def pairs_by_number(monitored) -> dict[int, tuple[float, float]]:
    """{number of a demand: (|g^|^2, |g|^2)}, sums over calls."""
    found = {}
    for label, *pair in monitored:
        sums = found.get(number_of(label), (0.0, 0.0))
        found[number_of(label)] = tuple(a + b for a, b in zip(sums, pair, strict=True))
    return found


def _strictest(demands: list[GradientConstraint]) -> GradientConstraint:
    """One that allows no larger error than any of them."""
    if len(demands) == 1:
        return demands[0]
    labels = {each.label for each in demands}
    label = labels.pop() if len(labels) == 1 else OTHERS
    kind = _KINDS[any(each.kind != _KINDS[0] for each in demands)]
    v2 = 0.0
    if all(each.v2 > 0 for each in demands):
        v2 = sum(each.v2 for each in demands)
    scales = [math.sqrt(v2 / each.v2) if v2 > 0 else 1.0 for each in demands]
    first = max(each.first * scale for each, scale in zip(demands, scales, strict=True))
    second = max(each.second * scale for each, scale in zip(demands, scales, strict=True))
    return GradientConstraint(label, kind, v2, first, second)


def _zeros(*shape) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64, device="cpu")
