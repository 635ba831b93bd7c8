"""The bits that level L3 has chosen, as a sequence, a table and HTML. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fewbit.analysis.meter_report import amount
from fewbit.render.rows import Rows
from fewbit.sizes import counted


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
    def codes(self) -> int:
        """Bytes of the codes in one forward."""
        return int(self.bits * self.elements / 8)

    @property
    def variance(self) -> float:
        """That rounding adds with these bits."""
        return self.sensitivity / (2.0**self.bits - 1) ** 2


class Allocation(Rows):
    """Rows of Allocated, in the order of the forward; compares equal to one with the same rows.

    empty: what is said where there are none. ended: what has become of the model, where these bits are none of a model that
    trains any more. unobserved: {name: why, in words} of layers that no observation sees, in this process.
    """

    _header = ("layer", "input", "bits", "elements", "codes", "variance")
    _spare = (3, 4, 1, 5)

    _not_observed = "not observed, so that no bits are chosen (compiled layers keep the whole part of the average)"

    def __init__(
        self,
        rows=(),
        empty: str = "no bits chosen",
        ended: str = "",
        unobserved: Mapping[str, str] | None = None,
    ):
        super().__init__(rows, empty, ended, unobserved)

    def __eq__(self, other) -> bool:
        return isinstance(other, Allocation) and self._rows == other._rows

    __hash__ = None

    @property
    def bits(self) -> float:
        """The average over all elements."""
        return _average(self)

    @property
    def _found(self) -> str:
        chosen = [row for row in self if not row.is_fixed]
        tensors = f"{counted(len(chosen), 'tensor')} that layers keep"
        text = f"{_average(chosen):.4g} bits on average for {tensors}"
        if len(chosen) == len(self):
            return text
        return f"{text}; {self.bits:.4g} with {len(self) - len(chosen)} of fixed bits"

    def records(self) -> list[dict]:
        """A dictionary for each row."""
        return [row._asdict() | {"variance": row.variance} for row in self]

    def _cells(self):
        total = sum(row.variance for row in self) or 1.0
        elements = sum(row.elements for row in self) or 1
        return [
            (
                row.name or "(the model)",
                str(row.input),
                f"{row.bits:.3f}".rstrip("0").rstrip(".") + (" fixed" if row.is_fixed else ""),
                f"{100 * row.elements / elements:.1f}%",
                amount(row.codes),
                f"{100 * row.variance / total:.1f}%",
            )
            for row in self
        ]

    def _notes(self):
        if not self:
            return []
        return [
            f"codes: {amount(sum(row.codes for row in self))} in all, without ranges; input: which of those that "
            "the layer keeps; variance: each tensor's part of what rounding adds to the gradient's",
            "layers that keep what another has kept of the same tensor have no row",
            *self._of_unobserved(),
        ]


def _average(rows) -> float:
    elements = sum(row.elements for row in rows)
    return sum(row.bits * row.elements for row in rows) / elements if elements else 0.0
