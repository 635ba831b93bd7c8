"""The result of `fewbit.fit_`: the option of each block."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field, fields
from typing import NamedTuple

from torch import nn

from fewbit.compress.controller import Controller
from fewbit.convert.swap import check_module
from fewbit.convert.undo import whole_or_not_at_all
from fewbit.errors import InputError
from fewbit.planning.block_settings import Option, Settings
from fewbit.planning.candidates import Candidate
from fewbit.planning.compiled import uncompiled
from fewbit.render.formats import amount, digits, unit_of
from fewbit.render.result import finite
from fewbit.render.saved_results import Document
from fewbit.render.view import Column, View
from fewbit.schema import FIT

LESS = 0.99
"""The time of the next better choice, at most, as a part of the present time."""


class FrontPoint(NamedTuple):
    """A choice for another memory, as predicted.

    Attributes:
        peak: the most bytes that exist in a step.
        seconds: the time of a forward and a backward pass.
        error: the error of the gradient.
    """

    peak: int
    seconds: float
    error: float


@dataclass(frozen=True)
class FitBlocks:
    """Blocks that follow each other and have one option.

    Attributes:
        blocks: the paths of the blocks, such as `layers.0-5`, or "rest".
        option: what they do, such as `4 bits`.
        saved: the bytes that they leave for the backward pass.
        seconds: the time that the option adds to an exact step.
        error: the error that the option adds to the gradient.
    """

    blocks: str
    option: str
    count: int
    saved: int
    seconds: float
    error: float


@dataclass(repr=False)
class FastestFit(Document):
    """The choice of `fewbit.fit_`: it says what each block of a model saves.

    Attributes:
        model: The class name of the model.
        optimizer: The class name of the optimizer.
        batch: The number of samples in the batch.
        memory: The bytes in which the step had to fit.
        peak: The measured most bytes in a step with the settings.
        seconds: The predicted time of a forward and a backward pass.
        bound: A lower bound of this time for all choices that fit, by the examination.
        error: |g^ - g|^2 / |g|^2, measured if a layer has few bits, else predicted; NaN if not known.
        limit: The bound of the error.
        exact_peak: The peak of the exact model.
        exact_seconds: The time of a forward and a backward pass of the exact model.
        settings: The options of all blocks.
        rows: The rows of the table.
        front: Choices for more and for less memory.
        notes: Lines about the model.
        parameters: The number of elements of the model's parameters; None if not known.
        controller: The controller of `compress_`; None if nothing is compressed, or if the result was loaded.
    """

    _schema = FIT

    model: str
    optimizer: str
    batch: int
    memory: int
    peak: int
    seconds: float
    bound: float
    error: float
    limit: float
    exact_peak: int
    exact_seconds: float
    settings: Settings
    rows: tuple[FitBlocks, ...]
    front: tuple[FrontPoint, ...]
    notes: tuple[str, ...] = ()
    parameters: int | None = None
    controller: Controller | None = field(default=None, compare=False)

    @property
    def candidate(self) -> Candidate:
        """The choice as a `fewbit.Candidate`."""
        return self.settings.candidate

    @property
    def code(self) -> str:
        """Python code that applies the choice to `model`."""
        return self.settings.code

    def apply(self, model: nn.Module) -> Controller | None:
        """Apply the choice to a model, in place, and undo earlier conversions and checkpoints. Return the controller of `compress_`, or None.

        Raises:
            InputError: The model has no module at the path of a block, or another number of parameters. The model stays
                unchanged.
        """
        check_module(model)
        model = uncompiled(model)
        known = dict(model.named_modules(remove_duplicate=False))
        paths = [*self.settings.blocks, *([self.settings.head] if self.settings.head else [])]
        missing = [path for path in paths if path not in known]
        if missing:
            raise InputError(
                f"model: expected one with the blocks of {self.model}, for which the choice was made, got a "
                f"{type(model).__name__} without {missing[0]!r}"
            )
        count = parameters_of(model)
        if self.parameters not in (None, count):
            raise InputError(
                f"model: expected one with the {self.parameters:,} parameters of {self.model}, for which the choice was "
                f"made, got {count:,}; call fit_ for this model"
            )
        return _applied(model, self.settings)

    @property
    def better(self) -> FrontPoint | None:
        """The next faster choice, which needs more memory, or None."""
        faster = [point for point in self.front if point.seconds < LESS * self.seconds]
        return min((point for point in faster if point.peak > self.peak), default=None)

    @property
    def smaller(self) -> FrontPoint | None:
        """The next choice with less memory, or None."""
        lesser = [point for point in self.front if point.peak < LESS * self.peak]
        return max(lesser, default=None)

    @property
    def title(self) -> str:
        error = (
            ""
            if math.isnan(self.error) or not self.error
            else f", with an error of {100 * self.error:.2g}% of the gradient"
        )
        step = f"{self.model}, batch {self.batch}: a step with {self.optimizer} takes {amount(self.peak)} of {amount(self.memory)}"
        if not self.code:
            return f"{step}, so exact training fits, and the model is exact"
        return (
            f"{step} and {self._time(self.seconds):.2f} of the exact time{error}; exact training takes "
            f"{amount(self.exact_peak)}"
        )

    def _time(self, seconds: float) -> float:
        return seconds / self.exact_seconds if self.exact_seconds else math.nan

    def records(self) -> list[dict]:
        """Return a dict for each row of the table."""
        return [asdict(row) for row in self.rows]

    def to_dict(self) -> dict:
        """Return plain JSON values."""
        values = {
            one.name: getattr(self, one.name) for one in fields(self) if one.name != "controller"
        }
        values |= {"settings": self.settings.to_dict(), "rows": self.records()}
        values |= {"front": [point._asdict() for point in self.front], "notes": list(self.notes)}
        return finite({"schema": FIT} | values)

    @classmethod
    def _of_document(cls, document: dict) -> FastestFit:
        values = {name: value for name, value in document.items() if name != "schema"}
        values["error"] = math.nan if values["error"] is None else values["error"]
        values["limit"] = math.inf if values["limit"] is None else values["limit"]
        values["settings"] = Settings.from_dict(values["settings"])
        values["rows"] = tuple(FitBlocks(**row) for row in values["rows"])
        values["front"] = tuple(FrontPoint(**point) for point in values["front"])
        return cls(**(values | {"notes": tuple(values["notes"])}))

    def view(self) -> View:
        unit = unit_of(max(row.saved for row in self.rows))
        columns = (
            Column("blocks", lambda row: row.blocks, "name", least=12),
            Column("option", lambda row: row.option, "name", least=20),
            Column(f"saved {unit[0]}", lambda row: amount(row.saved, unit)),
            Column("added ms", lambda row: f"{1000 * row.seconds:.1f}", drop=2),
        )
        if not math.isnan(self.error):
            columns += (Column("error", lambda row: digits(row.error), drop=1),)
        return View(
            self.title, columns, self.rows, self._notes(unit[0]), figure=self.plot, code=self.code
        )

    def _notes(self, unit: str) -> list[str]:
        lines = [
            f"saved {unit}: left for the backward pass, the batch included",
            "added ms: the time that the option adds to an exact forward and backward pass of "
            f"{1000 * self.exact_seconds:.3g} ms",
        ]
        if self.code and self.exact_seconds:
            gap = 100 * (self.seconds - self.bound) / self.exact_seconds
            lines.append(
                f"by these numbers, no choice that fits is faster by more than {gap:.1f}% of the exact time"
            )
        if not math.isnan(self.error):
            lines.append(
                "error: predicted squared distance from the exact gradient, as a part of its squared norm; all together at most "
                f"{self.limit:g}"
            )
        for name, point in (("faster", self.better), ("smaller", self.smaller)):
            if point is not None:
                lines.append(
                    f"the next {name} choice: {amount(point.peak)} and {self._time(point.seconds):.2f} of the exact time"
                )
        return lines + list(self.notes)

    def _draw(self, figure) -> None:
        axes = figure.add_subplot()
        scale = 2**20
        peaks = [point.peak / scale for point in self.front]
        times = [self._time(point.seconds) for point in self.front]
        axes.plot(peaks, times, marker=".", label="fit_")
        axes.plot([self.peak / scale], [self._time(self.seconds)], "o", label="chosen")
        axes.plot([self.exact_peak / scale], [1.0], "s", label="exact")
        axes.axvline(self.memory / scale, color="gray", linewidth=0.8)
        axes.set_xlabel("peak of a step, MiB")
        axes.set_ylabel("time of a step / exact")
        axes.legend()


def parameters_of(model: nn.Module) -> int:
    """Return the number of elements of the model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


