"""The cost of saving less, by the width of a model: stacks of Llama's blocks in float32 and bfloat16.

    python benchmarks/widths.py                            # widths 256 to 2,048; two hours on one core
    python benchmarks/widths.py --widths 256 512 --dtypes float32
    python benchmarks/widths.py --device cuda              # also 4,096
    python benchmarks/widths.py --profile 2048             # where the time of a step goes; stores nothing
    python benchmarks/widths.py --summary                  # only the fits, from what is stored

A step is a forward and a backward pass of two blocks (gpu_training.py) on TOKENS tokens. The arms: exact training; torch's
checkpointing of every block; selective checkpointing, which saves the results of products and of attention; the memory budget of
torch.compile's partitioner, whose graphs run op by op like eager mode; fewbit with 4 and 2 bits;
`fewbit.checkpoint_` with inputs of 8 bits, and with 2 bits inside of the regions; and `fewbit.fit_` with a quarter of the memory between the least that it
can reach and the peak of exact training.

Steps of all arms take turns. Times are processor times of one thread, on a GPU wall times of whole steps. "time" is the median of the
ratios to the exact step of the same round. "saved" are the bytes that a forward pass saves, for each token and layer, and "peak"
the most bytes that a step allocates. First, gradients at 8 bits are compared with exact gradients.

A product takes a time that grows with the square of the width, a copy one that grows with the width. So a + b / width is fitted to the
ratios of each arm (`a`, `b`). `counted_b` is the part of b that fewbit's kernels take: the mean over the widths of the width, times
their processor time in a step (`kernels_ms`), divided by the time of an exact step. `elements` are those that are quantized for
each token, layer and channel, from the difference of the bytes with 4 and with 2 bits.

Writes results/widths.json, a row for each width, dtype and arm, and results/widths_summary.json, a row for each dtype and arm.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import statistics
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from unittest import mock

import gpu_training
import harness
import numpy as np
import torch
from fit import OptimizerBytes, Search, examine
from networks.compiled_networks import with_budget
from rivals.arms import PRODUCTS
from rivals.step_bytes import step_bytes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fewbit
from fewbit.runtime import backends

DEPTH, TOKENS = 2, 512
ROUNDS = {256: 12, 512: 8, 1024: 5, 2048: 3, 4096: 5}
SHARE, ERROR = 0.25, 0.1
"""Of `fit_`: the memory, and the bound of the error."""
COUNTED = "4 bits", "2 bits"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 0.02, "bfloat16": 0.04}


def loss(model, batch):
    """Return a scalar whose gradient is random, and which saves nothing of its own."""
    return (model(batch[0]) * batch[1]).sum()


def selective(model):
    contexts = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
    for block in model.h:
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, context_fn=contexts
        )
    return model


def few(bits):
    def arm(model):
        fewbit.compress_(model, bits, verbose=False)
        return model

    return arm


def fitted(model, batch):
    optimizer = OptimizerBytes(model, torch.optim.SGD, False)
    found = examine(model, batch, loss, optimizer, progress=False)
    search = Search(found, ERROR)
    exact, least = int(max(found.exact.bytes.peak.max(), found.update)), search.least()
    search.fastest(int(least.peak + SHARE * (exact - least.peak))).settings.apply(model)
    return model


ARMS = {
    "exact": lambda model: model,
    "checkpointing": gpu_training.checkpointed,
    "selective checkpointing": selective,
    "memory budget 0.5": functools.partial(with_budget, share=0.5),
    "4 bits": few(4),
    "2 bits": few(2),
    "checkpoint_": gpu_training.checkpoint_,
    "checkpoint_, 2 bits": lambda model: gpu_training.checkpoint_(few(2)(model)),
    "fit_": fitted,  # also needs a batch
}


class Case:
    """A stack of blocks with a batch, and a copy for each arm, which shares the parameters."""

    def __init__(self, width: int, dtype: str, device: str):
        torch.manual_seed(0)
        self.width, self.dtype, self.device = width, dtype, device
        self.model = gpu_training.Llama(DEPTH, width, TOKENS).to(device, DTYPES[dtype])
        size = (1, TOKENS, width)
        x, y = (torch.randn(size, device=device, dtype=DTYPES[dtype]) for _ in range(2))
        self.batch = x.requires_grad_(), y

    def copied(self):
        """Return a copy of the model with the same parameters."""
        shared = {id(parameter): parameter for parameter in self.model.parameters()}
        return copy.deepcopy(self.model, shared)

    def arm(self, name: str):
        model = self.copied()
        return fitted(model, self.batch) if name == "fit_" else ARMS[name](model)

    def step(self, model) -> None:
        self.clear()
        loss(model, self.batch).backward()

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.batch[0].grad = None

    def seconds(self, model) -> float:
        self.clear()
        if self.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter if self.device == "cuda" else time.thread_time
        start = now()
        loss(model, self.batch).backward()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return now() - start

    def gradient(self, model) -> torch.Tensor:
        self.step(model)
        return torch.cat([p.grad.flatten().float() for p in self.model.parameters()])

    def check(self) -> None:
        """Compare the gradient at 8 bits with the exact one."""
        exact, found = self.gradient(self.model), self.gradient(few(8)(self.copied()))
        error = float((found - exact).norm() / exact.norm())
        if not error < TOLERANCE[self.dtype]:
            raise SystemExit(f"gradients with 8 bits have a relative error of {error:.3f}")

    def kernels_ms(self, run) -> float:
        """Return the processor time of fewbit's kernels in a step, in milliseconds."""
        found = []
        for _ in range(3):
            times = Counter()
            with kernels_timed(times):
                self.step(run)
            found.append(sum(times.values()))
        return statistics.median(found)

    def rows(self, arms: list[str], rounds: int) -> list[dict]:
        """Return a row for each arm."""
        self.check()
        runs = {name: self.arm(name) for name in arms}
        times = {name: [] for name in runs}
        for run in runs.values():
            self.step(run)
        for _ in range(rounds):
            for name, run in runs.items():
                times[name].append(self.seconds(run))
        found = []
        for name, run in runs.items():
            ratios = [a / b for a, b in zip(times[name], times["exact"], strict=True)]
            low, middle, high = statistics.quantiles(ratios)
            self.clear()
            saved, peak = step_bytes(
                self.model, lambda *batch, run=run: loss(run, batch), self.batch
            )
            found.append(
                {
                    "width": self.width,
                    "dtype": self.dtype,
                    "arm": name,
                    "time": round(middle, 3),
                    "quartiles": [round(low, 3), round(high, 3)],
                    "rounds": rounds,
                    "ms": round(1e3 * statistics.median(times[name]), 2),
                    "saved": round(saved / TOKENS / DEPTH, 1),
                    "peak": peak,
                }
            )
            if self.device == "cpu" and name in COUNTED:
                found[-1]["kernels_ms"] = round(self.kernels_ms(run), 3)
            print(found[-1], flush=True)
        return found


