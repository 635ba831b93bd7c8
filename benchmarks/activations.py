"""Few-bit activations beside torch's own: forward and backward, in one process, results checked first.

On a CPU at 2**24 elements, with memory that the allocator reuses and with memory fresh from the system
(each in a process of its own, since the C library decides that once), and for small tensors, where
dispatch cost rules. On a CUDA device also the kernels alone, against the bandwidth of a copy.

    python benchmarks/activations.py [cpu] [cuda]      # default: cpu, and cuda where there is one

Times of torch and fewbit alternate call by call; the ratio is that of their medians.
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
# glibc: from which size an allocation is mapped anew for every use, and how much freed memory is kept.
MEMORY = {
    "reused": "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=34359738368:glibc.malloc.top_pad=1073741824",
    "fresh": "glibc.malloc.mmap_threshold=131072",
}


def check(name, dtype, device):
    """The gradient is table(x) * grad to the last bit; the forward is torch's, but for rounding."""
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
    assert bool(((y.double() - exact).abs() <= allowed + 1e-30).all()), f"{name} {dtype}: forward"


def steps(name, n, dtype, device):
    """Forward + backward of torch's module and of fewbit's, as calls without arguments."""
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
    """Sorted wall times of each call, their runs interleaved."""
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
    """The rows of one process on the CPU."""
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
    """The rows of `measure_cpu` in processes whose C library allocates as `memory` says.

    Where the system puts a process's memory moves all of its times. Of several processes the one with the
    median ratio is kept, row by row, with the least and the most of them.
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
    """Sorted times of a call on the device, between events."""
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
    """Bytes read and written in a second by torch's own copy of n float32."""
    source = torch.randn(n, device="cuda")
    target = torch.empty_like(source)
    return 2 * 4 * n / statistics.median(device_seconds(lambda: target.copy_(source)))


def measure_kernels(name, dtype, n, copy):
    """The kernels alone: bytes that must move, over time, against a copy of the same run."""
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
