"""Budgets in bytes: find the average number of bits with which the tensors saved in a forward pass fit a budget."""

from __future__ import annotations

import math

from fewbit.config import MAX_BITS, MIN_BITS
from fewbit.errors import InputError
from fewbit.render.formats import amount
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.format.groups import words_of_total
from fewbit.runtime.interop.checkpoint import in_checkpoint
from fewbit.runtime.probes.variance_probe import SPREAD

_SLACK = 4 * words_of_total(32, 1) + SPREAD
"""The most bytes by which a tensor's codes exceed bits * elements / 8, if bits are divided among its samples."""


class SizeProbe:
    """A probe that counts the elements of each slot whose bits a policy may choose.

    A slot is a tensor that a layer saves in every forward pass. Tensors that are saved in a checkpointed region are not
    counted, because they no longer exist when the forward pass ends.
    """

    def __init__(self):
        self.elements: dict[tuple[str, int], int] = {}
        self._codes = self._reserve = 0

    def record_saved(self, slot, elements: int, sensitivities=None, fp32_min_bytes: int = 0):
        """Count the elements of a saved tensor, and the bytes of its codes.

        Args:
            slot: the tensor's slot, with its bits.
            elements: the number of elements.
            sensitivities: (samples,) the sensitivities of the samples, which determine the samples' bits; None if all
                samples have the same bits.
            fp32_min_bytes: the bytes by which the saved tensor grows if the minimums of its groups become float32.
        """
        if in_checkpoint():
            return
        self._reserve += fp32_min_bytes  # for slots with fixed bits too
        if slot.is_fixed:
            return
        self.elements[slot.name] = self.elements.get(slot.name, 0) + elements
        samples = 0 if sensitivities is None else len(sensitivities)
        if samples:
            self._codes += 4 * words_of_total(slot.total(samples), elements // samples)
        else:
            self._codes += 4 * packed_words(elements, slot.uniform())
        self._reserve += _SLACK

    def record_rounding(self, slot, record) -> None:
        """Do nothing: sizes do not depend on the rounding."""

    def knows(self, name: tuple[str, int]) -> bool:
        """Return True, so that no layer is reported as unobserved."""
        return True

    def watch(self, outputs) -> None:
        """Do nothing: sizes are known without a backward pass."""

    def reached(self, slots) -> None:
        """Do nothing: sizes are known before the backward pass."""

    def bits(self, budget: int, saved: int) -> float:
        """Return the average bits per element with which the counted forward pass would save at most `budget` bytes.

        Args:
            budget: the bytes that the forward pass may save.
            saved: the bytes that the counted forward pass has saved.

        Raises:
            InputError: not even 1 bit per element fits, or there is no saved tensor whose bits can change.
        """
        elements = sum(self.elements.values())
        if not elements:
            raise InputError(
                "budget: expected a sample for which the model, in training mode, saves tensors whose bits can "
                f"change, got one that saves {amount(saved)} in other ones"
            )
        fixed = saved - self._codes + self._reserve
        least, most = (fixed + math.ceil(bits * elements / 8) for bits in (MIN_BITS, MAX_BITS))
        if budget < least:
            raise InputError(
                f"budget: expected {amount(least)} at least for this sample (1 bit an element; {amount(most)} "
                f"at 8), got {amount(budget)}"
            )
        return min((budget - fixed) * 8 / elements, float(MAX_BITS))
