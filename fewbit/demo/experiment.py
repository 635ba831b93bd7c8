"""The experiment of the demo."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fewbit.analysis.meter import saved_bytes
from fewbit.compress.compress import compress_
from fewbit.config import ACTIVATION_BITS, DEFAULT_BITS, Level
from fewbit.demo import training
from fewbit.demo.demo_result import Arm, Demo
from fewbit.demo.parallel import run_all
from fewbit.demo.text import Corpus, python_topics
from fewbit.errors import FewbitError, InputError
from fewbit.nn import GELU
from fewbit.runtime import backends

STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "demo.json"
"""The results of `fewbit demo --all --seeds 5`, in a checkout only."""
MOST_SEEDS = 100


EVERY_ARM = {"bits": (1, 2, 3, 4), "everything": (4, 2), "average": (2,)}
"""The arguments of `run_demo` for `fewbit demo --all`."""


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
    bits: Sequence[int] = (ACTIVATION_BITS,),
    everything: Sequence[int] = (DEFAULT_BITS,),
    average: Sequence[float] = (),
    seeds: int = 1,
    settings: training.TrainingSettings | None = None,
    corpus: Corpus | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    processes: int = 1,
) -> Demo:
    """Train the transformer with exact layers, with few-bit GELUs, and with all layers compressed, each from the seeds 0, 1, ...

    `bits`, `everything`, `average` and `seeds` are options of `fewbit demo` (docs/reference/cli.md). `settings` are by default those of
    benchmarks/results/demo.json. `progress` is called as `progress(name of the arm, steps done, steps in all)`. `processes` trainings run at a
    time, each with one thread, on which losses do not depend.

    Raises:
        InputError: A number is out of range.
        FewbitError: The text is too short.
    """
    check_request(bits, everything, average, seeds)
    settings = settings or training.TrainingSettings()
    corpus = corpus or python_topics()
    choices = [Arm(gelu_bits, 0, 0, (), 0.0) for gelu_bits in (None, *dict.fromkeys(bits))]
    for level, numbers in (("L2", everything), ("L3", average)):
        for number in dict.fromkeys(numbers):
            choices.append(Arm(None, 0, 0, (), 0.0, number, level))
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
    backend = backends.on[torch.device("cpu")].name
    return Demo(settings, len(corpus.train), backend, tuple(arms), _stored(settings))


def _build(arm: Arm, settings, corpus, seed):
    gelu = nn.GELU if arm.bits is None else partial(GELU, bits=arm.bits)
    model = training.build(corpus, settings, gelu, seed)
    if arm.everything is not None:
        compress_(model, Level(arm.level, arm.everything), verbose=False)
    return model


def _run(settings, corpus, task, step) -> tuple[training.Run, tuple[int, int] | None, float]:
    """Train one arm from one seed; return its losses, the saved bytes (None unless the seed is 0), and the seconds."""
    arm, seed = task
    with one_thread():
        saved = _counted(_build(arm, settings, corpus, 0), settings, corpus) if seed == 0 else None
        start = time.perf_counter()
        run = training.train(_build(arm, settings, corpus, seed), corpus, settings, seed, step)
        return run, saved, time.perf_counter() - start


def _arm(empty: Arm, results) -> Arm:
    runs, saved, seconds = zip(*results, strict=True)
    activation_bytes, model_bytes = saved[0]
    return replace(
        empty,
        activation_bytes=activation_bytes,
        model_bytes=model_bytes,
        runs=runs,
        seconds=sum(seconds),
    )


def _counted(model, settings, corpus) -> tuple[int, int]:
    characters, _ = corpus.held_out_batch(settings.batch, settings.context)
    saved = saved_bytes(model, characters)
    names = {name for name, module in model.named_modules() if isinstance(module, nn.GELU)}
    return sum(size for name, size in saved.by_module().items() if name in names), saved.total


def _stored(settings) -> dict | None:
    try:
        document = json.loads(STORED.read_text(encoding="utf-8"))
        fits = document["settings"] == asdict(settings) and document["arms"][0]["std"] is not None
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return document if fits else None


@contextmanager
def one_thread():
    """Return a context manager in which torch uses one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
