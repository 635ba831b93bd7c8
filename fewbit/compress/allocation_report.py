"""The bits that level L3 has chosen, as a sequence, a table and HTML. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fewbit.compress.meter_report import amount, tail
from fewbit.report import _Report

MOST_NAME = 34  # characters


class Allocated(NamedTuple):
    """What a layer keeps of one of its inputs.

    name: the layer's path; of a function that a module calls, the module's path and the function's name. input: the
    number of the input. bits: an element, on average. is_fixed: given, not chosen. elements: in one forward, of all
    processes. samples: that share the bits (0: all have as many). sensitivity: the variance that rounding adds to
    the gradient of all parameters, times (2^bits - 1)^2.
    """

    name: str
    input: int
    bits: float
    is_fixed: bool
    elements: int
    samples: int
    sensitivity: float

    @property
    def variance(self) -> float:
        """That rounding adds with these bits."""
        return self.sensitivity / (2.0**self.bits - 1) ** 2


class Allocation(_Report, Sequence):
    """Rows of Allocated, in the order of the forward; compares equal to one with the same rows."""

    _header = ("layer", "input", "bits", "elements", "codes", "variance")

    def __init__(self, rows=()):
        self._rows = tuple(rows)

    def __getitem__(self, index):
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other) -> bool:
        return isinstance(other, Allocation) and self._rows == other._rows

    __hash__ = None

    @property
    def bits(self) -> float:
        """The average over all elements."""
        elements = sum(row.elements for row in self)
        return sum(row.bits * row.elements for row in self) / elements if elements else 0.0

    @property
    def title(self) -> str:
        if not self:
            return "no bits chosen yet: level L3 does so after the first steps of training"
        return f"{self.bits:.4g} bits on average for {len(self)} tensors that layers keep"

    def __rich__(self):
        return super().__rich__() if self else self.title

    def records(self) -> list[dict]:
        """A dictionary for each row."""
        return [row._asdict() | {"variance": row.variance} for row in self]

    def _cells(self):
        total = sum(row.variance for row in self) or 1.0
        elements = sum(row.elements for row in self) or 1
        return [
            (
                tail(row.name or "(the model)", MOST_NAME),
                str(row.input),
                f"{row.bits:.3f}".rstrip("0").rstrip(".") + (" fixed" if row.is_fixed else ""),
                f"{100 * row.elements / elements:.1f}%",
                amount(int(row.bits * row.elements / 8)),
                f"{100 * row.variance / total:.1f}%",
            )
            for row in self
        ]

    def _notes(self):
        if not self:
            return []
        return ["variance: each tensor's part of what rounding adds to the gradient's"]
