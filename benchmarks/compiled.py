"""Saved bytes and gradient errors of compiled training: `fewbit.compile` beside what torch.compile offers.

    python benchmarks/compiled.py                 # about 10 minutes on 2 cores
    python benchmarks/compiled.py Llama           # only this network; stores nothing

The networks are those of quantizer_choice.py that torch.compile can trace. Network and loss are one module. The arms:
exact training in eager mode; `compress_` in eager mode; torch.compile; torch.compile with a memory budget
(`activation_memory_budget`); torch's fp8 pass with scaling, which saves tensors as float8_e5m2; and `fewbit.compile`.
Arms that are compiled have the backend aot_eager, which partitions as Inductor does but runs op by op.

Bytes are those that a step saves besides parameters and inputs. "error" is the norm of the mean error of the gradient's
draws divided by the norm of the exact gradient, root mean square. "bias" is the norm of the mean error over the draws,
without the part that the noise of the draws explains.

Writes results/compiled.*, a row for each network and arm.
"""

from __future__ import annotations

import argparse
import copy
import math
from contextlib import nullcontext

import harness
import quantizer_choice
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import nn
from torch._functorch.partitioners import min_cut_rematerialization_partition

import fewbit
from fewbit.compiler.compiling import _aot_eager

NAMES = (
    "GPT-2",
    "Llama",
    "BERT, attention written out",
    "ViT on digits",
    "ResNet on digits",
    "U-Net on digits",
)
DRAWS = 16
FP8 = {"activation_quantization_aten_pass": {
    "allowed_dtypes": "torch.float32", "size_in_mb": 0.01, "use_scaling": True,
}}  # fmt: skip
"""The settings of torch's pass. By default, it takes only bfloat16 tensors of at least 100 MB."""
# {arm: (function that prepares a module, context manager of the runs, whether its gradients are random)}
ARMS = {
    "exact": (lambda module: module, nullcontext, False),
    "compress_, 4 bits": (lambda module: converted(module, 4), nullcontext, True),
    "compress_, 2 bits": (lambda module: converted(module, 2), nullcontext, True),
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


class Step(nn.Module):
    """A network with its loss."""

    def __init__(self, network):
        super().__init__()
        self.model, self.loss = network.build().train(), network.loss

    def forward(self, *batch):
        return self.loss(self.model, *batch)


def converted(module, bits):
    fewbit.compress_(module, bits, verbose=False)
    return module


def plain(module):
    return torch.compile(module, backend=_aot_eager(min_cut_rematerialization_partition))


def few(module, bits):
    return fewbit.compile(module, bits, backend="aot_eager")


def gradient(module, run, batch, seed=0):
    torch.manual_seed(seed)
    module.zero_grad()
    run(*batch).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).double()


def measure(name):
    """Yield a row for each arm of a network."""
    network = quantizer_choice.networks()[name]
    torch.manual_seed(0)
    module, batch = Step(network), network.batch(0)
    exact = gradient(module, module, batch)
    for arm, (prepare, context, is_random) in ARMS.items():
        torch._dynamo.reset()
        own = copy.deepcopy(module)
        with context():
            run = prepare(own)
            draws = [gradient(own, run, batch, seed) for seed in range(DRAWS if is_random else 1)]
            saved = fewbit.saved_bytes(run, *batch)
        errors = [(grad - exact).square().sum().item() for grad in draws]
        row = {"network": name, "arm": arm, "saved_bytes": saved.total}
        row["error"] = math.sqrt(sum(errors) / len(errors) / exact.square().sum().item())
        if is_random:
            stacked = torch.stack(draws)
            noise = stacked.var(0).sum() / len(draws)
            distance = (stacked.mean(0) - exact).square().sum() - noise
            row["bias"] = float(distance.clamp(min=0).sqrt() / exact.norm())
        print(row, flush=True)
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", metavar="NETWORK")
    arguments = parser.parse_args()
    about = harness.machine("torch", "transformers") | {"fewbit": fewbit.__version__}
    print(about)
    rows = [row for name in arguments.networks or NAMES for row in measure(name)]
    if not arguments.networks:
        harness.save("compiled", about, rows)


if __name__ == "__main__":
    main()
