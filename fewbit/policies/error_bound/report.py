"""The bounds that policy="error-bound" has found, as a sequence, a table and HTML. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fewbit.analysis.gradient_ratio_report import limit_text
from fewbit.render.rows import Rows
from fewbit.sizes import counted


class Bounded(NamedTuple):
    """What a layer keeps of one of its inputs, or the codes of an activation.

    name: the layer's path; of a function that a module calls, the module's path and the function's name. input: the
    number of the input; None for activations. demand: the gradient that allows the smallest error. kind: of the bound
    on its error: "in expectation", "measured" (docs/error_bound.md), or "worst case" for activations. dx: root of the
    mean squared error that is allowed, of what is kept; of an activation the error of f'. kept: by "bits", "exact", or the
    name of the codec that has kept it ("quant" where "jpeg" or "quant+zvc" left it to that). bits: an element, on average;
    of a codec all bytes of its latest payload in this process, None before that; None where exact. elements: in one
    forward, of all processes; None for activations. is_fixed: bits were given. is_met: False where bits that were
    given, or an activation's table with the most bits, err by more. ratio: E|g^|^2 / E|g|^2 that the monitor saw, the largest of the gradients; None where it has seen none.
    """

    name: str
    input: int | None
    demand: str
    kind: str
    dx: float
    kept: str
    bits: float | None
    elements: int | None
    is_fixed: bool = False
    is_met: bool = True
    ratio: float | None = None


class Bounds(Rows):
    """Rows of Bounded, in the order of the forward, activations last; equal to one with the same rows.

    e2: as of `compress_`, None without the policy. ratio: E|g^|^2 / E|g|^2 in all, as far as the monitor has seen
    it; None before that. empty: what is said where there are no rows. unobserved: {name: why, in words} of layers that
    keep something of which no observation knows, in this process, so that it has 8 bits. ended: what has become of
    the model, where these bounds are none of a model that trains any more.
    """

    _header = ("layer", "decides", "bound", "dx*", "bits", "ratio")
    _not_observed = "not observed, so that they keep 8 bits"
    _names = (0, 1)
    _spare = (2, 5)

    def __init__(
        self,
        rows=(),
        e2=None,
        ratio=None,
        empty="no bounds found",
        unobserved: Mapping[str, str] | None = None,
        ended: str = "",
    ):
        super().__init__(rows, "no bounds found" if unobserved else empty, ended, unobserved)
        self.e2 = e2
        self.ratio = ratio

    def __eq__(self, other) -> bool:
        return isinstance(other, Bounds) and (self._rows, self.e2, self.ratio) == (
            other._rows,
            other.e2,
            other.ratio,
        )

    __hash__ = None

    @property
    def limit(self) -> float | None:
        """1 + e2, which the ratio is to stay within."""
        return None if self.e2 is None else 1.0 + self.e2

    @property
    def bits(self) -> float | None:
        """The average over all elements that are kept by bits, or by codecs that have; None without any."""
        found = [(row.bits, row.elements) for row in self if row.bits and row.elements]
        elements = sum(each for _, each in found)
        return sum(bits * each for bits, each in found) / elements if elements else None

    @property
    def _found(self) -> str:
        layers = [row for row in self if row.input is not None]
        exact = sum(row.kept == "exact" for row in layers)
        text = f"e2 = {self.e2:.4g}: {counted(len(layers), 'tensor')} that layers keep"
        if self.bits is not None:
            text += f", {exact} of them exact, the others" * bool(exact) + ","
            text += f" {self.bits:.4g} bits on average"
        elif exact:
            text += f", {exact} of them exact"
        if self._why:
            text += f"; {counted(len(self._why), 'layer')} not observed"
        if self.ratio is None:
            return f"{text}; E|g^|^2 / E|g|^2 not seen yet, to stay within {limit_text(self.limit)}"
        verdict = "more than" if self.ratio > self.limit else "within"
        return f"{text}; E|g^|^2 / E|g|^2 {self.ratio:.4g}, {verdict} {limit_text(self.limit)}"

    def records(self) -> list[dict]:
        """A dictionary for each row."""
        return [row._asdict() for row in self]

    def _cells(self):
        return [
            (
                _name(row),
                row.demand or "-",
                row.kind or "-",
                "any" if row.dx == float("inf") else _digits(row.dx),
                _kept(row),
                "-" if row.ratio is None else f"{row.ratio:.3g}" + "!" * (row.ratio > self.limit),
            )
            for row in self
        ]

    def _notes(self):
        if not self:
            return []
        notes = self._of_unobserved()
        if any(row.input is None for row in self):
            notes.append("f': codes of an activation's derivative")
        if any(row.input for row in self):
            notes.append("[1], [2]: of a layer's inputs the second, the third")
        notes += [
            "decides: the gradient that allows the smallest error; bound: on its squared error in expectation, on the worst case, "
            "or measured; dx*: the root mean square error that what is kept may have (of norms what is normalized), of f' the "
            "largest that its table may have",
            "ratio: E|g^|^2 / E|g|^2 of the layer's own gradients, as the monitor saw it; controller.gradient_ratio tells that "
            "of all layers together",
        ]
        if any(row.ratio is not None and row.ratio > self.limit for row in self):
            notes.append(
                "!: more than 1 + e2, by chance or not: a warning comes where all of them together are, beyond chance"
            )
        if any(not row.is_met for row in self):
            notes.append(
                "*: errs by more than is allowed: bits that were given, or a table of the most bits that there are"
            )
        if any(row.kept not in ("bits", "exact") for row in self):
            notes.append("bits of codecs: all bytes of the latest payload in this process")
        return notes


def _name(row: Bounded) -> str:
    """With the number of the input, where it is not the first."""
    last = " f'" if row.input is None else f" [{row.input}]" * (row.input > 0)
    return (row.name or "(the model)") + last


def _kept(row: Bounded) -> str:
    if row.bits is None:
        return row.kept
    text = f"{row.bits:.3f}".rstrip("0").rstrip(".")
    if row.kept != "bits":
        return f"{row.bits:.3g} {row.kept}"
    return text + " given" * row.is_fixed + "*" * (not row.is_met)


def _digits(value: float) -> str:
    """At most 7 characters."""
    text = f"{value:.3g}"
    return text if len(text) <= 7 else f"{value:.1e}"
