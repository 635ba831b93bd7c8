"""The table of the bits that the policy of `AdaptiveBits` and `Budget` has chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fewbit.config import ROTATED
from fewbit.render.formats import amount, decimal, module_name, share
from fewbit.render.rows import Rows
from fewbit.render.view import Column, View
from fewbit.runtime.format.distortion import relative_distortion
from fewbit.sizes import counted


class Allocated(NamedTuple):
    """One row of the table: a saved input of a layer, and the bits of this tensor.

    Attributes:
        name: The layer's path; for a function that a module calls, the module's path and the function's name.
        input: The number of the layer's input.
        bits: Bits per element, on average.
        is_fixed: Whether the user gave the bits.
        elements: The number of elements in one forward pass, in all processes together.
        samples: The number of samples among which the bits are divided, or 0.
        sensitivity: The variance that rounding adds to the gradient of all parameters, divided by the relative
            distortion of the bits.
        quantizer: The kind of the tensor's copies, one of `fewbit.config.KINDS`.
    """

    name: str
    input: int
    bits: float
    is_fixed: bool
    elements: int
    samples: int
    sensitivity: float
    quantizer: str = ROTATED

    @property
    def codes(self) -> int:
        """The bytes of the tensor's codes in one forward pass, in all processes together."""
        return int(self.bits * self.elements / 8)

    @property
    def variance(self) -> float:
        """The variance that rounding the tensor to these bits adds to the gradient."""
        return self.sensitivity * relative_distortion(self.quantizer, self.bits)


class Allocation(Rows):
    """The rows of a table of chosen bits, in the order of the forward pass."""

    _not_observed = "not observed, so that no bits are chosen (compiled layers have the whole part of the average)"

    def __init__(
        self,
        rows: Iterable[Allocated] = (),
        empty: str = "no bits chosen",
        ended: str = "",
        unobserved: Mapping[str, str] | None = None,
    ):
        super().__init__(rows, empty, ended, unobserved)

    @property
    def bits(self) -> float | None:
        """The average bits per element over all rows, or None without rows."""
        return _average(self) if self else None

    @property
    def _headline(self) -> str:
        chosen = [row for row in self if not row.is_fixed]
        rows = chosen or self
        tensors = f"{counted(len(rows), 'tensor')} that layers save"
        text = f"{_average(rows):.4g} bits on average for {tensors}"
        if not chosen:
            return f"all bits are fixed by the user: {text}"
        if len(chosen) == len(self):
            return text
        return f"{text}; {self.bits:.4g} with {len(self) - len(chosen)} of fixed bits"

    def records(self) -> list[dict]:
        """Return a dict for each row."""
        return [row._asdict() | {"variance": row.variance} for row in self]

    def _full(self) -> View:
        variance = sum(row.variance for row in self)
        elements = sum(row.elements for row in self)
        columns = (
            Column("layer", lambda row: module_name(row.name), "name", least=24, once=True),
            Column("input", lambda row: str(row.input), drop=3),
            Column("bits", lambda row: decimal(row.bits) + " fixed" * row.is_fixed),
            Column("elements", lambda row: share(row.elements, elements), drop=1),
            Column("codes", lambda row: amount(row.codes), drop=2),
            Column("variance", lambda row: share(row.variance, variance), drop=4),
        )
        notes = [
            f"all codes: {amount(sum(row.codes for row in self))}, without ranges",
            "input: the number of the layer's input",
            "variance: each tensor's part of the variance that rounding adds to the gradient",
            "layers that share the copy of another layer have no row",
            *self._of_unobserved(),
        ]
        return View(self.title, columns, self, notes)


def _average(rows: Iterable[Allocated]) -> float:
    rows = list(rows)
    elements = sum(row.elements for row in rows)
    return sum(row.bits * row.elements for row in rows) / elements if elements else 0.0
