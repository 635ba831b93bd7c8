"""The measurements of one arm of alternatives.py: bytes, times, the error of the gradient, and the final losses of training."""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch._inductor.config as inductor_config
from networks.compiled_networks import Step, gradient
from networks.short_training import train_and_test
from rivals import tasks
from rivals.arms import ALL, autocast
from rivals.step_bytes import step_bytes
from rivals.tasks import to_device

SEEDS, STEPS, LEARNING_RATE = 3, 60, 1e-3
DRAWS = 3
TURNS, LEAST_TURNS, SECONDS = 20, 5, 10
"""The most and the least turns in which exact training and an arm are timed, and the seconds after which turns end."""
ADAPTATION = 33
"""The steps before the measurement of an arm that adapts. They contain the observed step 32, and the next one is 64."""


def measure_alone(network, arm, device, quick, folder, backend):
    """Measure an arm in a new process. Return its row; if the arm fails, its first line of the reason as "failure"."""
    # A process is a copy of a server that has imported torch, because imports take longer than many measurements.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(measure, network, arm, device, quick, folder, backend).result()
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}


def measure(network, arm, device, quick, folder, backend):
    """Return the fields of a row: what was measured of an arm, in this process.

    Args:
        network: a key of `tasks.networks`.
        arm: a key of `arms.ALL`.
        device: "cpu" or "cuda". On a CPU, one thread computes.
        quick: whether to take small batches and few steps.
        folder: the folder in which `tasks.prepare` has written its files.
        backend: the compiler's backend for bytes and times. Training has "aot_eager", which compiles faster.
    """
    torch.set_num_threads(1)
    task, one = tasks.networks(Path(folder))[network], ALL[arm]
    inductor_config.compile_threads = 1
    with tempfile.TemporaryDirectory() as cache, one.context():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        row = _measurements(task, network, one, device, quick, folder, backend)
        if one.is_trained(network):
            torch._dynamo.reset()
            seeds = range(1 if quick else SEEDS)
            results = [_trained(task, one, seed, device, quick) for seed in seeds]
            row["loss"] = [_finite(result["train"]) for result in results]
            row["held_out"] = [_finite(result["final"]) for result in results]
    return row


def _finite(value):
    """Return a number, or None in place of NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


# -- One batch --------------------------------------------------------------------------------------


def _measurements(task, network, arm, device, quick, folder, backend):
    torch.manual_seed(0)
    exact = Step(task).to(device)
    exact.model.load_state_dict(torch.load(tasks.warm_path(folder, network), map_location=device))
    size = task.quick if quick else task.measured
    batch = to_device(task.batch(size, torch.Generator().manual_seed(1)), device)
    own = _copy(exact, arm)
    run = arm.prepare(own, backend)
    run(*batch).backward()  # a compiler compiles here
    row = {"backend": backend} if arm.is_compiled else {}
    if arm.adapts:
        _adapt(task, run, own, device, quick)
    row["saved_bytes"], row["peak_bytes"] = step_bytes(own, run, batch)
    if arm.prepare is not ALL["full fine-tuning"].prepare:
        row["error"] = _finite(_error(exact, own, run, batch, DRAWS if arm.is_random else 1))
    row |= _times(exact, own, run, batch, 2 if quick else LEAST_TURNS)
    return row | _in_bfloat16(arm, exact, batch, device)


def _copy(module, arm):
    """Return a copy of a module for an arm.

    Inductor saves a channels-last copy of every weight of a convolution that has another memory format.
    """
    own = copy.deepcopy(module)
    return own.to(memory_format=torch.channels_last) if arm.is_compiled else own


def _adapt(task, run, module, device, quick):
    generator = torch.Generator().manual_seed(2)
    for _ in range(ADAPTATION - 1):
        module.zero_grad()
        run(
            *to_device(task.batch(task.quick if quick else task.trained, generator), device)
        ).backward()


def _in_bfloat16(arm, exact, batch, device):
    """Return the bytes of an arm in bfloat16 autocast. Compiled arms save the same with the backend aot_eager."""
    torch._dynamo.reset()
    own = _copy(exact, arm)
    try:
        run = autocast(arm.prepare(own, "aot_eager"), device)
        for _ in range(2 if arm.adapts else 1):  # these are observed steps, the next one is not
            run(*batch).backward()
        saved, peak = step_bytes(own, run, batch)
    except Exception as error:
        return {"bfloat16_failure": f"{type(error).__name__}: {error}".splitlines()[0]}
    if arm.is_compiled:  # op by op, the peak is not that of Inductor's code
        return {"bfloat16_saved_bytes": saved}
    return {"bfloat16_saved_bytes": saved, "bfloat16_peak_bytes": peak}


def _error(exact, own, run, batch, draws) -> float:
    """Return the root mean square of the error of gradients, divided by the norm of the exact gradient."""
    wanted = gradient(exact, exact, batch)
    errors = [
        (gradient(own, run, batch, seed) - wanted).square().sum().item() for seed in range(draws)
    ]
    return math.sqrt(statistics.fmean(errors) / wanted.square().sum().item())


def _times(exact, own, run, batch, least):
    """Return the times of exact steps and of an arm's steps, which take turns, and the quartiles of their ratios."""
    times, end = [], time.perf_counter() + SECONDS
    _seconds(exact, exact, batch)
    while len(times) < least or (len(times) < TURNS and time.perf_counter() < end):
        times.append((_seconds(exact, exact, batch), _seconds(own, run, batch)))
    ratios = [own / other for other, own in times]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "exact_s": statistics.median(other for other, _ in times),
        "step_s": statistics.median(own for _, own in times),
        "ratio": middle,
        "low": low,
        "high": high,
        "turns": len(times),
    }


def _seconds(module, run, batch) -> float:
    """Return the time of a forward and a backward pass: on a CPU, that of the processor."""
    module.zero_grad(set_to_none=True)
    if batch[0].is_cuda:
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(*batch).backward()
        torch.cuda.synchronize()
        return time.perf_counter() - start
    start = time.thread_time()
    run(*batch).backward()
    return time.thread_time() - start


# -- Training ---------------------------------------------------------------------------------------


def _trained(task, arm, seed, device, quick):
    """Train an arm. Return "train", the mean loss of the last tenth of the steps, and "final", that on held-out data."""
    torch.manual_seed(seed)
    module = _copy(Step(task).to(device), arm)
    run = arm.prepare(module, "aot_eager")
    size = task.quick if quick else task.trained

    def batches(generator):
        while True:
            yield to_device(task.batch(size, generator), device)

    def test(module):
        held_out = (to_device(batch, device) for batch in task.held_out(size))
        return statistics.fmean(module(*batch).item() for batch in held_out), {}

    def loss(module, batch):
        return run(*batch)

    steps = 3 if quick else STEPS
    return train_and_test(module, batches, loss, test, steps, LEARNING_RATE, seed)
