"""Few-bit activations compared with torch's own: the time of forward and backward, after a check of the results.

    python benchmarks/activations.py [cpu] [cuda]      # default: cpu, and cuda if there is a CUDA device

On a CPU, tensors have 2**24 elements, in memory that the allocator reuses or that is fresh from the system. Each of
the two cases has processes of its own, because the C library chooses its behavior once per process. Small tensors are
measured too, whose times are mostly the cost of dispatch. On a CUDA device, the kernels alone are also compared with
the bandwidth of a copy.

Calls of torch and fewbit alternate on a CPU. A ratio is that of the median times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import harness
import torch

import fewbit
from fewbit.runtime import backends
from fewbit.runtime.format.encoding import Encoding

LARGE = 2**24
SMALL = tuple(2**power for power in range(10, 21, 2))
BITS = 3
PROCESSES = 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PAIRS = {
    "gelu": (torch.nn.GELU, fewbit.GELU),
    "silu": (torch.nn.SiLU, fewbit.SiLU),
}
# Settings of glibc: the size from which each allocation is mapped anew, and the amount of freed memory that is kept.
MEMORY = {
    "reused": "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=34359738368:glibc.malloc.top_pad=1073741824",
    "fresh": "glibc.malloc.mmap_threshold=131072",
}


def check(name, dtype, device):
    """Assert that the gradient is exactly table(x) * grad, and that the result is torch's up to rounding."""
    theirs, ours = PAIRS[name]
    x = 4.0 * torch.randn(100_003, device=device, dtype=torch.float64)
    x = x.to(dtype).requires_grad_()
    grad = torch.randn(x.shape, device=device).to(dtype)
    y = ours(bits=BITS)(x)
    y.backward(grad)
    table = fewbit.load_table(name, bits=BITS)
    q = torch.from_numpy(table(x.detach().double().cpu().numpy())).to(device, torch.float32)
    assert torch.equal(x.grad, (q * grad.float()).to(dtype)), f"{name} {dtype}: gradient"
    exact = theirs()(x.detach().double())
    allowed = (
        2 * torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).eps * x.detach().abs() / 4
    )
    if device == "cuda" and dtype == torch.float32:
        allowed *= 4  # docs/runtime.md
    assert bool(((y.double() - exact).abs() <= allowed + 1e-30).all()), f"{name} {dtype}: forward"


def steps(name, n, dtype, device):
    """Return two functions without arguments: forward and backward of torch's module, and those of fewbit's."""
    x = torch.randn(n, device=device).to(dtype).requires_grad_()
    grad = torch.randn(n, device=device).to(dtype)

    def step(module):
        def call():
            x.grad = None
            module(x).backward(grad)

        return call

    theirs, ours = PAIRS[name]
    return step(theirs()), step(ours(bits=BITS))


def alternating(calls, repeats, synchronize=lambda: None):
    """Return the sorted wall times of each call in seconds. The calls alternate."""
    times = [[] for _ in calls]
    for _ in range(3):
        for call in calls:
            call()
    for _ in range(repeats):
        for each, call in zip(times, calls, strict=True):
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            each.append(time.perf_counter() - start)
    return [sorted(each) for each in times]


