"""Times of all CUDA kernels, compared with the bandwidth of a copy, and the instructions that they execute.

    python benchmarks/cuda_kernels.py               # a CUDA device
    python benchmarks/cuda_kernels.py --device cpu  # small tensors on the CPU, to check that it runs; saves nothing
    python benchmarks/cuda_kernels.py --count       # also counts executed instructions with Nsight Compute (ncu)

Each case first compares the kernel's result for a small tensor with the result of the CPU kernels: bit for bit, unless it is a
sum or depends on one. Then the
kernel is timed on a large tensor that does not fit the device's cache. The bandwidth of a case counts each byte that the kernel
must read or write once. Times are medians between CUDA events.

With --count, ncu runs each kernel again, and measures the instructions and the bytes of device memory for each element. It
changes no setting of the GPU.

Writes results/cuda_kernels.json.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import operator
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import harness
import torch

import fewbit
from fewbit.config import MASKED, ROTATED, UNIFORM
from fewbit.runtime import backends
from fewbit.runtime.backends import reference
from fewbit.runtime.format.channels import Normalization, estimated_rows
from fewbit.runtime.format.encoding import Encoding, packed_words

FEATURES = 1024  # of a sample; also the channels of fixed-point codes if channels come last
CHANNELS = 64  # of fixed-point codes of images
GROUP_SIZE = 256
DTYPES = torch.float32, torch.bfloat16
SMALL, LARGE, COUNTED = 2**16, 2**27, 2**24  # elements of the tensors
METRICS = {
    "instructions": "smsp__thread_inst_executed.sum",
    "warp_instructions": "smsp__inst_executed.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_written_bytes": "dram__bytes_write.sum",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
}


class Run(NamedTuple):
    """A kernel with its tensors. `call` runs it, and returns what it wrote. `bytes` is what it must read and write."""

    call: Callable[[], tuple[torch.Tensor, ...]]
    bytes: int


def size(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# -- Cases: each function returns the Run of a backend for a tensor x of shape (samples, FEATURES) -------


def pack(bits):
    def case(backend, x):
        codes = x.to(torch.float32).mul(100).to(torch.int32).bitwise_and((1 << bits) - 1)
        codes = codes.to(torch.uint8).flatten()
        packed = backend.pack(codes, bits)
        return Run(lambda: (backend.pack(codes, bits),), size(codes, packed))

    return case


def unpack(bits):
    def case(backend, x):
        n = x.numel()
        packed = torch.arange(packed_words(n, bits), dtype=torch.int32, device=x.device)
        return Run(lambda: (backend.unpack(packed, bits, n),), size(packed) + n)

    return case


def encoding_of(function, bits, objective="mse"):
    return Encoding.of(fewbit.load_table(function, bits=bits, objective=objective))


def encode(function, bits, objective="mse"):
    def case(backend, x):
        encoding = encoding_of(function, bits, objective)
        seed = torch.tensor([7], device=x.device) if encoding.unbiased else None
        packed = backend.encode(x, encoding, seed)
        return Run(lambda: (backend.encode(x, encoding, seed),), size(x, packed))

    return case


def forward(function, bits):
    def case(backend, x):
        encoding, out = encoding_of(function, bits), torch.empty_like(x)
        packed = backend.forward(x, function, (), encoding, None, out)
        # Only the codes are compared: the result may differ from the CPU's by rounding.
        return Run(
            lambda: (backend.forward(x, function, (), encoding, None, out),), size(x, out, packed)
        )

    return case


def decode_mul(function, bits):
    def case(backend, x):
        encoding, out = encoding_of(function, bits), torch.empty_like(x)
        packed = backend.encode(x, encoding, None)

        def call():
            backend.decode_mul(x, packed, encoding, out)
            return (out,)

        return Run(call, size(x, out, packed))

    return case


def channels_of(axis, x):
    """Return the numbers of the channels of x, (features, 2) bfloat16, if the axis is "channels"; else None."""
    return reference.channel_statistics(x, x.shape[1]) if axis == "channels" else None


def vectors_of(axis, x):
    """Return two vectors and the number of neighbors with one entry: an entry for each row or feature; else None."""
    if axis not in ("rows", "features"):
        return None
    entries, inner = {"rows": (len(x), x.shape[1]), "features": (x.shape[1], 1)}[axis]
    return *(torch.linspace(low, 2, entries, device=x.device) for low in (-1, 0.5)), inner


def quantize(kind, bits, axis=None):
    """Return a case. Without bits, the samples have 1, 2, 3, 1, 2, 3 ... bits."""

    def case(backend, x):
        seed = torch.tensor([7], device=x.device)
        x = x.clamp(min=0) if kind == MASKED else x
        widths = words = None
        if bits is None:
            widths = torch.arange(len(x), device=x.device).remainder(3).add(1).to(torch.uint8)
            words = packed_words(x.numel(), 2) + 64
        normalize = vectors_of(axis, x)
        if axis == "channels":
            normalize = Normalization(channels=channels_of(axis, x))
        arguments = x, seed, bits, GROUP_SIZE, widths, words, normalize, kind
        return Run(lambda: backend.quantize(*arguments), size(x, *backend.quantize(*arguments)))

    return case


def relu_quantized(bits):
    """Return a case: a ReLU, its mask, and the masked copy of its result."""

    def case(backend, x):
        encoding, out = encoding_of("relu", 1), torch.empty_like(x)
        settings = bits, GROUP_SIZE, MASKED

        def call():
            made = backend.forward_quantized(x, "relu", (), encoding, None, out, 7, *settings)
            return out, *made

        return Run(call, size(x, *call()))

    return case


def channel_statistics(backend, x):
    """Return a case that reads at most 256 rows of the tensor."""
    out = backend.channel_statistics(x, x.shape[1])
    rows = x[: len(estimated_rows(len(x)))]
    return Run(lambda: (backend.channel_statistics(x, x.shape[1]),), size(rows, out))


def squares(kind):
    def case(backend, x):
        out = backend.squares(x, GROUP_SIZE, None, kind)
        return Run(lambda: (backend.squares(x, GROUP_SIZE, None, kind),), size(x, out))

    return case


def dequantize(kind, bits, axis=None):
    def case(backend, x):
        seed = torch.tensor([7], device=x.device)
        mask = None
        if kind == MASKED:
            x = x.clamp(min=0)
            mask = backend.encode(x, encoding_of("relu", 1), None)
        packed, ranges = backend.quantize(x, seed, bits, GROUP_SIZE, kind=kind)
        out = torch.empty_like(x)
        settings = vectors_of(axis, x), kind, mask, channels_of(axis, x)

        def call():
            backend.dequantize(packed, ranges, bits, GROUP_SIZE, out, None, *settings)
            return (out,)

        return Run(call, size(packed, ranges, out, *([] if mask is None else [mask])))

    return case


def batch_norm_backward(bits):
    """Return a case: the gradients of a batch norm from the rotated copy of its normalized input, by three kernels."""

    def case(backend, x):
        packed, ranges = backend.quantize(x, 7, bits, GROUP_SIZE, kind=ROTATED)
        weight, rstd, _ = vectors_of("features", x)
        arguments = packed, ranges, bits, GROUP_SIZE, x, rstd, weight

        # Backends of the CPU have no such kernels.
        has_kernels = backend.can_compute_batch_norm(bits, GROUP_SIZE, x.shape)
        kernels = backend if has_kernels else reference

        def call():
            return kernels.batch_norm_backward(*arguments)

        return Run(call, 2 * size(packed, ranges, x) + size(x))

    return case


def fixed_point(what, bits, inner=1):
    def case(backend, x):
        channels = FEATURES if inner == 1 else CHANNELS
        weight = torch.linspace(-1, 2, channels, device=x.device)
        bias = torch.linspace(-0.5, 0.5, channels, device=x.device)
        grid = backend.grid_fixed(weight, bias, bits)
        y, out = x.abs().sub_(0.5), torch.empty_like(x)
        packed = backend.encode_fixed(x, y, grid, bits, inner)

        def encode():
            return (backend.encode_fixed(x, y, grid, bits, inner),)

        def decode():
            backend.decode_fixed(packed, grid, bits, inner, out, 0.0)
            return (out,)

        def mask():
            backend.mask_fixed(x, packed, grid, bits, inner, 0.0, out)
            return (out,)

        return {
            "encode": Run(encode, size(x, y, packed)),
            "decode": Run(decode, size(packed, out)),
            "mask": Run(mask, size(x, packed, out)),
        }[what]

    return case


CASES = {
    "pack, 3 bits": pack(3),
    "unpack, 3 bits": unpack(3),
    "encode GELU, 3 bits": encode("gelu", 3),
    "encode GELU, 3 bits, unbiased": encode("gelu", 3, "unbiased"),
    "forward GELU, 3 bits": forward("gelu", 3),
    "forward SiLU, 3 bits": forward("silu", 3),
    "decode_mul GELU, 3 bits": decode_mul("gelu", 3),
    "quantize, 2 bits": quantize(UNIFORM, 2),
    "quantize, 4 bits": quantize(UNIFORM, 4),
    "quantize, 8 bits": quantize(UNIFORM, 8),
    "quantize normalized rows, 2 bits": quantize(UNIFORM, 2, "rows"),
    "quantize, 1 to 3 bits": quantize(UNIFORM, None),
    "squares": squares(UNIFORM),
    "dequantize, 2 bits": dequantize(UNIFORM, 2),
    "dequantize, 4 bits": dequantize(UNIFORM, 4),
    "dequantize, 8 bits": dequantize(UNIFORM, 8),
    "dequantize scaled features, 2 bits": dequantize(UNIFORM, 2, "features"),
    "rotated quantize, 2 bits": quantize(ROTATED, 2),
    "rotated quantize, 4 bits": quantize(ROTATED, 4),
    "rotated quantize normalized rows, 2 bits": quantize(ROTATED, 2, "rows"),
    "rotated quantize normalized features, 2 bits": quantize(ROTATED, 2, "features"),
    "channel statistics": channel_statistics,
    "rotated quantize without channels, 2 bits": quantize(ROTATED, 2, "channels"),
    "masked quantize, 2 bits": quantize(MASKED, 2),
    "ReLU and masked quantize, 2 bits": relu_quantized(2),
    "masked dequantize, 2 bits": dequantize(MASKED, 2),
    "rotated squares": squares(ROTATED),
    "rotated dequantize, 2 bits": dequantize(ROTATED, 2),
    "rotated dequantize, 4 bits": dequantize(ROTATED, 4),
    "rotated dequantize scaled rows, 2 bits": dequantize(ROTATED, 2, "rows"),
    "rotated dequantize scaled features, 2 bits": dequantize(ROTATED, 2, "features"),
    "rotated dequantize with channels, 2 bits": dequantize(ROTATED, 2, "channels"),
    "batch norm backward, 2 bits": batch_norm_backward(2),
    "encode fixed point, 4 bits": fixed_point("encode", 4),
    "decode fixed point, 4 bits": fixed_point("decode", 4),
    "mask fixed point, 4 bits": fixed_point("mask", 4),
    "encode fixed point, images, 4 bits": fixed_point("encode", 4, inner=256),
    "decode fixed point, images, 4 bits": fixed_point("decode", 4, inner=256),
}
WITHOUT_DTYPE = {"pack, 3 bits", "unpack, 3 bits"}  # their tensors are uint8
KERNELS = {"batch norm backward, 2 bits": 3}  # of cases that have more than one
# Sums in another order than on the CPU.
APPROXIMATE = {"squares", "rotated squares", "batch norm backward, 2 bits"}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def all_cases():
    for name in CASES:
        for dtype in DTYPES[: 1 if name in WITHOUT_DTYPE else None]:
            yield name, dtype


def input_of(n, dtype, device):
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(n // FEATURES, FEATURES, generator=generator, device=device).to(dtype)


def check(name, dtype, device):
    """Raise AssertionError if the device's kernel does not return what the CPU's kernel returns."""
    x = input_of(SMALL, dtype, "cpu")
    ours, theirs = (
        CASES[name](backends.on[each.device], each).call() for each in (x.to(device, copy=True), x)
    )
    for a, b in zip(ours, theirs, strict=True):
        a = a.cpu()
        if name in APPROXIMATE:
            distance = ((a.float() - b.float()).norm() / b.float().norm()).item()
            most = TOLERANCE[a.dtype]
            found = f"a distance of {distance:.1e} of the norm, expected at most {most:.0e}"
            same = distance <= most
        else:
            different = (a.view(torch.uint8) != b.view(torch.uint8)).sum().item()
            found, same = f"{different} other bytes", different == 0
        assert same, f"{name}, {dtype}: expected what the CPU computes, got {found}"


# -- Times -----------------------------------------------------------------------------------------------


def repeats_on(device):
    return 3 if device == "cpu" else 30


def measure(name, dtype, n, device, copy):
    check(name, dtype, device)
    x = input_of(n, dtype, device)
    run = CASES[name](backends.on[x.device], x)
    times = harness.device_seconds(run.call, device, repeats_on(device))
    middle = statistics.median(times)
    return {
        "kernel": name,
        "dtype": str(dtype).removeprefix("torch.") if name not in WITHOUT_DTYPE else "uint8",
        "n": n,
        "us": 1e6 * middle,
        "us_least": 1e6 * times[0],
        "us_most": 1e6 * times[-1],
        "bytes_an_element": run.bytes / n,
        "gigabytes_per_second": run.bytes / middle / 1e9,
        "of_copy": run.bytes / middle / copy,
    }


# -- Instructions ----------------------------------------------------------------------------------------


def run_for_ncu():
    """Run each case once between marks of the profiler. ncu calls this, in a process of its own."""
    for name, dtype in all_cases():
        x = input_of(COUNTED, dtype, "cuda")
        run = CASES[name](backends.on[x.device], x)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        run.call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def counted():
    """Return a dict for each case, {name of a metric: its value for an element, or a percentage}.

    The percentages of a case with several kernels are means, weighted by the kernels' instructions.

    Raises:
        ValueError: If ncu did not see as many kernels as all cases have.
    """
    command = [
        *("ncu", "--csv", "--clock-control", "none", "--profile-from-start", "off"),
        *(
            "--print-units",
            "base",
            "--kernel-name-base",
            "demangled",
            "--kernel-name",
            "regex:fewbit",
        ),
        *("--metrics", ",".join(METRICS.values()), sys.executable, __file__, "--ncu"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    kernels: dict = {}
    if '"ID"' in done.stdout:
        for row in csv.DictReader(io.StringIO(done.stdout[done.stdout.index('"ID"') :])):
            value = float(row["Metric Value"].replace(",", ""))
            kernels.setdefault(row["ID"], {})[row["Metric Name"]] = value
    expected = [KERNELS.get(name, 1) for name, _ in all_cases()]
    if len(kernels) != sum(expected):
        output = f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        raise ValueError(f"expected {sum(expected)} kernels, ncu measured {len(kernels)}\n{output}")
    measured = iter(kernels.values())
    return [combined(list(itertools.islice(measured, count))) for count in expected]


def combined(kernels: list[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of a case from those of its kernels, see `counted`."""
    weights = [values[METRICS["warp_instructions"]] for values in kernels]
    found = {}
    for name, metric in METRICS.items():
        values = [each[metric] for each in kernels]
        if metric.endswith(".sum"):
            found[name] = sum(values) / COUNTED
        else:
            found[name] = sum(map(operator.mul, values, weights)) / sum(weights)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--count", action="store_true", help="count instructions with ncu")
    parser.add_argument("--ncu", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ncu:
        run_for_ncu()
        return
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("expected a CUDA device, found none; --device cpu runs the same code on the CPU")
    if arguments.count and not shutil.which("ncu"):
        sys.exit("--count needs Nsight Compute (ncu), which comes with the CUDA toolkit")
    n = LARGE if device == "cuda" else 2**18
    copy = harness.copy_bandwidth(n, device, repeats_on(device))
    about = harness.machine("torch") | {"fewbit": fewbit.__version__, "copy_bytes_per_s": copy}
    if device == "cuda":
        about |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    print(f"{about.get('device', 'cpu')}: copy {copy / 1e9:.0f} GB/s", flush=True)
    rows, failed = [], 0
    for name, dtype in all_cases():
        try:
            row = measure(name, dtype, n, device, copy)
        except Exception as error:
            failed += 1
            row = {"kernel": name, "dtype": str(dtype), "error": str(error).splitlines()[0][:300]}
            print(f"{name:44} {dtype} {type(error).__name__}: {row['error']}", flush=True)
        else:
            print(
                f"{name:44} {row['dtype']:9} {row['us']:8.1f} us ({row['us_least']:.1f} .. {row['us_most']:.1f})  "
                f"{row['gigabytes_per_second']:5.0f} GB/s, {row['of_copy']:.2f} of copy",
                flush=True,
            )
        rows.append(row)
        if device == "cuda":
            harness.save("cuda_kernels", about, rows)
    if arguments.count:
        for row, (name, dtype), more in zip(rows, all_cases(), counted(), strict=True):
            row |= {"counted": more}
            print(
                f"{name:44} {str(dtype):14} {more['instructions']:6.1f} instructions, {more['dram_read_bytes']:.2f} + "
                f"{more['dram_written_bytes']:.2f} bytes an element, issue {more['issue_percent']:.0f} %, "
                f"warps {more['warps_percent']:.0f} %",
                flush=True,
            )
        harness.save("cuda_kernels", about, rows)
    if failed:
        sys.exit(f"{failed} cases failed")


if __name__ == "__main__":
    main()
