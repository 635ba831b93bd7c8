"""Compiled training of a GPT-2 of four blocks on a GPU: torch.compile compared with fewbit.compile.

    python benchmarks/study.py gpu_compiled                # a CUDA device, about a minute
    python benchmarks/study.py gpu_compiled --device cpu   # a tiny model, the backend aot_eager, two arms; saves nothing

The model, the data and the training step are those of gpu_training.py. "error" is the distance of the gradient from that of
eager training, divided by the norm of the latter; the gradient of torch.compile differs too, because bfloat16 results are
rounded at other places. "first_s" is the time of building the model, compiling it and the first step. "peak_bytes" includes
"before_bytes", the memory of the parameters and of the optimizer.

Writes results/gpu_compiled.json after each arm.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial

import gpu_training
import harness
import torch

import fewbit

CASE, STEPS = "gpt2", {"cuda": 10, "cpu": 1}
ARMS = {
    "exact": lambda model, backend: model,
    "torch.compile": torch.compile,
    "fewbit.compile 8 bits": partial(fewbit.compile, bits=8),
    "fewbit.compile 2 bits": partial(fewbit.compile, bits=2),
}


def measure(arm, settings, device, exact):
    """Train one arm. Return its row and its first gradient.

    Args:
        arm: a key of ARMS.
        settings: the settings of the model, as in gpu_training.CASES.
        device: "cuda" or "cpu".
        exact: the gradient of the arm "exact", or None for that arm.
    """
    prepare = partial(ARMS[arm], backend="inductor" if device == "cuda" else "aot_eager")
    torch._dynamo.reset()
    start = time.perf_counter()
    training = gpu_training.Training(CASE, settings, device, prepare)
    training.take(settings["batch"])
    # On the host, so that it is not part of the memory that is measured.
    gradient = training.gradient(autocast=True).cpu()
    row = {"arm": arm, "first_s": time.perf_counter() - start}
    if exact is not None:
        row["error"] = float((gradient - exact).norm() / exact.norm())
    memory = gpu_training.DEVICES[device](2**40)
    for _ in range(3):
        training.step()
    training.optimizer.zero_grad(set_to_none=True)
    memory.clear()
    row["before_bytes"] = memory.now()
    with memory.peak() as peaks:
        training.step()
    row["peak_bytes"] = peaks["allocated"]
    times = memory.seconds(training.step, STEPS[device])
    row |= {"step_ms": 1e3 * statistics.median(times), "step_least_ms": 1e3 * times[0]}
    return row | {"step_most_ms": 1e3 * times[-1]}, gradient


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("expected a CUDA device, found none; --device cpu runs a tiny model")
    cases = gpu_training.CASES if device == "cuda" else gpu_training.TINY
    settings = cases[CASE] | ({"depth": 4} if device == "cuda" else {})
    rows, exact = [], None
    arms = ARMS if device == "cuda" else ("exact", "fewbit.compile 2 bits")
    for arm in arms:
        row, gradient = measure(arm, settings, device, exact)
        exact = gradient if exact is None else exact
        print(row, flush=True)
        rows.append(row)
        if device == "cuda":
            harness.save("gpu_compiled", gpu_training.about(device) | settings, rows)