def row(kind, name, dtype, n, times, **more):
    theirs, ours = (statistics.median(each) for each in times)
    (low, high), (low2, high2) = (
        (each[len(each) // 10], each[-1 - len(each) // 10]) for each in times
    )
    result = {
        "measure": kind,
        "function": name,
        "dtype": dtype,
        "n": n,
        **more,
        "torch_us": 1e6 * theirs,
        "torch_p10_us": 1e6 * low,
        "torch_p90_us": 1e6 * high,
        "fewbit_us": 1e6 * ours,
        "fewbit_p10_us": 1e6 * low2,
        "fewbit_p90_us": 1e6 * high2,
        "ratio": ours / theirs,
    }
    where = " ".join(str(value) for value in more.values())
    print(
        f"{name:5} {dtype:8} n=2^{n.bit_length() - 1:<2} {where:7} torch {1e6 * theirs:9.1f} us "
        f"({1e6 * low:.1f} .. {1e6 * high:.1f})  fewbit {1e6 * ours:9.1f} us "
        f"({1e6 * low2:.1f} .. {1e6 * high2:.1f})  ratio {ours / theirs:.2f}",
        file=sys.stderr,
        flush=True,
    )
    return result


def measure_cpu(memory):
    """Measure large tensors on the CPU in this process. Return the rows. `memory` is a key of MEMORY."""
    rows = []
    for name in PAIRS:
        for dtype in DTYPES:
            check(name, DTYPES[dtype], "cpu")
            calls = steps(name, LARGE, DTYPES[dtype], "cpu")
            times = alternating(calls, 40)
            rows.append(row("forward + backward", name, dtype, LARGE, times, memory=memory))
    return rows


def measure_small(device, synchronize=lambda: None):
    rows = []
    for name in PAIRS:
        for dtype in DTYPES:
            for n in SMALL:
                calls = steps(name, n, DTYPES[dtype], device)
                repeats = max(200, min(2000, 2**26 // n))
                times = alternating(calls, repeats, synchronize)
                rows.append(row("forward + backward", name, dtype, n, times, memory="small"))
    return rows


def in_processes(memory):
    """Run `measure_cpu` in several processes with the settings `memory` of the C library.

    The place of a process's memory affects all of its times. Each row is therefore that of the process with the median
    ratio, together with the least and the greatest ratio of all processes.
    """
    runs = [in_process(memory) for _ in range(PROCESSES)]
    rows = []
    for alike in zip(*runs, strict=True):
        ordered = sorted(alike, key=lambda each: each["ratio"])
        least, most = ordered[0]["ratio"], ordered[-1]["ratio"]
        rows.append({**ordered[len(ordered) // 2], "ratio_least": least, "ratio_most": most})
    return rows


def in_process(memory):
    environment = {**os.environ, "GLIBC_TUNABLES": MEMORY[memory]}
    command = [sys.executable, __file__, "--memory", memory]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


# -- CUDA ------------------------------------------------------------------------------------------------------


def device_seconds(call, repeats=50):
    """Return the sorted times of a call on the device in seconds, measured between CUDA events."""
    events = []
    for _ in range(5):
        call()
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return sorted(1e-3 * start.elapsed_time(end) for start, end in events)


def measure_cuda():
    n = 2**28
    copy = copy_bandwidth(n)
    print(f"copy: {copy / 1e9:.0f} GB/s", file=sys.stderr)
    rows = [{"measure": "copy", "dtype": "float32", "n": n, "gigabytes_per_second": copy / 1e9}]
    for name in PAIRS:
        for dtype in DTYPES:
            check(name, DTYPES[dtype], "cuda")
            rows += measure_kernels(name, dtype, n, copy)
            calls = steps(name, n, DTYPES[dtype], "cuda")
            times = [device_seconds(call, 20) for call in calls]
            rows.append(row("forward + backward", name, dtype, n, times, memory="reused"))
            torch.cuda.empty_cache()
    return rows + measure_small("cuda", torch.cuda.synchronize)


def copy_bandwidth(n):
    """Return the bytes per second that torch's copy of n float32 elements reads and writes."""
    source = torch.randn(n, device="cuda")
    target = torch.empty_like(source)
    return 2 * 4 * n / statistics.median(device_seconds(lambda: target.copy_(source)))


def measure_kernels(name, dtype, n, copy):
    """Measure the kernels alone: the bytes per second that they must move, compared with a copy in the same run.

    Args:
        name: A key of PAIRS.
        dtype: A key of DTYPES.
        n: The number of elements.
        copy: The bytes per second of the copy.
    """
    backend = backends.of(torch.empty(0, device="cuda"))
    encoding = Encoding.of(fewbit.load_table(name, bits=BITS))
    x = torch.randn(n, device="cuda").to(DTYPES[dtype])
    out = torch.empty_like(x)
    packed = backend.forward(x, name, (), encoding, None, out)
    kernels = {
        "forward": lambda: backend.forward(x, name, (), encoding, None, out),
        "decode_mul": lambda: backend.decode_mul(x, packed, encoding, out),
    }
    rows = []
    for kind, call in kernels.items():
        counted = (2 * x.element_size() + encoding.bits / 8) * n
        reached = counted / statistics.median(device_seconds(call))
        print(
            f"{name:5} {dtype:8} {kind:10} {reached / 1e9:6.0f} GB/s, {reached / copy:.3f} of copy",
            file=sys.stderr,
        )
        figures = {"gigabytes_per_second": reached / 1e9, "of_copy": reached / copy}
        rows.append({"measure": kind, "function": name, "dtype": dtype, "n": n, **figures})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("devices", nargs="*", choices=["cpu", "cuda", []], default=[])
    parser.add_argument("--memory", choices=MEMORY, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        json.dump(measure_cpu(arguments.memory), sys.stdout)
        return
    cuda = torch.cuda.is_available()
    devices = arguments.devices or (["cpu", "cuda"] if cuda else ["cpu"])
    for device in devices:
        about = harness.machine("fewbit", "torch", "numpy")
        about |= {"threads": torch.get_num_threads(), "bits": BITS}
        about["backend"] = backends.of(torch.empty(0, device=device)).name
        if device == "cuda":
            about |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
            rows = measure_cuda()
        else:
            rows = [row for memory in MEMORY for row in in_processes(memory)]
            rows += measure_small("cpu")
        print(json.dumps(about), file=sys.stderr)
        harness.save(f"activations_{device}", about, rows)


if __name__ == "__main__":
    main()
