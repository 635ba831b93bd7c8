"""A budget in bytes, as the average of bits that keeps to it."""

from __future__ import annotations

import math

from fewbit.compress.meter_report import amount
from fewbit.errors import FewbitError, InputError
from fewbit.runtime.encoding import packed_words
from fewbit.runtime.groups import words_of_total
from fewbit.runtime.variables import LEAST, MOST
from fewbit.sizes import parse_size

_SLACK = 4 * words_of_total(32, 1)
"""Bytes by which a tensor's codes exceed bits * elements / 8, at most."""


def bytes_of(budget) -> int:
    """A number of bytes, or a size such as "6 GiB". Raises InputError for anything else."""
    if isinstance(budget, str):
        try:
            return parse_size(budget)
        except FewbitError as error:
            raise InputError(f"budget: {error}") from None
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise InputError(f"budget: expected bytes, or a size such as '6 GiB', got {budget!r}")
    return budget


class Sizes:
    """Of the tensors of a forward whose bits may change; stands in for an observation."""

    def __init__(self):
        self.count = self.elements = self.codes = 0

    def kept(self, variable, elements, squares=None) -> None:
        if variable.is_fixed:
            return
        self.count += 1
        self.elements += elements
        if squares is None:
            self.codes += 4 * packed_words(elements, variable.uniform())
        else:
            samples = len(squares)
            self.codes += 4 * words_of_total(variable.total(samples), elements // samples)

    def watch(self, outputs) -> None:
        """Nothing: a backward pass adds nothing to sizes."""

    def bits(self, budget: int, kept: int) -> float:
        """The average with which a forward like this one keeps `budget` bytes at most. kept: bytes it kept now.

        Raises InputError, with what there is, where not even 1 bit an element does.
        """
        fixed = kept - self.codes + _SLACK * self.count
        least, most = (fixed + math.ceil(bits * self.elements / 8) for bits in (LEAST, MOST))
        if budget < least or not self.elements:
            raise InputError(
                f"budget: expected {amount(least)} at least for this sample (1 bit an element; {amount(most)} "
                f"at 8), got {amount(budget)}"
            )
        return min((budget - fixed) * 8 / self.elements, float(MOST))
