"""The monitor of the error-bound policy: it compares gradients with exact ones, and warns if they exceed the bound."""

from __future__ import annotations

import math
import warnings
from collections.abc import Container, Mapping

from fewbit.errors import BoundWarning
from fewbit.policies.error_bound.estimates import Pair, TensorEstimate, ratio_of, sum_of

MOST_NAMED = 3
"""The most layers that a warning names."""

Slots = Mapping[tuple[str, int], TensorEstimate]


def turn_of(slots: Slots, start: int, exact: Container) -> list[tuple[str, int]]:
    """Return the slots that the next measurement compares, from position `start` on, without those in `exact`.

    Their exact values take no more memory than the largest slot's.
    """
    names, taken = list(slots), []
    sizes = {
        name: slot.elements * slot.dtype_bytes for name, slot in slots.items() if name not in exact
    }
    room, start = max(sizes.values(), default=0), start % max(len(names), 1)
    for name in names[start:] + names[:start]:
        if name not in sizes:
            continue
        if sizes[name] > room:
            break
        room -= sizes[name]
        taken.append(name)
    return taken


def next_start(
    turn: list[tuple[str, int]], start: int, before: Slots, now: Slots, seen: Container
) -> int:
    """Return the position with which the next measurement begins: that of the first slot that was not reached.

    `before` and `now` are the slots known before and after, `seen` those measured.
    """
    if not turn:
        return start
    names = list(before)
    unmet = [name for name in turn if name not in seen]
    end = names.index(unmet[0]) if unmet else names.index(turn[-1]) + 1
    return sum(name in now for name in names[:end]) % max(len(now), 1)


def total_ratio(slots: Slots, exact: Container) -> float | None:
    """Return E|g^|^2 / E|g|^2 over all slots, of parameters if any was measured, or None."""
    of_parameters, of_all = _totals(slots, exact)
    return ratio_of(of_parameters if of_parameters.exact2 > 0 else of_all)


def is_exceeded(slots: Slots, exact: Container, limit: float) -> bool:
    """Return whether `total_ratio` is above the limit by more than three standard errors."""
    of_parameters = _totals(slots, exact)[0].exact2 > 0
    means, squares = zip(
        *(slot.excess(limit, of_parameters, name in exact) for name, slot in slots.items()),
        strict=True,
    )
    return math.fsum(means) > 3 * math.sqrt(math.fsum(squares))


def warn(slots: Slots, ratio: float, limit: float) -> None:
    """Warn that gradients exceed the bound, and name the layers with the largest ratios."""
    ratios = [(slot.ratio, name) for name, slot in slots.items() if slot.ratio is not None]
    worst = ", ".join(
        f"{name[0] or 'the model'} ({ratio:.3g}{', its bits are given' * slots[name].is_fixed})"
        for ratio, name in sorted(ratios, reverse=True)[:MOST_NAMED]
    )
    warnings.warn(
        f"gradients are larger than their bound allows: E|g^|^2 / E|g|^2 is {ratio:.3g}, above 1 + e2 = {limit:.3g}; "
        f"most in {worst}. See controller.bounds; a smaller e2 gives more bits to layers whose bits are not given",
        BoundWarning,
        stacklevel=2,
    )


def _totals(slots: Slots, exact: Container) -> tuple[Pair, Pair]:
    pairs = [slot.pairs(name in exact) for name, slot in slots.items()]
    return sum_of([of_parameters for of_parameters, _ in pairs]), sum_of(
        [all_ for _, all_ in pairs]
    )
