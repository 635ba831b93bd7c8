"""What decided two questions of compression: what a norm keeps, and with how many bits attention does.

    python benchmarks/compression_choices.py            # about 8 minutes on 2 cores
    python benchmarks/compression_choices.py --quick

Norms (docs/decisions/0007): the gradient of ResNet-18 on 8 images, of which only batch norms keep something quantised:
their input, or the input normalised. Its error relative to the exact gradient's norm, and its norm relative to that.

Attention (docs/decisions/0008): final losses of the demo's transformer with everything at 2 bits but attention.

Writes results/choice_norms.* and results/choice_attention.*.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import harness
import torch
from compressed_training import run
from torch import nn
from torch.autograd import Function
from torch.nn.functional import cross_entropy

import fewbit
from fewbit.models.resnet import ResNet
from fewbit.runtime.quantiser import Quantiser

NORM_BITS = (2, 3, 4, 8)
ATTENTION_BITS = (2, 3, 4, 8)
EPS = 1e-5


class KeptInput(Function):
    """Batch norm in training that keeps its input itself."""

    @staticmethod
    def forward(ctx, x, weight, bias, quantiser):
        y, mean, rstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, EPS)
        keep = quantiser.keep(x, shared=False)
        ctx.recipe = keep.recipe
        ctx.save_for_backward(weight, mean, rstd, *keep.tensors)
        return y

    @staticmethod
    def backward(ctx, grad):
        weight, mean, rstd, *kept = ctx.saved_tensors
        x = ctx.recipe.restore(kept)
        statistics_of_x = None, None, mean, rstd, True, EPS
        grads = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, *statistics_of_x, [True] * 3
        )
        return *grads, None


class KeepsInput(nn.BatchNorm2d):
    bits = 2

    def forward(self, x):
        return KeptInput.apply(x, self.weight, self.bias, Quantiser(self.bits))


def resnet(kept, bits):
    torch.manual_seed(0)
    model = ResNet("resnet18", nn.ReLU, classes=10)
    if kept == "normalised input":
        norms = [name for name, each in model.named_modules() if isinstance(each, nn.BatchNorm2d)]
        fewbit.compress_(model, bits=bits, include=norms, functional=False, verbose=False)
    elif kept == "input":
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.__class__, module.bits = KeepsInput, bits
    return model


def gradient(model, seed):
    torch.manual_seed(100 + seed)
    x, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    model.zero_grad()
    cross_entropy(model(x), labels).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()]).double()


def norms(seeds):
    """Rows of kept and bits: medians over seeds, and their extremes."""
    exact = [gradient(resnet("exact", None), seed) for seed in range(seeds)]
    for kept in ("input", "normalised input"):
        for bits in NORM_BITS:
            model = resnet(kept, bits)
            found = [gradient(model, seed) for seed in range(seeds)]
            pairs = list(zip(found, exact, strict=True))
            errors = sorted(((a - b).norm() / b.norm()).item() for a, b in pairs)
            sizes = sorted((a.norm() / b.norm()).item() for a, b in pairs)
            yield {
                "kept": kept,
                "bits": bits,
                "seeds": seeds,
                "relative_error": statistics.median(errors),
                "least_error": errors[0],
                "greatest_error": errors[-1],
                "relative_norm": statistics.median(sizes),
            }


def attention(seeds, jobs, quick):
    """Rows of attention bits and seed, 0 bits being the exact model."""
    arms = [(bits, seed) for seed in range(seeds) for bits in (0, *ATTENTION_BITS)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = [
            pool.submit(run, "transformer", 2 if bits else None, seed, quick, attention_bits=bits)
            for bits, seed in arms
        ]
        for (bits, seed), future in zip(arms, running, strict=True):
            yield {"attention_bits": bits, "seed": seed, "final": future.result()["final"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    arguments = parser.parse_args()
    seeds = 1 if arguments.quick else 3
    about = harness.machine("torch") | {"fewbit": fewbit.__version__}
    suffix = "_quick" * arguments.quick
    check = gradient(resnet("input", 8), 0) - gradient(resnet("exact", None), 0)
    assert check.norm() < 0.5 * gradient(resnet("exact", None), 0).norm(), "wrong backward pass"
    rows = []
    for row in norms(seeds):
        rows.append(row)
        form = "norms keep {kept:16} in {bits} bits: error {relative_error:.3f}, norm {relative_norm:.3f}"
        print(form.format(**row), flush=True)
    harness.save("choice_norms" + suffix, about, rows)
    rows = []
    for row in attention(seeds, arguments.jobs, arguments.quick):
        rows.append(row)
        print("attention {attention_bits} bits, seed {seed}: {final:.4f}".format(**row), flush=True)
    harness.save("choice_attention" + suffix, about, rows)


if __name__ == "__main__":
    main()
