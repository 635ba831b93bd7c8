"""The result of `fewbit.fits`: the memory of a training step by setting, and the largest batch and sequence that fit."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fewbit.planning.fake_steps import PARTS
from fewbit.render.formats import amount, unit_of
from fewbit.render.result import Result
from fewbit.render.view import Column, View


@dataclass(frozen=True)
class FitRow:
    """The memory of a training step with one setting, in bytes.

    `weights` to `transient` are the bytes at the moment at which the step takes the most memory. Their sum is `peak`.

    Attributes:
        setting: The name of the setting, such as "exact" or "2 bits".
        weights: Parameters and buffers.
        gradients: Gradients of parameters.
        optimizer: The state of the optimizer.
        saved: Tensors that the forward pass leaves for the backward pass, and the batch.
        transient: All other tensors: temporary results, and gradients of activations.
        peak: The most bytes that exist at one moment.
        phase: "forward", "backward" or "step" (of the optimizer): the part of the training step with this moment.
        all_gradients: The gradients of all parameters, also at other moments.
        all_saved: All tensors that the forward pass leaves, also those freed before.
        fits: Whether `peak` is at most the memory of the device; None without a device.
        largest_batch: The largest batch with which the step fits, perhaps 0; None without a device.
        largest_sequence: The largest length of sequences with which the step fits, or None.
    """

    setting: str
    weights: int
    gradients: int
    optimizer: int
    saved: int
    transient: int
    peak: int
    phase: str
    all_gradients: int
    all_saved: int
    fits: bool | None
    largest_batch: int | None
    largest_sequence: int | None


@dataclass(frozen=True, repr=False)
class Fit(Result):
    """The memory of a training step with several settings, and whether it fits in the memory of a device.

    Attributes:
        model: The class name of the model.
        optimizer: The class name of the optimizer.
        device_bytes: The memory of the device in bytes, or None.
        batch: The number of samples in the batch.
        sequence: The length of the sequences in the batch, or None.
        most_sequence: The longest sequence that the model's configuration allows, or None.
        rows: A `FitRow` for each setting.
        limit: The exception of a step with a batch larger than `largest_batch`, if it and not memory limits the batch of a
            setting; else None.
    """

    model: str
    optimizer: str
    device_bytes: int | None
    batch: int
    sequence: int | None
    most_sequence: int | None
    rows: tuple[FitRow, ...]
    limit: str | None = None

    def records(self) -> list[dict]:
        """Return a dict for each setting."""
        return [asdict(row) for row in self.rows]

    def to_dict(self) -> dict:
        """Return plain values."""
        return asdict(self) | {"rows": self.records()}

    document = to_dict

    @property
    def title(self) -> str:
        start = f"{self.model}, batch {self.batch}"
        if self.sequence is not None:
            start += f" x {self.sequence}"
        if self.device_bytes is None:
            peaks = [f"{amount(row.peak)} ({row.setting})" for row in self.rows]
            return f"{start}: a training step takes at most {', '.join(peaks)}"
        size = amount(self.device_bytes)
        fitting = [row.setting for row in self.rows if row.fits]
        others = [row.setting for row in self.rows if not row.fits]
        if not fitting:
            return f"{start}: no setting fits in {size}"
        if not others:
            return f"{start}: every setting fits in {size}"
        return f"{start}: fits in {size} with {_listed(fitting)}, but not with {_listed(others)}"

    def view(self) -> View:
        unit = unit_of(max(row.peak for row in self.rows))

        def part(name):
            return lambda row: amount(getattr(row, name), unit)

        drops = {"optimizer": 3, "gradients": 4, "weights": 5, "transient": 6, "saved": 7}
        # If the peak is in the optimizer's step, the settings of layers make no difference.
        droppable = {"drop": 1} if all(row.phase == "backward" for row in self.rows) else {}
        columns = [
            Column("setting", lambda row: row.setting, "name"),
            *(Column(name, part(name), drop=drops[name]) for name in PARTS),
            Column(f"peak {unit[0]}", part("peak")),
            Column("in", lambda row: row.phase, "word", **droppable),
        ]
        if self.device_bytes is not None:
            # The title also says which settings fit.
            columns.append(Column("fits", lambda row: "yes" if row.fits else "no", "word", drop=2))
            columns.append(Column("batch", lambda row: f"{row.largest_batch:,}"))
            if self.sequence is not None:
                columns.append(Column("sequence", self._sequence))
        return View(self.title, columns, self.rows, self._notes(unit[0]))

    def _sequence(self, row: FitRow) -> str:
        return f"{row.largest_sequence:,}" + "+" * (row.largest_sequence == self.most_sequence)

    def _notes(self, unit: str) -> list[str]:
        lines = [
            f"{unit} at the moment of the peak, with {self.optimizer}: saved for the backward pass and the batch; "
            "transient: temporary results, and gradients of activations"
        ]
        if self.device_bytes is not None:
            what = "batch: the largest that fits"
            if self.sequence is not None:
                what += f" with sequences of {self.sequence}; sequence: the longest that fits with this batch"
            lines.append(what)
        if self.limit is not None:
            lines.append(f"a larger batch raises {self.limit}")
        if any(row.largest_sequence == self.most_sequence for row in self.rows):
            if self.most_sequence is not None:
                lines.append(f"+: the model's configuration allows at most {self.most_sequence:,}")
        lines.append("not counted: what the allocator and the kernels of a device take in addition")
        return lines


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