# -- The fits ---------------------------------------------------------------------------------------


def line(widths, ratios) -> tuple[float, float]:
    """Return a and b of the least squares fit ratio = a + b / width."""
    b, a = np.polyfit([1 / width for width in widths], ratios, 1)
    return float(a), float(b)


def summary(rows) -> list[dict]:
    """Return a row for each dtype and arm that has at least three widths."""
    found = []
    for dtype in DTYPES:
        own = {(row["arm"], row["width"]): row for row in rows if row["dtype"] == dtype}
        widths = sorted({width for _, width in own})
        for arm in ARMS:
            measured = [own[arm, width] for width in widths if (arm, width) in own]
            if arm == "exact" or len(measured) < 3:
                continue
            of = [row["width"] for row in measured]
            a, b = line(of, [row["time"] for row in measured])
            row = {"dtype": dtype, "arm": arm, "a": round(a, 3), "b": round(b, 1)}
            row["largest_deviation"] = round(
                max(abs(a + b / row["width"] - row["time"]) for row in measured), 3
            )
            if "kernels_ms" in measured[0]:
                widest = of[-1]
                bits = own["4 bits", widest]["saved"] - own["2 bits", widest]["saved"]
                row["elements"] = round(8 / 2 * bits / widest, 2)
                shares = (
                    one["width"] * one["kernels_ms"] / own["exact", one["width"]]["ms"]
                    for one in measured
                )
                row["counted_b"] = round(statistics.fmean(shares), 1)
            found.append(row)
            print(row, flush=True)
    return found


