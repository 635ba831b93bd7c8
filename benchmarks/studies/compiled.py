"""Saved bytes, gradient errors and times of compiled training: `fewbit.compile` beside what torch.compile offers.

    python benchmarks/study.py compiled                 # bytes and errors: about 10 minutes on 2 cores
    python benchmarks/study.py compiled --bfloat16      # bytes and errors of models in bfloat16
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

Writes results/compiled.json or results/compiled_bfloat16.json, a row for each network and arm.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
from contextlib import nullcontext

import harness
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from networks.compiled_networks import Step, checkpointed, few, gradient, networks, plain

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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", metavar="NETWORK")
    parser.add_argument("--draws", type=int, default=16, help="the gradients of each random arm")
    parser.add_argument("--bfloat16", action="store_true")
    arguments = parser.parse_args()
    about = harness.machine("torch", "transformers") | {"fewbit": fewbit.__version__}
    print(about)
    name, function = "compiled", functools.partial(measure, count=arguments.draws)
    if arguments.bfloat16:
        name, function = f"{name}_bfloat16", functools.partial(function, dtype=torch.bfloat16)
    rows = [row for network in arguments.networks or networks() for row in function(network)]
    if not arguments.networks:
        harness.save(name, about, rows)
