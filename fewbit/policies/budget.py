"""A budget in bytes, as the average of bits that keeps to it."""

from __future__ import annotations

import math

from fewbit.errors import FewbitError, InputError
from fewbit.render.formats import amount
from fewbit.runtime.activations.tables import plain_number
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.format.groups import words_of_total
from fewbit.runtime.saved.assignment import LEAST, MOST
from fewbit.runtime.saved.probe import SPREAD
from fewbit.runtime.saved.session import in_checkpoint
from fewbit.sizes import parse_size

_SLACK = 4 * words_of_total(32, 1) + SPREAD
"""Bytes by which a tensor's codes exceed bits * elements / 8, at most, elements being shared out in SPREAD equal parts."""


def bytes_of(budget) -> int:
    """A number of bytes, or a size such as "6 GiB". Raises InputError for anything else."""
    if isinstance(budget, str):
        try:
            return parse_size(budget)
        except FewbitError:
            budget_is_bytes = False
    else:
        budget = plain_number(budget)
        budget_is_bytes = isinstance(budget, int) and not isinstance(budget, bool) and budget > 0
    if not budget_is_bytes:
        raise InputError(
            f"budget: expected bytes, or a size such as '6 GiB' (powers of 1024), got {budget!r}"
        )
    return budget


class SizeProbe:
    """Of the tensors of a forward whose bits may change, {name: elements}; stands in for an observation.

    What is kept within checkpointed regions is not there when the forward ends, and not counted.
    """

    def __init__(self):
        self.elements: dict[tuple[str, int], int] = {}
        self._codes = self._reserve = 0

    def kept(self, variable, elements: int, sensitivities=None, widening: int = 0) -> None:
        """As of an observation."""
        if in_checkpoint():
            return
        self._reserve += widening  # of those with fixed bits too
        if variable.is_fixed:
            return
        self.elements[variable.name] = self.elements.get(variable.name, 0) + elements
        samples = 0 if sensitivities is None else len(sensitivities)
        if samples:
            self._codes += 4 * words_of_total(variable.total(samples), elements // samples)
        else:
            self._codes += 4 * packed_words(elements, variable.uniform())
        self._reserve += _SLACK

    def rounding(self, variable, rounded) -> None:
        """Nothing, as of the backward pass."""

    def watch(self, outputs) -> None:
        """Nothing."""

    def reached(self, variables) -> None:
        """Nothing."""

    def bits(self, budget: int, kept: int) -> float:
        """The average with which a forward like this one keeps `budget` bytes at most. kept: bytes it kept now.

        Raises InputError, with what there is, where not even 1 bit an element does.
        """
        elements = sum(self.elements.values())
        if not elements:
            raise InputError(
                "budget: expected a sample for which the model, in training mode, keeps tensors whose bits can "
                f"change, got one that keeps {amount(kept)} in other ones"
            )
        fixed = kept - self._codes + self._reserve
        least, most = (fixed + math.ceil(bits * elements / 8) for bits in (LEAST, MOST))
        if budget < least:
            raise InputError(
                f"budget: expected {amount(least)} at least for this sample (1 bit an element; {amount(most)} "
                f"at 8), got {amount(budget)}"
            )
        return min((budget - fixed) * 8 / elements, float(MOST))