# -- Where the time goes ----------------------------------------------------------------------------


@contextmanager
def kernels_timed(times: Counter):
    """Add the milliseconds of each kernel to `times` while the block runs."""
    kernels = type(backends.on[torch.device("cpu")])

    def timed(name, call):
        def run(*arguments, **options):
            start = time.thread_time()
            try:
                return call(*arguments, **options)
            finally:
                times[f"kernel {name}"] += 1e3 * (time.thread_time() - start)

        return run

    with ExitStack() as stack:
        for name, call in vars(kernels).items():
            if callable(call) and not name.startswith("_"):
                stack.enter_context(mock.patch.object(kernels, name, timed(name, call)))
        yield


class OperationsTimed(TorchDispatchMode):
    """Adds the milliseconds of each of torch's operations to `times` while the block runs, in processor time."""

    def __init__(self, times: Counter):
        super().__init__()
        self.times = times

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        start = time.thread_time()
        result = func(*args, **(kwargs or {}))
        self.times[str(func)] += 1e3 * (time.thread_time() - start)
        return result


def profile(width: int, dtype: str, arm: str) -> None:
    """Print the processor times of torch's operations and of fewbit's kernels in a step, beside those of an exact step."""
    case = Case(width, dtype, "cpu")
    times = {}
    for name in ("exact", arm):
        run = case.arm(name)
        for _ in range(2):
            case.step(run)
        ops = Counter()
        with kernels_timed(ops), OperationsTimed(ops):
            case.step(run)
        whole = statistics.median(1e3 * case.seconds(run) for _ in range(5))
        times[name] = ops, whole
    ops, whole = times[arm]
    exact, exact_whole = times["exact"]
    for of, seconds in times.values():
        of["all else"] = seconds - sum(of.values())
    print(f"{arm}, width {width}, {dtype}: {whole:.1f} ms, exact {exact_whole:.1f} ms")
    for name in sorted(ops | exact, key=lambda name: -abs(ops[name] - exact[name]))[:25]:
        share = (ops[name] - exact[name]) / exact_whole
        print(f"{name:50}{exact[name]:10.2f}{ops[name]:10.2f}{100 * share:8.1f} %")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--widths", type=int, nargs="+", choices=ROUNDS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rounds", type=int, help="the rounds of each case, at least 2")
    parser.add_argument("--profile", type=int, choices=ROUNDS, metavar="WIDTH")
    parser.add_argument("--arm", choices=ARMS, default="2 bits", help="the arm of the profile")
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.profile:
        profile(options.profile, options.dtypes[0], options.arm)
        return
    is_stored = options.device == "cpu" or os.environ.get("OUT")
    name = "widths" if options.device == "cpu" else "widths_cuda"
    about = harness.machine("torch") | {"fewbit": fewbit.__version__}
    rows = harness.stored(name)
    for width in () if options.summary else options.widths or ROUNDS:
        if width == 4096 and options.device == "cpu" and not options.widths:
            continue
        for dtype in options.dtypes:
            arms = ["exact", *(arm for arm in options.arms if arm != "exact")]
            case = Case(width, dtype, options.device)
            found = case.rows(arms, options.rounds or ROUNDS[width])
            new = [(width, dtype, arm) for arm in arms]
            rows = [row for row in rows if (row["width"], row["dtype"], row["arm"]) not in new]
            rows += found
            if is_stored:
                harness.save(name, about, rows)
    fits = summary(rows)
    if is_stored:
        harness.save(f"{name}_summary", about, fits)


if __name__ == "__main__":
    main()