@whole_or_not_at_all
def _applied(model: nn.Module, settings: Settings) -> Controller | None:
    return settings.apply(model)


def rows_of(settings: Settings, parts, options) -> tuple[FitBlocks, ...]:
    """Return a row for each run of blocks with one option, and the rest."""
    found: list[tuple[list[str], Option, list[int]]] = []
    for number, (path, option) in enumerate(settings.blocks.items()):
        place = 2 * number + 1
        is_next = found and found[-1][1] == option and _parent(found[-1][0][-1]) == _parent(path)
        if is_next:
            found[-1][0].append(path)
            found[-1][2].append(place)
        else:
            found.append(([path], option, [place]))
    rest = settings.of_rest
    rows = [(_range(paths), option, places) for paths, option, places in found]
    rows.append(("rest", rest, list(range(0, len(parts), 2))))
    return tuple(
        FitBlocks(
            name,
            option.name,
            1 if name == "rest" else len(places),
            int(sum(parts[place].saved[options[place]] for place in places)),
            float(sum(parts[place].seconds[options[place]] for place in places)),
            float(sum(parts[place].error[options[place]] for place in places)),
        )
        for name, option, places in rows
    )


def _parent(path: str) -> str:
    return re.sub(r"\d+$", "", path)


def _range(paths: list[str]) -> str:
    """Return `layers.0-5` for paths of blocks that follow each other."""
    first, last = paths[0], paths[-1]
    if len(paths) == 1:
        return first
    end = re.search(r"\d+$", last)
    return f"{first}-{end[0]}" if end else f"{first} to {last}"
