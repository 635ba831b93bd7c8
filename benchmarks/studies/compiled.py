"""Saved bytes, gradient errors and times of compiled training: `fewbit.compile` beside what torch.compile offers.

    python benchmarks/study.py compiled                 # bytes and errors: about 10 minutes on 2 cores
    python benchmarks/study.py compiled --bfloat16      # bytes and errors of models in bfloat16
    python benchmarks/study.py compiled --times         # times: about 6 minutes
    python benchmarks/study.py compiled Llama           # only this network; stores nothing

The networks are those of networks/compiled_networks.py. Network and loss are one module. The arms: exact training in eager mode;
`compress_` in eager mode, for recurrences, scans and experts also with `everything`; torch.utils.checkpoint around each
block in eager mode; torch.compile; torch.compile with a memory budget (`activation_memory_budget`); torch's fp8 pass with
scaling, which saves tensors as float8_e5m2; and `fewbit.compile`. Arms that are compiled have the backend aot_eager, which
partitions as Inductor does but runs op by op.

Bytes are those that a step saves besides parameters and inputs. "error" is the norm of the error of a gradient divided by
the norm of the exact gradient, root mean square over the draws. The arms below torch.compile are compared with its
gradient, because compiled code rounds bfloat16 numbers at other places than eager mode. "bias" is the norm of the mean
error of infinitely many draws, estimated from the products of different draws' errors: its square can be negative, and is 0
then. "bias ±" is the standard error of the square, divided by twice the bias, or the root of the standard error if the bias
is smaller than it.

Times are those of Inductor's code, in processor time with one thread, so that other programs do not count: "compile_seconds" of
the first step of a process without cached code, and "step", the median of the ratios to a step of exact training in eager mode,
whose arms take turns. Convolutional networks are channels-last.

Writes results/compiled.json, results/compiled_bfloat16.json or results/compiled_times.json, a row for each network and arm.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import resource
import statistics
import time
from contextlib import nullcontext

import harness
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from networks.compiled_networks import (
    Step,
    checkpointed,
    convolutional,
    few,
    gradient,
    networks,
    of_blocks,
    plain,
)

import fewbit

FP8 = {"activation_quantization_aten_pass": {
    "allowed_dtypes": "torch.float32;torch.bfloat16", "size_in_mb": 0.01, "use_scaling": True,
}}  # fmt: skip
"""The settings of torch's pass. By default, it takes only bfloat16 tensors of at least 100 MB."""
# {arm: (function that prepares a module, context manager of the runs, whether its gradients are random)}
ARMS = {
    "exact": (lambda module: module, nullcontext, False),
    "compress_, 4 bits": (lambda module: converted(module, 4), nullcontext, True),
    "compress_, 2 bits": (lambda module: converted(module, 2), nullcontext, True),
    "compress_ with everything, 2 bits": (
        lambda module: converted(module, 2, everything=True),
        nullcontext,
        True,
    ),
    "checkpointing": (checkpointed, nullcontext, False),
    "torch.compile": (lambda module: plain(module), nullcontext, False),
    "budget 0.5": (
        lambda module: plain(module),
        lambda: functorch_config.patch(activation_memory_budget=0.5),
        False,
    ),
    "budget 0.1": (
        lambda module: plain(module),
        lambda: functorch_config.patch(activation_memory_budget=0.1),
        False,
    ),
    "fp8": (
        lambda module: plain(module),
        lambda: inductor_config.patch(post_grad_fusion_options=FP8),
        False,
    ),
    "fewbit.compile, 4 bits": (lambda module: few(module, 4), nullcontext, True),
    "fewbit.compile, 2 bits": (lambda module: few(module, 2), nullcontext, True),
}


def converted(module, bits, **layers):
    fewbit.compress_(module, bits, layers=layers, verbose=False)
    return module


def bias(products):
    """Return the bias and its standard error, from the inner products of all draws' errors.

    Each draw's mean product with the others is an estimate of the squared bias; half of the spread is common to pairs.
    """
    count = len(products)
    others = (products.sum(1) - products.diagonal()) / (count - 1)
    square, uncertain = float(others.mean()), 2 * float(others.std()) / math.sqrt(count)
    found = math.sqrt(max(square, 0))
    return {"bias": found, "bias ±": uncertain and uncertain / max(2 * found, math.sqrt(uncertain))}


