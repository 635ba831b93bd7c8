"""The table of the error bounds that the policy of `ErrorBound` has found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from fewbit.policies.error_bound.choices import ExactCodec, choose_bits, has_enough_bits
from fewbit.policies.error_bound.table_errors import is_known, table_error
from fewbit.render.formats import decimal, digits, limit_text, module_name
from fewbit.render.rows import Rows
from fewbit.render.view import Column, View
from fewbit.runtime.codecs.payload import EXACT
from fewbit.sizes import counted

WORST = "worst case"
"""The kind of activations' bounds, which limit the largest error."""


class Bounded(NamedTuple):
    """One row of the table: a saved input of a layer, or the codes that an activation saves.

    Attributes:
        name: The layer's path; for a function that a module calls, the module's path and the function's name.
        input: The number of the layer's input; None for activations.
        demand: The gradient whose bound allows the smallest error of the tensor.
        kind: The kind of that bound: "in expectation", "measured" (docs/guides/error_bound.md), or "worst case" for
            activations.
        dx: The root mean square error that the saved tensor may have; for an activation, the largest error of the table
            that replaces the derivative f'.
        kept: "bits", "exact", or the name of the codec that saved the tensor.
        bits: Bits per element on average, with a codec of all bytes in this process's latest step; None if the tensor
            is saved exactly, or before the first step.
        elements: The number of elements that all processes save in one forward pass; None for activations.
        is_fixed: Whether the user gave the bits.
        is_met: False if the error is larger than allowed, because the user gave the bits or because no table of the
            activation has enough bits.
        ratio: The largest E|g^|^2 / E|g|^2 of the gradients that depend on the tensor, or None.
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
    """The rows of a table of bounds, in the order of the forward pass, with activations last.

    Args:
        rows: The rows.
        e2: `ErrorBound.e2`; None with another configuration.
        ratio: The monitor's E|g^|^2 / E|g|^2 over all layers; None before the first measurement.
        empty: The line that is shown without rows.
        unobserved: {path of a layer with 8 bits: the reason why the policy cannot measure what it saves}.
        ended: The reason why the model is not trained any more, or "".
    """

    _not_observed = "not observed, so that they have 8 bits"

    def __init__(
        self,
        rows: Iterable[Bounded] = (),
        e2: float | None = None,
        ratio: float | None = None,
        empty: str = "no bounds found",
        unobserved: Mapping[str, str] | None = None,
        ended: str = "",
    ):
        super().__init__(rows, "no bounds found" if unobserved else empty, ended, unobserved)
        self.e2 = e2
        self.ratio = ratio

    def __eq__(self, other) -> bool:
        return super().__eq__(other) and (self.e2, self.ratio) == (other.e2, other.ratio)

    __hash__ = None

    @property
    def limit(self) -> float | None:
        """1 + e2, the largest allowed E|g^|^2 / E|g|^2. None without e2."""
        return None if self.e2 is None else 1.0 + self.e2

    @property
    def bits(self) -> float | None:
        """The average bits per element of all rows with `bits`; None without any."""
        found = [(row.bits, row.elements) for row in self if row.bits and row.elements]
        elements = sum(count for _, count in found)
        return sum(bits * count for bits, count in found) / elements if elements else None

    @property
    def _headline(self) -> str:
        layers = [row for row in self if row.input is not None]
        exact = sum(row.kept == "exact" for row in layers)
        text = f"e2 = {self.e2:.4g}: {counted(len(layers), 'tensor')} that layers save"
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

    def _full(self) -> View:
        columns = (
            Column("layer", _name, "name", least=24),
            Column("decides", lambda row: row.demand or "-", "name"),
            Column("bound", lambda row: row.kind or "-", "word", drop=1),
            Column("dx*", lambda row: "any" if row.dx == math.inf else digits(row.dx)),
            Column("bits", _kept),
            Column("ratio", self._ratio, drop=2),
        )
        return View(self.title, columns, self, self._notes())

    def _ratio(self, row: Bounded) -> str:
        return "-" if row.ratio is None else f"{row.ratio:.3g}" + "!" * (row.ratio > self.limit)

    def _notes(self) -> list[str]:
        notes = self._of_unobserved()
        if any(row.input is None for row in self):
            notes.append("f': codes of an activation's derivative")
        if any(row.input for row in self):
            notes.append("[1], [2]: of a layer's inputs the second, the third")
        notes += [
            "decides: the gradient that allows the smallest error",
            "bound: on that gradient's squared error in expectation, on the worst case, or measured",
            "dx*: the root mean square error that the saved tensor may have (of norms the normalized input), of f' the "
            "largest that its table may have",
            "ratio: E|g^|^2 / E|g|^2 of the layer's own gradients, as the monitor saw it; controller.gradient_ratio measures "
            "that of all layers together",
        ]
        if any(row.ratio is not None and row.ratio > self.limit for row in self):
            notes.append(
                "!: more than 1 + e2, by chance or not; a warning comes if all layers together are above it beyond chance"
            )
        if any(not row.is_met for row in self):
            notes.append(
                "*: errs by more than is allowed: bits that were given, or a table of the most bits that there are"
            )
        if any(row.kept not in ("bits", "exact") for row in self):
            notes.append("bits of codecs: all bytes of the latest payload in this process")
        return notes


def _name(row: Bounded) -> str:
    last = " f'" if row.input is None else f" [{row.input}]" * (row.input > 0)
    return module_name(row.name) + last


def _kept(row: Bounded) -> str:
    if row.bits is None:
        return row.kept
    if row.kept != "bits":
        return f"{row.bits:.3g} {row.kept}"
    return decimal(row.bits) + " given" * row.is_fixed + "*" * (not row.is_met)


def rows_of(policy) -> Iterator[Bounded]:
    """Yield a row for each saved tensor that the policy has measured, then for each activation."""
    for name, slot in policy.knowledge.slots.items():
        choice = policy.choices.get(name) or choose_bits(slot, policy.bound)
        codec = None if slot.is_fixed else policy.codec_of(name)
        kept, bits = "bits", slot.average if slot.is_fixed else choice.average
        if isinstance(codec, ExactCodec):
            kept, bits = EXACT, None
        elif codec is not None:
            kept, bits = codec.stats.codec or codec.name, codec.stats.bits
            bits = None if kept == EXACT else bits
        constraint = choice.constraint
        yield Bounded(
            *name,
            demand="" if constraint is None else constraint.label,
            kind="" if constraint is None else constraint.kind,
            dx=math.sqrt(choice.dx2),
            kept=kept,
            bits=bits,
            elements=slot.elements,
            is_fixed=slot.is_fixed,
            is_met=not slot.is_fixed or has_enough_bits(slot, choice, policy.bound),
            ratio=slot.ratio,
        )
    # The backward pass measures activations in reverse order.
    for name, activation in reversed(policy.knowledge.activations.items()):
        bits = policy.given.get(name, policy.activations.get(name))
        if bits is None:
            continue
        allowed = activation.allowed(policy.bound.e2, policy.bound.window)
        function = activation.function, activation.parameters
        is_met = not is_known(*function) or table_error(*function, bits) <= allowed
        is_fixed = name in policy.given
        yield Bounded(
            name, None, "input", WORST, allowed, "bits", float(bits), None, is_fixed, is_met
        )
