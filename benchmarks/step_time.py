"""Step time and peak memory of training compressed models, compared with exact ones, on the CPU.

    python benchmarks/step_time.py              # about 12 minutes on 2 cores
    python benchmarks/step_time.py --quick

A step is a forward, a backward and an optimizer step, of a wider version of the demo's transformer and of ResNet-18.
The arms are exact training, fixed bits, and "L3" and "observed" with 2 bits on average.
"L3" has adapted before it is timed. In "observed" every step is an observed step, so that the difference to "L3",
divided by the interval, is the cost of adapting. The arms take turns step by step, so that a slow moment of the machine affects all of them. A ratio
is that of the medians in one process, and the median over several processes. First, gradients at 8 bits are compared
with exact gradients.

Peak memory is the resident memory of a new process for each arm that takes two steps, minus that before the first
step. MALLOC_MMAP_THRESHOLD_ makes the C library return large blocks to the system when they are freed, so that freed
memory does not count.

Writes results/step_time.json, results/adaptation_cost.json and results/peak_memory.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import harness
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fewbit
from fewbit.demo.small_transformer import CharTransformer
from fewbit.models.resnet import ResNet

ARMS = ("exact", 2, 4, 8, "L3")
TIMED = (*ARMS, "observed")
INTERVAL = fewbit.AdaptiveBits.interval
INTERVALS = {"L3": 10**6, "observed": 1}
WARM_UP = 33  # untimed steps of "L3": they contain the observed step 32, and the next is 64
CASES = {
    # batch: the batch size. The models are so large that a step is not mostly overhead.
    "transformer": {"batch": 32, "context": 128, "width": 256, "depth": 4, "heads": 8},
    "resnet18": {"batch": 16, "size": 112},
}
# Deep enough that the saved tensors need more memory than the largest layer does while it runs.
PEAKS = {"resnet50": {"batch": 16, "size": 112}}
QUICK = {
    "transformer": {"batch": 8, "context": 64, "width": 64, "depth": 2, "heads": 4},
    "resnet18": {"batch": 4, "size": 64},
}


def build(case, settings, arm):
    torch.manual_seed(0)
    if case == "transformer":
        names = ("context", "width", "depth", "heads")
        model = CharTransformer(96, *(settings[name] for name in names))
    else:
        model = ResNet(case, nn.ReLU, classes=10)
    if arm in INTERVALS:
        fewbit.compress_(model, fewbit.AdaptiveBits(2, INTERVALS[arm]), verbose=False)
    elif arm != "exact":
        fewbit.compress_(model, arm, verbose=False)
    return model


def batch(case, settings):
    torch.manual_seed(1)
    if case == "transformer":
        x = torch.randint(96, (settings["batch"], settings["context"]))
        return x, torch.randint(96, x.shape)
    size = settings["size"]
    return torch.randn(settings["batch"], 3, size, size), torch.randint(10, (settings["batch"],))


def loss(model, x, y):
    logits = model(x)
    return cross_entropy(logits.flatten(0, -2), y.flatten())


def check(case, settings):
    """Return the relative error of the whole gradient at 8 bits. Assert that it is small."""
    flat = []
    for arm in ("exact", 8):
        model = build(case, settings, arm)
        loss(model, *batch(case, settings)).backward()
        flat.append(torch.cat([each.grad.flatten() for each in model.parameters()]).double())
    error = float((flat[1] - flat[0]).norm() / flat[0].norm())
    assert error < 0.05, f"{case}: gradient error {error} at 8 bits"
    return error


def times(case, settings, steps):
    """Time all arms in turns. Return {arm: {part of a step: list of the seconds in each step}}."""
    models = {arm: build(case, settings, arm) for arm in TIMED}
    optimizers = {
        arm: torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        for arm, model in models.items()
    }
    x, y = batch(case, settings)
    for _ in range(WARM_UP):
        loss(models["L3"], x, y).backward()
    result = {arm: {"forward": [], "backward": [], "optimizer": [], "step": []} for arm in TIMED}
    for step in range(steps + 2):
        for arm, model in models.items():
            optimizers[arm].zero_grad()
            marks = [time.perf_counter()]
            value = loss(model, x, y)
            marks.append(time.perf_counter())
            value.backward()
            marks.append(time.perf_counter())
            optimizers[arm].step()
            marks.append(time.perf_counter())
            if step < 2:
                continue
            for part, (a, b) in zip(result[arm], zip(marks, marks[1:], strict=False), strict=False):
                result[arm][part].append(b - a)
            result[arm]["step"].append(marks[-1] - marks[0])
    return result


def peak(case, settings, arm):
    """Return the most bytes by which two training steps raise resident memory, and the saved bytes.

    This runs in a new process.
    """
    model = build(case, settings, arm)
    x, y = batch(case, settings)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    # Gradients are allocated before, so that only activations raise the memory. L3 observes steps 1, 2 and 4.
    for _ in range(4):
        loss(model, x[:1], y[:1]).backward()
    start = harness.resident_bytes()
    with harness.watched(harness.resident_bytes) as found:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            loss(model, x, y).backward()
            optimizer.step()
    kept = fewbit.saved_bytes(lambda: loss(model, x, y)).total
    return found.most - start, kept


def measure_times(cases, steps, processes):
    """Yield a row for each case and arm, with the median times of the parts of a step and their ratios to exact."""
    for case, settings in cases.items():
        print(f"{case} {settings}: gradient at 8 bits off by {check(case, settings):.4f}")
        runs = [harness.in_process(times, case, settings, steps) for _ in range(processes)]
        for arm in TIMED:
            row = {"case": case, "arm": arm, **settings}
            for part in runs[0][arm]:
                own = [statistics.median(run[arm][part]) for run in runs]
                exact = [statistics.median(run["exact"][part]) for run in runs]
                ratios = sorted(a / b for a, b in zip(own, exact, strict=True))
                row |= {
                    f"{part}_ms": statistics.median(own) * 1e3,
                    f"{part}_ratio": statistics.median(ratios),
                }
            row |= {"least": ratios[0], "most": ratios[-1]}  # of the last part, the whole step
            print(
                f"  {arm!s:>11}: step {row['step_ms']:8.1f} ms, {row['step_ratio']:.3f} of exact "
                f"({row['least']:.3f} .. {row['most']:.3f}); forward {row['forward_ratio']:.3f}, "
                f"backward {row['backward_ratio']:.3f}"
            )
            yield row


def adaptation_cost(rows):
    """Yield the cost of an observed step for each case: in exact steps, and averaged over the default interval."""
    for case in dict.fromkeys(row["case"] for row in rows):
        ratio = {row["arm"]: row["step_ratio"] for row in rows if row["case"] == case}
        extra = ratio["observed"] - ratio["L3"]
        share = extra / INTERVAL / ratio["L3"]
        print(
            f"{case}: an observation takes {extra:.2f} exact steps; every {INTERVAL} steps {share:.2%}"
        )
        yield {"case": case, "extra_steps": extra, "interval": INTERVAL, "share_of_step": share}


def measure_peaks(cases):
    """Yield a row for each case and arm, with the peak of resident memory and the saved bytes."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # child processes inherit this
    for case, settings in cases.items():
        print(f"{case} {settings}: peak resident memory of a step")
        for arm in TIMED:
            grown, kept = harness.in_process(peak, case, settings, arm)
            print(f"  {arm!s:>11}: peak {grown / 2**20:8.1f} MiB, kept {kept / 2**20:.1f} MiB")
            yield {"case": case, "arm": arm, "peak_bytes": grown, "saved_bytes": kept, **settings}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("times", "peaks"))
    parser.add_argument("--steps", type=int, default=15, help="of each process")
    parser.add_argument("--processes", type=int, default=3)
    arguments = parser.parse_args()
    about = harness.machine("torch") | {
        "fewbit": fewbit.__version__,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(about))
    cases = QUICK if arguments.quick else CASES
    made = {}
    if arguments.only in (None, "times"):
        steps = 3 if arguments.quick else arguments.steps
        made["step_time"] = list(measure_times(cases, steps, arguments.processes))
        made["adaptation_cost"] = list(adaptation_cost(made["step_time"]))
    if arguments.only in (None, "peaks"):
        made["peak_memory"] = list(measure_peaks(cases if arguments.quick else cases | PEAKS))
    for name, rows in made.items():
        if not arguments.quick:
            harness.save(name, about, rows)


if __name__ == "__main__":
    main()
