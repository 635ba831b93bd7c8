"""The time that Python takes in steps on small tensors, where kernels take little: eager, under a policy, and compiled.

    python benchmarks/study.py host_time              # about 5 minutes on 2 cores
    python benchmarks/study.py host_time --quick      # stores nothing

A step is a forward and a backward of four equal layers or blocks, in one thread, whose processor time is measured, so that other
programs do not count. The arms take turns step by step; a row has the median of the ratios to exact training, eager arms to eager,
`fewbit.compile` and `compress_` with torch.compile to torch.compile, the quartiles of the ratios, and in eager mode the calls of
Python functions and from Python. First, gradients at 8 bits are compared with exact gradients. The rows "op" are calls of single
ops of compiled code, in C++ and in Python (decision 24).

Writes results/host_time.json.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import sys
import time
import timeit

import harness
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import fewbit
from fewbit.runtime import backends
from fewbit.runtime.ops import dense_ops


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.out_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.project(y.reshape(batch, tokens, width))
        return x + self.mlp(self.out_norm(x))


def conv(channels):
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()
    )


# {name: (layer, shape of the input)}
NETWORKS = {
    "Linear, 16 rows, width 64": (lambda: nn.Linear(64, 64), (16, 64)),
    "transformer block, 64 tokens, width 64": (lambda: Block(64), (4, 16, 64)),
    "transformer block, 256 tokens, width 256": (lambda: Block(256), (4, 64, 256)),
    "conv-BN-ReLU, 4 images, 16 channels": (lambda: conv(16), (4, 16, 8, 8)),
}
EAGER = {"2 bits": 2, "4 bits": 4, "AdaptiveBits(2)": fewbit.AdaptiveBits(2, interval=10**6)}


class Least(torch.autograd.Function):
    """The least that a linear layer with a copy can do in Python: no seeds, no shared copies, no choice of bits."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        kernels = backends.on[x.device]
        ctx.save_for_backward(weight, *kernels.quantize(x, 1, 2, 256, None, None, None, "rotated"))
        ctx.shape = x.shape
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        weight, packed, ranges = ctx.saved_tensors
        x = torch.empty(ctx.shape, dtype=grad.dtype)
        backends.on[x.device].dequantize(
            packed, ranges, 2, 256, x, None, None, "rotated", None, None
        )
        return grad @ weight, grad.t() @ x, grad.sum(0)


class LeastLinear(nn.Linear):
    """A linear layer that calls `Least`."""

    def forward(self, x):
        return Least.apply(x, self.weight, self.bias)


def with_least(module):
    """Return a copy of a module of linear layers that are `LeastLinear`."""
    module = copy.deepcopy(module)
    for layer in module:
        layer.__class__ = LeastLinear
    return module


def step(module, x):
    module(x).sum().backward()


def check(module, step, limit):
    """Compare the gradients of a copy with 8 bits with exact gradients. step(module) runs a step."""
    grads = []
    for bits in (None, 8):
        own = copy.deepcopy(module)
        if bits:
            fewbit.compress_(own, bits, verbose=False)
        step(own)
        grads.append(torch.cat([p.grad.flatten() for p in own.parameters()]))
    error = (grads[1] - grads[0]).norm() / grads[0].norm()
    assert error < limit, f"gradients with 8 bits have a relative error of {error:.3f}"


def in_turns(runs, step, count):
    """Return {name: seconds of the processor in each step} of the runs, which take turns. The first quarter of the steps is left out."""
    times = {name: [] for name in runs}
    for _ in range(count):
        for name, run in runs.items():
            start = time.thread_time()
            step(run)
            times[name].append(time.thread_time() - start)
    return {name: each[count // 4 :] for name, each in times.items()}


def rows_of(network, kind, times, base):
    for name, each in times.items():
        ratios = [a / b for a, b in zip(each, times[base], strict=True)]
        low, middle, high = statistics.quantiles(ratios)
        milliseconds = 1000 * statistics.median(each)
        row = {"network": network, "mode": kind, "arm": name, "milliseconds": milliseconds}
        yield row | {"ratio": middle, "quartiles": [low, high]}


def calls(run) -> int:
    """Return the number of calls, of Python functions and from Python, that run() makes."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def measure(network, count):
    layer, shape = NETWORKS[network]
    torch.manual_seed(0)
    module = nn.Sequential(*[layer() for _ in range(4)])
    x = torch.randn(shape, requires_grad=True)
    step_of = functools.partial(step, x=x)
    check(module, step_of, 0.02)
    eager = {"exact": copy.deepcopy(module)}
    for name, bits in EAGER.items():
        eager[name] = copy.deepcopy(module)
        fewbit.compress_(eager[name], bits, verbose=False)
    if all(isinstance(each, nn.Linear) for each in module):
        eager["the least in Python"] = with_least(module)
    for row in rows_of(network, "eager", in_turns(eager, step_of, count), "exact"):
        yield row | {"calls": calls(functools.partial(step_of, eager[row["arm"]]))}
    compiled = {
        "exact": torch.compile(copy.deepcopy(module)),
        "2 bits": fewbit.compile(copy.deepcopy(module), bits=2),
        "compress_, 2 bits": torch.compile(eager["2 bits"]),
    }
    yield from rows_of(network, "compiled", in_turns(compiled, step_of, count), "exact")


def ops(repeats):
    """Yield the time of a call of each op of compiled code, for 1,024 elements, in C++ and in Python."""
    x, seed = torch.randn(16, 64), torch.zeros(1, dtype=torch.int64)
    packed, ranges, numbers = dense_ops.quantize_by_channels_op(x, seed, 2, 256, 64)
    place = 2, 256, 16, 64, torch.float32
    calls = {
        "quantize_dense": (x, seed, 2, 256, 1),
        "quantize_by_channels": (x, seed, 2, 256, 64),
        "dequantize_dense": (packed, ranges, *place, 1),
        "dequantize_by_channels": (packed, ranges, *place, numbers),
        "pack_mask": ((x > 0).float(),),
    }
    with torch.no_grad():
        for name, arguments in calls.items():
            row = {"op": name}
            for form, op in (("C++", name), ("Python", f"{name}_in_python")):
                call = getattr(torch.ops.fewbit, op).default
                run = functools.partial(call, *arguments)
                times = timeit.repeat(run, timer=time.thread_time, number=2000, repeat=repeats)
                row[f"microseconds, {form}"] = 1e6 * min(times) / 2000
            yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    about = harness.machine("torch") | {
        "fewbit": fewbit.__version__,
        "C++ ops": backends.on[torch.device("cpu")].register_ops(),
    }
    print(about)
    rows = []
    for network in NETWORKS:
        for row in measure(network, 20 if arguments.quick else 400):
            print(row, flush=True)
            rows.append(row)
    for row in ops(1 if arguments.quick else 9):
        print(row, flush=True)
        rows.append(row)
    if not arguments.quick:
        harness.save("host_time", about, rows)
