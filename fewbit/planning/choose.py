"""The exact solver of `fewbit.fit_`: one option for each part of a step, in the least time, within memory and error.

Part u with option o leaves saved[u][o] bytes for the backward pass. While it runs, in either pass, the step takes what the parts before
u have left, and peak[u][o] bytes. So a choice fits if for every part u

    saved[0][o_0] + ... + saved[u-1][o_{u-1}] + peak[u][o_u] <= memory.

The solver is a dynamic program. A *label* stands for a choice for the first parts: its bytes, error and seconds. A label is dropped if
another one is at least as good in all three, or if the Lagrangian lower bound of all choices that begin with it reaches the best known
choice. If a part has too many labels, those with the largest bounds are dropped, and the least of these bounds limits what is lost.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np

MOST_LABELS = 4000
"""The most labels of a part."""
FEW_LABELS = 60
ROUNDS = 60
"""The rounds in which the multipliers are improved."""


class Part(NamedTuple):
    """The options of one part of a step. All arrays have shape (options,).

    Attributes:
        saved: the bytes that the part leaves for the backward pass.
        peak: the bytes that exist while the part runs, without those that earlier parts have left.
        seconds: the time that the option adds to the step; it may be negative.
        error: the error that the option adds to the gradient, at least 0.
    """

    saved: np.ndarray
    peak: np.ndarray
    seconds: np.ndarray
    error: np.ndarray


class Choice(NamedTuple):
    """The result of `choose`.

    Attributes:
        options: the number of the chosen option, for each part.
        seconds: the sum of the seconds of the chosen options.
        bound: a lower bound of this sum for all choices that fit.
    """

    options: tuple[int, ...]
    seconds: float
    bound: float


def choose(
    parts: list[Part],
    memory: float,
    error: float = np.inf,
    tolerance: float = 0.0,
    most: int | None = None,
) -> Choice | None:
    """Return the choice with the least seconds that fits, or None if no choice fits.

    Args:
        parts: the parts in the order of the forward pass.
        memory: the bytes that the step may take.
        error: the largest sum of errors.
        tolerance: the seconds by which the result may exceed the least ones.
        most: the largest number of labels of a part; by default MOST_LABELS.
    """
    bounds = _Bounds(parts, memory, error)
    found = _search(parts, memory, error, bounds, FEW_LABELS, np.inf)
    if found is not None and not found.options:
        found = None
    limit = np.inf if found is None else found.seconds
    again = _search(parts, memory, error, bounds, most or MOST_LABELS, limit - tolerance)
    bound = again.bound if again is not None else limit - tolerance
    best = again if again is not None and again.options else found
    if best is None:
        return None
    return Choice(best.options, best.seconds, min(bound, best.seconds))


def peak_of(parts: list[Part], options) -> float:
    """Return the bytes that a step takes with these options."""
    before, most = 0.0, 0.0
    for part, option in zip(parts, options, strict=True):
        most = max(most, before + part.peak[option])
        before += part.saved[option]
    return most


def totals(parts: list[Part], options) -> tuple[float, float]:
    """Return the sums of the seconds and of the errors of these options."""
    chosen = list(zip(parts, options, strict=True))
    return (
        float(sum(part.seconds[option] for part, option in chosen)),
        float(sum(part.error[option] for part, option in chosen)),
    )


class _Bounds:
    """Lower bounds of the seconds of all parts from some part on."""

    def __init__(self, parts: list[Part], memory: float, error: float):
        # Every choice leaves at most so many bytes when the last part begins.
        self._bytes = memory - min(parts[-1].peak)
        self._error = error
        self._scale = np.array([max(abs(self._bytes), 1.0), error if 0 < error < np.inf else 1.0])
        tables = [np.stack([part.saved, part.error], 1) / self._scale for part in parts[:-1]]
        last = np.stack([0 * parts[-1].saved, parts[-1].error], 1) / self._scale
        self._tables, self._seconds = [*tables, last], [part.seconds for part in parts]
        self._room = np.array([self._bytes, error]) / self._scale
        self._is_finite = np.isfinite(self._room)
        best = self._improved()
        scales = (0.0, 0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)
        pairs = {(best[0] * a, best[1] * b) for a in scales for b in scales}
        self._pairs = np.array(sorted(pairs))
        self._suffix = [np.zeros(len(self._pairs))]
        for seconds, table in zip(self._seconds[::-1], self._tables[::-1], strict=True):
            values = seconds[:, None] + table @ self._pairs.T
            self._suffix.append(self._suffix[-1] + values.min(0))
        self._suffix.reverse()

    def _improved(self) -> np.ndarray:
        """Return multipliers with a large bound, by subgradient steps."""
        spread = max(sum(float(np.ptp(seconds)) for seconds in self._seconds), 1e-12)
        multipliers, best, most = np.zeros(2), np.zeros(2), -np.inf
        room = np.where(self._is_finite, self._room, 0.0)
        for number in range(ROUNDS):
            used, value = np.zeros(2), -float(multipliers @ room)
            for seconds, table in zip(self._seconds, self._tables, strict=True):
                costs = seconds + table @ multipliers
                option = int(np.argmin(costs))
                used, value = used + table[option], value + costs[option]
            if value > most:
                most, best = value, multipliers.copy()
            slope = np.where(self._is_finite, used - room, 0.0)
            size = float(np.abs(slope).max())
            if size < 1e-12:
                break
            step = 2 * spread / (1 + number) / max(size, 1e-3)
            multipliers = np.maximum(multipliers + step * slope, 0.0)
        return best

    def of(self, number: int, saved: np.ndarray, error: np.ndarray) -> np.ndarray:
        if number == len(self._seconds):
            return np.zeros(len(saved))
        room = np.stack([self._bytes - saved, self._error - error], 1) / self._scale
        room = np.where(self._is_finite, room, 0.0)
        return (self._suffix[number] - room @ self._pairs.T).max(1)


def _search(parts, memory, error, bounds: _Bounds, most: int, limit: float) -> Choice | None:
    """Return the best choice below the limit, one without options if there is none, or None if no label was dropped."""
    saved = errors = seconds = np.zeros(1)
    lost, history = np.inf, []
    for number, part in enumerate(parts):
        fits = saved[:, None] + part.peak <= memory
        within = errors[:, None] + part.error <= error * (1 + 1e-12)
        before, options = np.nonzero(fits & within)
        if not len(before):
            return Choice((), np.inf, lost) if np.isfinite(lost) else None
        saved = saved[before] + part.saved[options]
        errors, seconds = (
            errors[before] + part.error[options],
            seconds[before] + part.seconds[options],
        )
        lower = seconds + bounds.of(number + 1, saved, errors)
        if np.isfinite(limit):
            alive = lower < limit
            if not alive.all():
                lost = min(lost, limit)
        else:
            alive = np.ones(len(lower), bool)
        kept = _not_dominated(saved, errors, seconds, np.flatnonzero(alive))
        if len(kept) > most:
            order = kept[np.argsort(lower[kept], kind="stable")]
            least = kept[np.argmin(saved[kept])]  # so that a choice is found if bytes alone decide
            lost, kept = min(lost, float(lower[order[most]])), np.append(order[:most], least)
        if not len(kept):
            return Choice((), np.inf, lost)
        history.append((before[kept], options[kept]))
        saved, errors, seconds = saved[kept], errors[kept], seconds[kept]
    best = int(np.argmin(seconds))
    chosen, label = [], best
    for before, options in reversed(history):
        chosen.append(int(options[label]))
        label = before[label]
    return Choice(tuple(reversed(chosen)), float(seconds[best]), min(lost, float(seconds[best])))


def _not_dominated(saved, errors, seconds, among: np.ndarray) -> np.ndarray:
    """Return the labels for which no other is at least as good in all three."""
    order = among[np.lexsort((errors[among], saved[among], seconds[among]))]
    front_saved: list[float] = []  # ascending, while the errors at the same places descend
    front_errors: list[float] = []
    kept = []
    for label in order:
        one, other = float(saved[label]), float(errors[label])
        place = bisect_right(front_saved, one)
        if place and front_errors[place - 1] <= other:
            continue
        first = bisect_left(front_saved, one)
        last = first
        while last < len(front_saved) and front_errors[last] >= other:
            last += 1
        front_saved[first:last], front_errors[first:last] = [one], [other]
        kept.append(label)
    return np.array(kept, dtype=int)
