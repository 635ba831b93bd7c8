"""The result of the demo. An arm is one setting, trained from every seed; the exact arm has torch's own activations."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from fewbit._version import __version__
from fewbit.demo import training
from fewbit.demo.demo_figure import draw_demo
from fewbit.render.formats import amount
from fewbit.render.result import Result
from fewbit.render.view import Column, View
from fewbit.sizes import counted

CURVE_POINTS = 30
VERDICT = "within 1 std"


@dataclass(frozen=True)
class Arm:
    """One setting, trained from every seed.

    Attributes:
        bits: The bits of few-bit GELUs, or None.
        activation_bytes: The bytes that the GELUs save for backward in one step, as `fewbit.saved_bytes` counts.
        model_bytes: The bytes that the whole model saves.
        runs: The trainings, in the order of the seeds.
        everything: The bits with which `compress_` has converted the whole model, or None.
        level: The level of ActNN at which `compress_` has converted the model.
    """

    bits: int | None
    activation_bytes: int
    model_bytes: int
    runs: tuple[training.Run, ...]
    seconds: float
    everything: float | None = None
    level: str = "L2"

    @property
    def name(self) -> str:
        """The name of the arm in tables and pictures."""
        if self.everything is not None:
            start = "all" if self.level == "L2" else self.level
            return f"{start} {counted(self.everything, 'bit')}"
        if self.bits is None:
            return "exact"
        return counted(self.bits, "bit")

    @property
    def finals(self) -> list[float]:
        """The final losses, in nats per character."""
        return [run.final for run in self.runs]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.finals)

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.finals) if len(self.runs) > 1 else None

    def differences(self, exact: Arm) -> list[float]:
        """Return this arm's final loss minus the exact arm's, for each seed."""
        return [ours - theirs for ours, theirs in zip(self.finals, exact.finals, strict=True)]

    def curve(self) -> tuple[list[float], list[float]]:
        """Return (middle steps of blocks, training losses averaged over seeds and blocks)."""
        runs = zip(*(run.train for run in self.runs), strict=True)
        losses = [statistics.fmean(step) for step in runs]
        size = max(1, len(losses) // CURVE_POINTS)
        blocks = [losses[i : i + size] for i in range(0, len(losses), size)]
        middles = [i * size + (len(block) + 1) / 2 for i, block in enumerate(blocks)]
        return middles, [statistics.fmean(block) for block in blocks]


@dataclass(frozen=True)
class Yardstick:
    """The standard deviation of the exact arm's final loss over seeds, the unit of differences between losses.

    Attributes:
        std: The standard deviation, in nats per character.
        stored: Whether the standard deviation comes from the stored results.
    """

    std: float
    seeds: int
    stored: bool


@dataclass(frozen=True, repr=False)
class Demo(Result):
    """The result of the demo.

    Attributes:
        characters: The number of characters of the training text.
        backend: The name of the backend that computed the few-bit activations.
        arms: The arms, the exact one first.
        stored: The stored results with the same settings, or None.
    """

    settings: training.TrainingSettings
    characters: int
    backend: str
    arms: tuple[Arm, ...]
    stored: dict | None = None

    @property
    def exact(self) -> Arm:
        return self.arms[0]

    @property
    def seeds(self) -> int:
        return len(self.exact.runs)

    @property
    def seconds(self) -> float:
        return sum(arm.seconds for arm in self.arms)

    @property
    def yardstick(self) -> Yardstick | None:
        """The unit of differences: of this run, or for one seed of the stored results, or None."""
        if self.exact.std is not None:
            return Yardstick(self.exact.std, self.seeds, stored=False)
        if self.stored is None:
            return None
        return Yardstick(self.stored["arms"][0]["std"], self.stored["seeds"], stored=True)

    def distance(self, arm: Arm) -> float | None:
        """Return an arm's mean final loss minus the exact arm's in units of `yardstick`, or None."""
        if self.yardstick is None or self.yardstick.std == 0:
            return None
        return statistics.fmean(arm.differences(self.exact)) / self.yardstick.std

    def to_dict(self) -> dict:
        return {
            "machine": {
                "system": platform.platform(terse=True),
                "cores": os.cpu_count(),
                "instructions": torch.backends.cpu.get_cpu_capability(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "fewbit": __version__,
                "backend": self.backend,
            },
            "settings": asdict(self.settings),
            "characters": self.characters,
            "seeds": self.seeds,
            "arms": [
                record | self._series(arm)
                for record, arm in zip(self.records(), self.arms, strict=True)
            ],
        }

    document = to_dict

    def records(self) -> list[dict]:
        return [self._record(arm) for arm in self.arms]

    def _record(self, arm: Arm) -> dict:
        differences, distance = arm.differences(self.exact), self.distance(arm)
        return {
            "name": arm.name,
            "bits": arm.bits,
            "everything": arm.everything,
            "level": arm.level if arm.everything is not None else None,
            "activation_bytes": arm.activation_bytes,
            "model_bytes": arm.model_bytes,
            "seconds": round(arm.seconds, 2),
            "mean": arm.mean,
            "std": arm.std,
            "difference": statistics.fmean(differences),
            "difference_std": statistics.stdev(differences) if len(differences) > 1 else None,
            "within_one_std": None if distance is None else abs(distance) <= 1,
        }

    def _series(self, arm: Arm) -> dict:
        steps, losses = arm.curve()
        curve = {"steps": steps, "losses": [round(loss, 5) for loss in losses]}
        return {"finals": arm.finals, "curve": curve}

    def view(self) -> View:
        columns = (
            Column("setting", lambda arm: arm.name, "word"),
            Column("GELU bytes", lambda arm: amount(arm.activation_bytes), drop=1),
            Column("all bytes", lambda arm: amount(arm.model_bytes), drop=2),
            Column("final loss", lambda arm: _with_spread(arm.finals, ".4f")),
            Column("difference", self._difference),
            Column(VERDICT, self._verdict),
        )
        title = (
            "A character transformer, exact, with few-bit GELU and compressed, "
            f"{counted(self.settings.steps, 'step')} each"
        )
        return View(title, columns, self.arms, list(self._notes()), figure=self.plot)

    def _difference(self, arm: Arm) -> str:
        return "" if arm is self.exact else _with_spread(arm.differences(self.exact), "+.4f")

    def _verdict(self, arm: Arm) -> str:
        if arm is self.exact:
            return ""
        distance = self.distance(arm)
        if distance is None:
            return "unknown"
        is_within = abs(distance) <= 1
        # More decimals are shown until they tell on which side of 1 the number is.
        texts = (f"{distance:+.{decimals}f}" for decimals in range(1, 18))
        text = next(text for text in texts if (abs(float(text)) <= 1) == is_within)
        return f"{'yes' if is_within else 'no'} ({text})"

    def _notes(self) -> Iterator[str]:
        size = f"{self.settings.batch} x {self.settings.context} characters"
        yield "setting: torch's GELU (exact), the bits of few-bit GELU, or settings of the whole model."
        yield f"GELU bytes: what the GELUs save for the backward pass of one step ({size})."
        yield f"all bytes: what the whole model saves for the backward pass of one step ({size})."
        yield "loss: nats per character of held-out text."
        yield "With the same seed, all rows start with the same parameters and see the same batches."
        if any(arm.everything is not None for arm in self.arms):
            yield "all: compress_(model, bits=...): inputs of layers have those bits, keys, queries, norms and GELU some more."
        if any(arm.level == "L3" for arm in self.arms):
            yield "L3: those bits on average, which all samples and layers share (AdaptiveBits)."
        if self.seeds > 1:
            yield f"means of {self.seeds} seeds ± standard deviation; differences in pairs."
        yardstick = self.yardstick
        if yardstick is None:
            yield f"{VERDICT}: unknown from one seed; --seeds 5 measures it."
        else:
            yield f"{VERDICT}: of exact's loss over seeds; in brackets the difference in stds."
            source = "these runs"
            if yardstick.stored:
                source = f"{yardstick.seeds} seeds in benchmarks/results/demo.json"
            yield f"std: {yardstick.std:.4f}, from {source}."
            yield from self._stored_verdict() if yardstick.stored else ()
        yield f"{self.seconds:.0f} s of training, each on one thread, backend {self.backend}."

    def _stored_verdict(self) -> Iterator[str]:
        yield f"mean differences of those {self.stored['seeds']} seeds, ± their standard deviation:"
        names = {arm.name for arm in self.arms}
        arms = [arm for arm in self.stored["arms"][1:] if arm["name"] in names]
        width = max(len(arm["name"]) for arm in arms)
        for arm in arms:
            verdict = "within" if arm["within_one_std"] else "not within"
            found = f"{arm['difference']:+.4f} ± {arm['difference_std']:.4f}"
            yield f"  {arm['name']:{width}} {found}, {verdict} one std of exact's loss"

    def _draw(self, figure) -> None:
        draw_demo(figure, self)


def _with_spread(values: list[float], form: str) -> str:
    mean = format(statistics.fmean(values), form)
    return f"{mean} ± {statistics.stdev(values):.4f}" if len(values) > 1 else mean
