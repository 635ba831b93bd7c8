"""The experiment of the demo: the same training with exact and few-bit GELU, with its results as plain data."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fewbit._version import __version__
from fewbit.analysis.meter import saved_bytes
from fewbit.compress.compress import compress_
from fewbit.config import LayerSettings, Level
from fewbit.convert.settings import ATTENTION_BITS
from fewbit.demo import training
from fewbit.demo.parallel import run_all
from fewbit.demo.text import Corpus, python_topics
from fewbit.errors import FewbitError, InputError
from fewbit.nn import GELU
from fewbit.runtime import backends
from fewbit.sizes import counted

STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "demo.json"
"""The results of `fewbit demo --all --seeds 5`; the file is part of a checkout, not of the package."""
CURVE_POINTS = 30
"""Largest number of points of a loss curve."""
MOST_SEEDS = 100


@dataclass(frozen=True)
class Arm:
    """One configuration of the experiment.

    Attributes:
        bits: Bits of few-bit GELUs; None for torch.nn.GELU.
        activation_bytes: Bytes that the GELUs save for backward in one step, counted by `fewbit.saved_bytes`.
        model_bytes: Bytes that the whole model saves.
        runs: The runs in the order of the seeds.
        seconds: The seconds of all runs.
        everything: Bits of quantized inputs if the whole model is compressed, else None.
        level: The level of the compression.
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
        """The final losses in the order of the seeds."""
        return [run.final for run in self.runs]

    @property
    def mean(self) -> float:
        """The mean final loss."""
        return statistics.fmean(self.finals)

    @property
    def std(self) -> float | None:
        """The sample standard deviation of the final losses; None for one seed."""
        return statistics.stdev(self.finals) if len(self.runs) > 1 else None

    def differences(self, exact: Arm) -> list[float]:
        """Return the differences to the final losses of another arm, seed by seed."""
        return [ours - theirs for ours, theirs in zip(self.finals, exact.finals, strict=True)]

    def curve(self) -> tuple[list[float], list[float]]:
        """Return steps, and the mean training losses of blocks of steps around them, over all seeds."""
        losses = [
            statistics.fmean(step) for step in zip(*(run.train for run in self.runs), strict=True)
        ]
        size = max(1, len(losses) // CURVE_POINTS)
        blocks = [losses[i : i + size] for i in range(0, len(losses), size)]
        middles = [i * size + (len(block) + 1) / 2 for i, block in enumerate(blocks)]
        return middles, [statistics.fmean(block) for block in blocks]


@dataclass(frozen=True)
class Yardstick:
    """The standard deviation of the exact arm's final loss, with which differences are compared.

    Attributes:
        std: The standard deviation.
        seeds: The number of seeds.
        stored: Whether it comes from the stored results.
    """

    std: float
    seeds: int
    stored: bool


@dataclass(frozen=True)
class Demo:
    """The results of the experiment.

    Attributes:
        settings: The settings of every run.
        characters: The number of characters that are trained on.
        backend: The name of the backend.
        arms: The arms, the exact one first.
        stored: The document at STORED if its settings are the same, else None.
    """

    settings: training.Settings
    characters: int
    backend: str
    arms: tuple[Arm, ...]
    stored: dict | None = None

    @property
    def exact(self) -> Arm:
        """The arm with torch.nn.GELU."""
        return self.arms[0]

    @property
    def seeds(self) -> int:
        """The number of seeds."""
        return len(self.exact.runs)

    @property
    def seconds(self) -> float:
        """The seconds of all runs."""
        return sum(arm.seconds for arm in self.arms)

    @property
    def yardstick(self) -> Yardstick | None:
        """The yardstick from these runs if there are several seeds, else from the stored ones; None without those."""
        if self.exact.std is not None:
            return Yardstick(self.exact.std, self.seeds, stored=False)
        if self.stored is None:
            return None
        return Yardstick(self.stored["arms"][0]["std"], self.stored["seeds"], stored=True)

    def distance(self, arm: Arm) -> float | None:
        """Return the mean difference to the exact arm in standard deviations; None without a yardstick."""
        if self.yardstick is None or self.yardstick.std == 0:
            return None
        return statistics.fmean(arm.differences(self.exact)) / self.yardstick.std

    def to_dict(self) -> dict:
        """Return all results as values that JSON can represent. Losses are in nats per character."""
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
            "arms": [self._arm_record(arm) for arm in self.arms],
        }

    def _arm_record(self, arm: Arm) -> dict:
        differences = arm.differences(self.exact)
        distance = self.distance(arm)
        steps, losses = arm.curve()
        return {
            "name": arm.name,
            "bits": arm.bits,
            "everything": arm.everything,
            "level": arm.level if arm.everything is not None else None,
            "activation_bytes": arm.activation_bytes,
            "model_bytes": arm.model_bytes,
            "seconds": round(arm.seconds, 2),
            "finals": arm.finals,
            "mean": arm.mean,
            "std": arm.std,
            "difference": statistics.fmean(differences),
            "difference_std": statistics.stdev(differences) if len(differences) > 1 else None,
            "within_one_std": None if distance is None else abs(distance) <= 1,
            "curve": {"steps": steps, "losses": [round(loss, 5) for loss in losses]},
        }


ACTIVATION_BITS = 3
"""Bits of GELUs in models that are compressed as a whole."""
EVERY_ARM = {"bits": (1, 2, 3, 4), "everything": (2,), "average": (2,)}
"""The arms that `fewbit demo --all` trains, and that STORED contains."""


