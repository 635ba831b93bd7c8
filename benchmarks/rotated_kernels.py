"""Compare the times of the CPU kernels of rotated and uniform copies, for each instruction set.

    python benchmarks/rotated_kernels.py              # about 5 minutes
    python benchmarks/rotated_kernels.py --quick

A round quantizes and dequantizes a tensor once with each kind of copy, so that a slow moment of the machine affects
both. The kernels run on one thread, and times are processor times, so other processes hardly matter. The ratio of a
round is the time of the rotated copy divided by the time of the uniform copy. The table has the median of the ratios,
and their quartiles. The smaller tensors stay in the processor's caches, so their ratios compare only the computation.
With the largest tensor, the kernels also wait for memory. Before anything is timed, the kernels are compared with the
reference backend.

Writes results/rotated_kernels.json.
"""

from __future__ import annotations

import argparse
import statistics
import time

import harness
import torch

from fewbit import _kernels
from fewbit.config import ROTATED, UNIFORM
from fewbit.runtime.backends import native, reference

GROUP_SIZE = 256
FEATURES = 1024
CASES = [
    # (elements, bits, dtype, features of a sample)
    (2**24, 2, torch.float32, FEATURES),
    (2**20, 2, torch.float32, FEATURES),
    (2**20, 2, torch.bfloat16, FEATURES),
    (2**20, 2, torch.float32, 300),
    (2**20, 1, torch.float32, FEATURES),
    (2**20, 3, torch.float32, FEATURES),
    (2**20, 4, torch.float32, FEATURES),
    (2**20, 8, torch.float32, FEATURES),
]
QUICK = [(2**16, 2, torch.float32, FEATURES)]


def check(backend, bits, dtype, features):
    """Raise AssertionError unless a backend's rotated copies are those of the reference backend."""
    x = torch.randn(20, features, generator=torch.Generator().manual_seed(0)).to(dtype)
    arguments = x, torch.tensor([7]), bits, GROUP_SIZE, None, None, None, ROTATED
    packed, ranges = backend.quantize(*arguments)
    expected = reference.quantize(*arguments)
    assert torch.equal(packed, expected[0])
    assert torch.equal(ranges.view(torch.int16), expected[1].view(torch.int16))
    values, expected = torch.empty_like(x), torch.empty_like(x)
    for of, out in ((backend, values), (reference, expected)):
        of.dequantize(packed, ranges, bits, GROUP_SIZE, out, None, None, ROTATED)
    assert torch.equal(values, expected)


def times(backend, kind, x, bits, out):
    """Return the seconds of processor time that quantizing and dequantizing x takes."""
    start = time.thread_time()
    seed = torch.tensor([7])
    packed, ranges = backend.quantize(x, seed, bits, GROUP_SIZE, None, None, None, kind)
    middle = time.thread_time()
    backend.dequantize(packed, ranges, bits, GROUP_SIZE, out, None, None, kind)
    return middle - start, time.thread_time() - middle


def measure(isa, n, bits, dtype, features, rounds):
    """Return the rows of one case: for quantizing, dequantizing and both."""
    backend = native.cpu(isa)
    check(backend, bits, dtype, features)
    x = torch.randn(n // features, features).to(dtype)
    out = torch.empty_like(x)
    taken = {UNIFORM: [], ROTATED: []}
    for _ in range(rounds + 1):
        for kind, of_kind in taken.items():
            quantize, dequantize = times(backend, kind, x, bits, out)
            of_kind.append((quantize, dequantize, quantize + dequantize))
    rows = []
    for column, step in enumerate(("quantize", "dequantize", "both")):
        uniform, rotated = ([round_[column] for round_ in taken[kind][1:]] for kind in taken)
        ratios = [r / u for r, u in zip(rotated, uniform, strict=True)]
        lower, median, upper = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "isa": isa,
                "kind": ROTATED,
                "elements": n,
                "features": features,
                "dtype": str(dtype).removeprefix("torch."),
                "bits": bits,
                "step": step,
                "uniform_ms": statistics.median(uniform) * 1e3,
                "milliseconds": statistics.median(rotated) * 1e3,
                "ratio": median,
                "ratio_lower_quartile": lower,
                "ratio_upper_quartile": upper,
                "ratio_of_least": min(rotated) / min(uniform),
            }
        )
    return rows


def show(row):
    print(
        f"{row['isa']:9s} {row['elements']:9d} x {row['features']:4d} {row['dtype']:9s} {row['bits']} bits "
        f"{row['step']:10s} uniform {row['uniform_ms']:8.3f} ms, {row['kind']} {row['milliseconds']:8.3f} ms, ratio {row['ratio']:.2f} "
        f"({row['ratio_lower_quartile']:.2f} .. {row['ratio_upper_quartile']:.2f}), "
        f"of the least times {row['ratio_of_least']:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small tensor; saves nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = []
    for isa in _kernels.cpu_isas():
        for case in QUICK if options.quick else CASES:
            rounds = 5 if options.quick else 15 if case[0] > 2**20 else 60
            rows = measure(isa, *case, rounds)
            for row in rows:
                show(row)
            results += rows
    if not options.quick:
        about = harness.machine("torch") | {"threads": 1}
        harness.save("rotated_kernels", about, results)
