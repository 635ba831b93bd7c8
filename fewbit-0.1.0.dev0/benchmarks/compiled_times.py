"""Step times and compile times of compiled training. `python benchmarks/compiled.py --times` runs this file.

The arms are torch.compile, torch.compile with a memory budget of 0.1, and `fewbit.compile` with 4 and 2 bits. They take
turns at each step, so that a change of the machine's speed changes all of them. "ratio" is the median, over the steps, of
an arm's time divided by the time of torch.compile in the same turn; "low" and "high" are the quartiles. "compile" is the
time of the first step without torch's caches, and "compile ratio" the same divided by that of torch.compile: medians of
COMPILATIONS turns with the backend aot_eager, and single measurements with Inductor.

All networks run with the backend aot_eager, those of INDUCTOR also with Inductor. Inductor takes minutes for the unrolled
loops of recurrences.

Writes results/compiled_times.*, a row for each network, backend and arm.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from compiled_networks import Step, networks
from torch._functorch.partitioners import min_cut_rematerialization_partition

import fewbit
from fewbit.compiler.compiling import _aot_eager

STEPS, BUDGET = 40, 12
"""The most steps of each arm, and the most seconds for the steps of a network with one backend."""
COMPILATIONS = 3
INDUCTOR = "GPT-2 with F.gelu", "Llama", "ResNet on digits"
ARMS = {
    "torch.compile": lambda module, backend: plain(module, backend),
    "budget 0.1": lambda module, backend: _within_budget(module, backend),
    "fewbit.compile, 4 bits": lambda module, backend: few(module, 4, backend),
    "fewbit.compile, 2 bits": lambda module, backend: few(module, 2, backend),
}


def plain(module, backend="aot_eager"):
    """Compile a module with torch's own partitioner."""
    if backend == "aot_eager":
        backend = _aot_eager(min_cut_rematerialization_partition)
    return torch.compile(module, backend=backend)


def few(module, bits, backend="aot_eager"):
    """Compile a module with fewbit's partitioner."""
    return fewbit.compile(module, bits, backend=backend)


def _within_budget(module, backend):
    """Compile a module with torch's own partitioner and a memory budget, which torch reads at the first call."""
    # If the options did not differ, torch would take the code that it has compiled for torch.compile.
    options = {"triton.cudagraphs": False}
    is_eager = backend == "aot_eager"
    run = plain(module, backend) if is_eager else torch.compile(module, options=options)

    def call(*batch):
        with functorch_config.patch(activation_memory_budget=0.1):
            return run(*batch)

    return call


def gradient(module, run, batch, seed=0):
    """Return the gradient of all parameters, as a float64 vector, after one step of a module that `run` calls."""
    torch.manual_seed(seed)
    module.zero_grad()
    run(*batch).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).double()


def measure(name):
    """Yield a row for each backend and arm of a network."""
    network = networks()[name]
    torch.manual_seed(0)
    module, batch = Step(network), network.batch(0)
    for backend in ("aot_eager", "inductor")[: 1 + (name in INDUCTOR)]:
        with (
            inductor_config.patch(force_disable_caches=True),
            functorch_config.patch(enable_autograd_cache=False),
        ):
            yield from _rows(name, backend, module, batch)


def _rows(name, backend, module, batch):
    torch._dynamo.reset()
    # The first compilation imports and initializes parts of torch.
    _seconds(plain(torch.nn.Linear(64, 1), backend), [torch.ones(8, 64)])
    torch._dynamo.reset()
    compiling = {arm: [] for arm in ARMS}
    for _ in range(COMPILATIONS if backend == "aot_eager" else 1):
        torch._dynamo.reset()
        runs = {arm: prepare(copy.deepcopy(module), backend) for arm, prepare in ARMS.items()}
        for arm, run in runs.items():
            gc.collect()  # else the last arms pay for the garbage of the first ones
            compiling[arm].append(_seconds(run, batch))
    turns = {arm: [] for arm in ARMS}
    end = time.perf_counter() + BUDGET
    while len(turns["torch.compile"]) < STEPS and time.perf_counter() < end:
        for arm, run in runs.items():
            turns[arm].append(_seconds(run, batch))
    usual = turns["torch.compile"]
    for arm, times in turns.items():
        ratios = [own / other for own, other in zip(times, usual, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        row = {"network": name, "backend": backend, "arm": arm, "steps": len(times)}
        row |= {"seconds": statistics.median(times), "ratio": middle, "low": low, "high": high}
        row["compile"] = statistics.median(compiling[arm])
        row["compile ratio"] = _median_ratio(compiling[arm], compiling["torch.compile"])
        print(row, flush=True)
        yield row


def _median_ratio(times, others) -> float:
    return statistics.median(own / other for own, other in zip(times, others, strict=True))


def _seconds(run, batch):
    start = time.perf_counter()
    run(*batch).sum().backward()
    return time.perf_counter() - start
