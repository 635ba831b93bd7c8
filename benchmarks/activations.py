"""Few-bit activations compared with torch's own: the time of forward and backward, after a check of the results.

    python benchmarks/activations.py [cpu] [cuda]      # default: cpu, and cuda if there is a CUDA device
    python benchmarks/activations.py cpu --quick       # the measurements of a CUDA device with small tensors on the CPU,
                                                       # to check that they run; results are saved only if $OUT is set

On a CPU, tensors have 2**24 elements, in memory that the allocator reuses or that is fresh from the system. Each of
the two cases has processes of its own, because the C library chooses its behavior once per process. Small tensors are
measured too, whose times are mostly the cost of dispatch. On a CUDA device, the kernels alone are also compared with
the bandwidth of a copy.

On a CUDA device, results are saved after each function, and if one fails, the others are still measured. The program
then ends with an error.

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
        allowed *= 4  # docs/concepts/runtime.md
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


def measure_small(name, dtype, device, sizes=SMALL, copy=None):
    """Measure tensors of these sizes. `copy` is not used."""
    rows = []
    for n in sizes:
        calls = steps(name, n, DTYPES[dtype], device)
        repeats = max(200, min(2000, 2**26 // n))
        synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
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


def measure_device(device, n, small, add):
    """Measure the kernels of a device and small tensors.

    Args:
        device: "cuda", or "cpu" to check that the measurements run.
        n: The number of elements of large tensors.
        small: The numbers of elements of small tensors.
        add: A function that is called with the rows of each part, as soon as they exist.

    Returns:
        The number of parts that failed.
    """
    copy = harness.copy_bandwidth(n, device, 50)
    print(f"copy: {copy / 1e9:.0f} GB/s", file=sys.stderr)
    add([{"measure": "copy", "dtype": "float32", "n": n, "gigabytes_per_second": copy / 1e9}])
    failures = 0
    for name in PAIRS:
        for dtype in DTYPES:
            for part in (measure_large, measure_kernels, measure_small):
                try:
                    add(part(name, dtype, device, small if part is measure_small else n, copy))
                except Exception as error:
                    failures += 1
                    message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                    print(f"{name} {dtype} {part.__name__}: {message}", file=sys.stderr)
                    add(
                        [
                            {
                                "measure": part.__name__,
                                "function": name,
                                "dtype": dtype,
                                "error": message,
                            }
                        ]
                    )
                if device == "cuda":
                    torch.cuda.empty_cache()
    return failures


def measure_large(name, dtype, device, n, copy):
    """Check results, and measure forward and backward of torch and fewbit. `measure_kernels` explains the arguments."""
    check(name, DTYPES[dtype], device)
    times = [
        harness.device_seconds(call, device, 20) for call in steps(name, n, DTYPES[dtype], device)
    ]
    return [row("forward + backward", name, dtype, n, times, memory="reused")]


def measure_kernels(name, dtype, device, n, copy):
    """Measure the kernels alone: the bytes per second that they must move, compared with a copy in the same run.

    Args:
        name: A key of PAIRS.
        dtype: A key of DTYPES.
        device: "cuda" or "cpu".
        n: The number of elements.
        copy: The bytes per second of the copy.
    """
    backend = backends.on[torch.empty(0, device=device).device]
    encoding = Encoding.of(fewbit.load_table(name, bits=BITS))
    x = torch.randn(n, device=device).to(DTYPES[dtype])
    out = torch.empty_like(x)
    packed = backend.forward(x, name, (), encoding, None, out)
    kernels = {
        "forward": lambda: backend.forward(x, name, (), encoding, None, out),
        "decode_mul": lambda: backend.decode_mul(x, packed, encoding, out),
    }
    rows = []
    for kind, call in kernels.items():
        counted = (2 * x.element_size() + encoding.bits / 8) * n
        reached = counted / statistics.median(harness.device_seconds(call, device, 50))
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
    parser.add_argument("--quick", action="store_true", help="a CUDA device's code, small tensors")
    parser.add_argument("--memory", choices=MEMORY, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        json.dump(measure_cpu(arguments.memory), sys.stdout)
        return
    cuda = torch.cuda.is_available()
    devices = arguments.devices or (["cpu", "cuda"] if cuda else ["cpu"])
    for device in devices:
        # fewbit may be used without being installed.
        about = harness.machine("torch", "numpy") | {"fewbit": fewbit.__version__}
        about |= {"threads": torch.get_num_threads(), "bits": BITS}
        about["backend"] = backends.on[torch.empty(0, device=device).device].name
        rows = []
        if device == "cuda":
            about |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        if device == "cuda" or arguments.quick:
            name = "activations_quick" if arguments.quick else "activations_cuda"

            def add(more, name=name, about=about, rows=rows, keep=device == "cuda"):
                rows += more
                if keep or os.environ.get("OUT"):
                    harness.save(name, about, rows)

            sizes = (2**18, SMALL[:1]) if arguments.quick else (2**28, SMALL)
            failures = measure_device(device, *sizes, add)
            print(json.dumps(about), file=sys.stderr)
            if failures:
                sys.exit(f"{failures} parts failed")
            continue
        rows = [row for memory in MEMORY for row in in_processes(memory)]
        rows += [
            row for name in PAIRS for dtype in DTYPES for row in measure_small(name, dtype, "cpu")
        ]
        print(json.dumps(about), file=sys.stderr)
        harness.save(f"activations_{device}", about, rows)


if __name__ == "__main__":
    main()