def check_request(
    bits: Sequence[int] = (),
    everything: Sequence[int] = (),
    average: Sequence[float] = (),
    seeds: int = 1,
) -> None:
    """Raise InputError if an argument of `run_demo` is out of range."""
    requested = (
        ("bits", bits, 1, 8),
        ("everything", everything, 1, 8),
        ("average", average, 1, 8),
        ("seeds", (seeds,), 1, MOST_SEEDS),
    )
    for name, numbers, least, most in requested:
        for number in numbers:
            if not least <= number <= most:
                raise InputError(f"{name}: expected {least} to {most}, got {number!r}")


def run_demo(
    bits: Sequence[int] = (3,),
    everything: Sequence[int] = (),
    average: Sequence[float] = (2,),
    seeds: int = 1,
    settings: training.Settings | None = None,
    corpus: Corpus | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    processes: int = 1,
) -> Demo:
    """Train the transformer with exact GELU and in fewer bits, from the same seeds 0, 1, ...

    Args:
        bits: Bits of few-bit GELUs; one arm is trained for each entry.
        everything: Bits of quantized inputs in models that `compress_` has converted, with 3 bits for GELUs and 4 for
            attention; one arm for each entry.
        average: Average bits of such models at level L3, which shares bits between layers; one arm for each entry.
        seeds: Number of seeds; every arm is trained from every seed.
        settings: Settings of every training; by default those of STORED.
        corpus: The text; by default the help texts that Python ships.
        progress: Called as `progress(what, steps done, steps in all)`.
        processes: Number of trainings that run at a time, one thread each. Tensors are small, and with one thread the same
            seed gives the same losses on any number of cores.

    Raises:
        FewbitError: The text is too short.
    """
    check_request(bits, everything, average, seeds)
    settings = settings or training.Settings()
    corpus = corpus or python_topics()
    choices = [Arm(gelu_bits, 0, 0, (), 0.0) for gelu_bits in (None, *dict.fromkeys(bits))]
    for level, numbers in (("L2", everything), ("L3", average)):
        for number in dict.fromkeys(numbers):
            choices.append(Arm(ACTIVATION_BITS, 0, 0, (), 0.0, number, level))
    if len(corpus.train) <= settings.context or len(corpus.held_out) <= settings.context:
        raise FewbitError(f"corpus: expected more than {10 * settings.context} characters")
    tasks = [(arm, seed) for arm in choices for seed in range(seeds)]
    done = [0] * len(tasks)

    def report(index, steps):
        arm, seed = tasks[index]
        done[index] = steps
        what = arm.name if arm.everything is not None else f"GELU, {arm.name}"
        what += f", seed {seed}" if seeds > 1 else ""
        progress(what, sum(done), len(tasks) * settings.steps)

    work = partial(_run, settings, corpus)
    results = run_all(work, tasks, min(processes, len(tasks)), report)
    arms = [_arm(empty, results[i * seeds : (i + 1) * seeds]) for i, empty in enumerate(choices)]
    backend = getattr(backends.of(torch.empty(0)), "name", "reference")
    return Demo(settings, len(corpus.train), backend, tuple(arms), _stored(settings))


def _build(arm: Arm, settings, corpus, seed):
    exact = arm.bits is None or arm.everything is not None
    model = training.build(
        corpus, settings, nn.GELU if exact else partial(GELU, bits=arm.bits), seed
    )
    if arm.everything is not None:
        attention_bits = max(arm.everything, ATTENTION_BITS)
        layers = LayerSettings(activation_bits=arm.bits, attention_bits=attention_bits)
        compress_(model, Level(arm.level, arm.everything), layers=layers, verbose=False)
    return model


def _run(settings, corpus, task, step) -> tuple[training.Run, tuple[int, int] | None, float]:
    """Train one arm from one seed. Return the run, the arm's bytes if the seed is the first, and the seconds."""
    arm, seed = task
    with one_thread():
        kept = _counted(_build(arm, settings, corpus, 0), settings, corpus) if seed == 0 else None
        start = time.perf_counter()
        run = training.train(_build(arm, settings, corpus, seed), corpus, settings, seed, step)
        return run, kept, time.perf_counter() - start


def _arm(empty: Arm, results) -> Arm:
    """Return the arm with the results of its runs, in the order of the seeds."""
    runs, kept, seconds = zip(*results, strict=True)
    activation_bytes, model_bytes = kept[0]
    return replace(
        empty,
        activation_bytes=activation_bytes,
        model_bytes=model_bytes,
        runs=runs,
        seconds=sum(seconds),
    )


def _counted(model, settings, corpus) -> tuple[int, int]:
    """Return the bytes that the GELUs and the whole model save for backward in one step."""
    characters, _ = corpus.held_out_batch(settings.batch, settings.context)
    kept = saved_bytes(model, characters)
    names = {name for name, module in model.named_modules() if isinstance(module, nn.GELU)}
    return sum(size for name, size in kept.by_module().items() if name in names), kept.total


def _stored(settings) -> dict | None:
    """Return the stored results if they have these settings and several seeds, else None."""
    try:
        document = json.loads(STORED.read_text(encoding="utf-8"))
        fits = document["settings"] == asdict(settings) and document["arms"][0]["std"] is not None
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return document if fits else None


@contextmanager
def one_thread():
    """Run a block with one thread in torch, and restore the number of threads afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