def measure(name, count, dtype=torch.float32):
    """Yield a row for each arm of a network, whose parameters and floating-point inputs have the given dtype."""
    network = networks()[name]
    torch.manual_seed(0)
    module = Step(network).to(dtype)
    batch = [x.to(dtype) if x.is_floating_point() else x for x in network.batch(0)]
    exact = gradient(module, module, batch)
    for arm, (prepare, context, is_random) in ARMS.items():
        torch._dynamo.reset()
        own = copy.deepcopy(module)
        with context():
            run = prepare(own)
            draws = [gradient(own, run, batch, seed) for seed in range(count if is_random else 1)]
            saved = fewbit.saved_bytes(run, *batch)
        errors = [(grad - exact).square().sum().item() for grad in draws]
        row = {"network": name, "arm": arm, "saved_bytes": saved.total, "draws": len(draws)}
        row["error"] = math.sqrt(sum(errors) / len(errors) / exact.square().sum().item())
        if len(draws) > 1:
            differences = torch.stack(draws) - exact
            row |= bias(differences @ differences.T / exact.square().sum())
        if arm == "torch.compile":
            exact = draws[0]  # of the following arms, which are compiled too
        print(row, flush=True)
        yield row


def blocks_alone(module, bits):
    fewbit.compile_blocks_(module, bits)
    return module


COMPILING = {
    "torch.compile": lambda module: plain(module, "inductor"),
    "fewbit.compile, 4 bits": lambda module: few(module, 4, "inductor"),
    "fewbit.compile_blocks_, 4 bits": lambda module: blocks_alone(module, 4),
}
STEPS = {
    "exact": lambda module: module,
    "compress_, 4 bits": lambda module: converted(module, 4),
    "torch.compile": COMPILING["torch.compile"],
    "fewbit.compile, 4 bits": COMPILING["fewbit.compile, 4 bits"],
}
BLOCKS, TURNS = 12, 9


def compile_seconds(arm):
    """Return the processor time of the first step of a GPT-2 of 12 blocks in this process, with that of compilers."""
    torch.set_num_threads(1)
    few(Step(of_blocks(1)), 4)  # the check of torch's version
    network = of_blocks(BLOCKS)
    module, batch = Step(network), network.batch(0)
    module(*batch).backward()
    before = processor_seconds()
    with inductor_config.patch(compile_threads=1, force_disable_caches=True):
        COMPILING[arm](module)(*batch).backward()
    return processor_seconds() - before


def processor_seconds():
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))


def step_ratios(name):
    """Return a row for each arm of a convolutional network, which takes its steps in this process."""
    torch.set_num_threads(1)
    build, shape = convolutional()[name]
    torch.manual_seed(0)
    network, x = build().train(), torch.randn(shape)
    network, x = (each.to(memory_format=torch.channels_last) for each in (network, x))
    x.requires_grad_()  # as within a larger network
    runs, found = {}, {arm: [] for arm in STEPS}
    with inductor_config.patch(compile_threads=1):
        for arm, prepare in STEPS.items():
            run = runs[arm] = prepare(copy.deepcopy(network))
            for _ in range(3):
                run(x).square().mean().backward()
        for turn in range(TURNS):
            order = [*runs]
            for arm in order[turn % len(order) :] + order[: turn % len(order)]:
                start = time.thread_time()
                runs[arm](x).square().mean().backward()
                found[arm].append(time.thread_time() - start)
    return [
        {
            "network": name,
            "arm": arm,
            "milliseconds": 1e3 * statistics.median(times),
            "step": statistics.median(a / b for a, b in zip(times, found["exact"], strict=True)),
        }
        for arm, times in found.items()
    ]


def times():
    """Yield the rows of results/compiled_times.json."""
    for arm in COMPILING:
        seconds = harness.in_process(compile_seconds, arm)
        row = {"network": f"GPT-2, {BLOCKS} blocks", "arm": arm, "compile_seconds": seconds}
        print(row, flush=True)
        yield row
    for name in convolutional():
        rows = harness.in_process(step_ratios, name)
        print(*rows, sep="\n", flush=True)
        yield from rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", metavar="NETWORK")
    parser.add_argument("--draws", type=int, default=16, help="the gradients of each random arm")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--times", action="store_true", help="only times")
    arguments = parser.parse_args()
    about = harness.machine("torch", "transformers") | {"fewbit": fewbit.__version__}
    print(about)
    if arguments.times:
        harness.save("compiled_times", about, list(times()))
        return
    name, function = "compiled", functools.partial(measure, count=arguments.draws)
    if arguments.bfloat16:
        name, function = f"{name}_bfloat16", functools.partial(function, dtype=torch.bfloat16)
    rows = [row for network in arguments.networks or networks() for row in function(network)]
    if not arguments.networks:
        harness.save(name, about, rows)
