"""Budgets in bytes: the average number of bits with which the tensors saved in a forward pass fit a budget."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch.multiprocessing.reductions import StorageWeakRef

from fewbit.config import MIN_BITS
from fewbit.errors import InputError
from fewbit.render.formats import amount
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.format.groups import words_of_total
from fewbit.runtime.interop.checkpoint import in_checkpoint
from fewbit.runtime.probes.variance_probe import SPREAD

_SLACK = 4 * words_of_total(32, 1) + SPREAD
"""The most bytes by which a tensor's codes exceed bits * elements / 8, if samples have bits of their own."""


class AverageOfBudget(NamedTuple):
    """The bits per element of a forward pass that fit a budget of bytes.

    Attributes:
        average: may be below 1 or above 8.
        least_bytes: the bytes that the forward pass would save with 1 bit per element.
        elements: {slot: number of elements} of all tensors whose bits may change.
    """

    average: float
    least_bytes: int
    elements: dict[tuple[str, int], int]


class _Saved(NamedTuple):
    """A saved tensor whose bits a policy may choose, with a weak reference to the storage of its codes."""

    name: tuple[str, int]
    elements: int
    code_bytes: int
    storage: StorageWeakRef


class SizeProbe:
    """A probe that counts the elements of each slot whose bits a policy may choose, outside of checkpointed regions."""

    def __init__(self):
        self._saved: list[_Saved] = []
        # (name, elements, bytes of codes) of the tensor that is saved now; None if it does not count
        self._latest: tuple[tuple[str, int], int, int] | None = None

    def record_saved(self, slot, elements: int, sensitivities=None):
        """Note a saved tensor's elements, and the bytes of its codes; `sensitivities` is None if all samples have the same bits."""
        self._latest = None
        if in_checkpoint() or slot.is_fixed:
            return
        samples = 0 if sensitivities is None else len(sensitivities)
        if samples:
            words = words_of_total(slot.total(samples), elements // samples)
        else:
            words = packed_words(elements, slot.uniform())
        self._latest = slot.name, elements, 4 * words

    def record_rounding(self, slot, record) -> None:
        if self._latest is not None:
            storage = StorageWeakRef(record.tensors[0].untyped_storage())
            self._saved.append(_Saved(*self._latest, storage))

    def knows(self, name: tuple[str, int]) -> bool:
        return True

    def watch(self, outputs) -> None:
        """Forget the tensors that no longer exist when the forward pass ends."""
        self._saved = [each for each in self._saved if not each.storage.expired()]

    def reached(self, slots) -> None:
        """Do nothing: sizes are known before the backward pass."""

    def fit(self, budget: int, saved: int) -> AverageOfBudget:
        """Return how many bits per element fit a budget, after a forward pass that saved `saved` bytes.

        Raises:
            InputError: there is no saved tensor whose bits can change.
        """
        by_slot: dict[tuple[str, int], int] = {}
        for each in self._saved:
            by_slot[each.name] = by_slot.get(each.name, 0) + each.elements
        elements = sum(by_slot.values())
        if not elements:
            raise InputError(
                "budget: expected a sample for which the model, in training mode, saves tensors whose bits can "
                f"change, got one that saves {amount(saved)} in other ones"
            )
        codes = sum(each.code_bytes for each in self._saved)
        fixed = saved - codes + _SLACK * len(self._saved)
        least = fixed + math.ceil(MIN_BITS * elements / 8)
        return AverageOfBudget((budget - fixed) * 8 / elements, least, by_slot)
