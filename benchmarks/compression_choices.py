"""The measurements behind two decisions: which tensor a norm saves, and how many bits attention gets. Also, bias.

    python benchmarks/compression_choices.py            # about 12 minutes on 2 cores
    python benchmarks/compression_choices.py --quick
    python benchmarks/compression_choices.py --only bias    # or norms, attention

norms (docs/decisions/0007): the gradient of ResNet-18 on 8 images if only batch norms save a quantized tensor, which
is their input or the normalized input. The norm of the gradient, and of its error, are divided by the exact gradient's
norm.

attention (docs/decisions/0008): the final loss of the demo's transformer if all tensors have 2 bits, except
attention's.

bias (docs/concepts/layers.md): for the layers in LAYERS, whose gradients are not exact in expectation, on normal random inputs,
with rotated and uniform copies.
The bias is the distance between the mean gradient over many backward passes and torch's gradient in float64, after
correction for the sampling error of the mean. The noise is the root mean square error of a single backward pass. Bias,
sampling error and noise are divided by the norm of torch's gradient, and are medians over inputs.

Writes results/choice_norms.*, choice_attention.* and choice_bias.*.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import NamedTuple

import harness
import torch
from compressed_training import run
from torch import nn
from torch.autograd import Function
from torch.nn import functional
from torch.nn.functional import cross_entropy

import fewbit
import fewbit.functional
from fewbit.demo.training import Settings
from fewbit.models.resnet import ResNet
from fewbit.runtime.quantizers.quantizer import Quantizer

NORM_BITS = (2, 3, 4, 8)
ATTENTION_BITS = (2, 3, 4, 8)
BIAS_BITS = (2, 3, 4, 8)
KINDS = ("rotated", "uniform")
CHUNK = 1000  # backward passes at once
EPS = 1e-5


class KeptInput(Function):
    """A batch norm in training that saves its input quantized, instead of the normalized input."""

    @staticmethod
    def forward(ctx, x, weight, bias, quantizer):
        y, mean, rstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, EPS)
        saved = quantizer.quantize(x, shared=False)
        ctx.spec = saved.spec
        ctx.save_for_backward(weight, mean, rstd, *saved.tensors)
        return y

    @staticmethod
    def backward(ctx, grad):
        weight, mean, rstd, *kept = ctx.saved_tensors
        x = ctx.spec.dequantize(kept)
        statistics_of_x = None, None, mean, rstd, True, EPS
        grads = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, *statistics_of_x, [True] * 3
        )
        return *grads, None


class KeepsInput(nn.BatchNorm2d):
    bits = 2

    def forward(self, x):
        return KeptInput.apply(x, self.weight, self.bias, Quantizer(self.bits))


def resnet(kept, bits):
    torch.manual_seed(0)
    model = ResNet("resnet18", nn.ReLU, classes=10)
    if kept == "normalized input":
        norms = [name for name, each in model.named_modules() if isinstance(each, nn.BatchNorm2d)]
        fewbit.compress_(
            model,
            bits=bits,
            include=norms,
            layers=fewbit.LayerSettings(functional=False),
            verbose=False,
        )
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
    """Yield a row for each saved tensor and number of bits, with medians and extremes over seeds."""
    exact = [gradient(resnet("exact", None), seed) for seed in range(seeds)]
    for kept in ("input", "normalized input"):
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


def attention(seeds, jobs, steps):
    """Yield a row for each number of bits of attention and seed. 0 bits mean the exact model."""
    arms = [(bits, seed) for seed in range(seeds) for bits in (0, *ATTENTION_BITS)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = [
            pool.submit(
                run,
                "transformer",
                2 if bits else None,
                seed,
                steps,
                layers={"attention_bits": bits} if bits else None,
            )
            for bits, seed in arms
        ]
        for (bits, seed), future in zip(arms, running, strict=True):
            yield {"attention_bits": bits, "seed": seed, "final": future.result()["final"]}


def layer_norm(library, x, **options):
    return library.layer_norm(x, x.shape[1:], **options)


def batch_norm(library, x, **options):
    """Normalize each x[i] separately, by treating them as different channels of one batch."""
    count, samples, channels, *size = x.shape
    side_by_side = x.transpose(0, 1).reshape(samples, count * channels, *size)
    y = library.batch_norm(side_by_side, None, None, training=True, **options)
    return y.view(samples, count, channels, *size).transpose(0, 1)


class Layer(NamedTuple):
    """A layer whose gradients are biased.

    The quantizer has one group per tensor, or for the batch norm one group per sample.

    Attributes:
        ours: fewbit's function.
        theirs: torch's function.
        names: The names of the tensors that get a gradient.
        shape: The shape of these tensors.
        draws: The number of backward passes for each input.
    """

    ours: Callable
    theirs: Callable
    names: tuple[str, ...]
    shape: tuple[int, ...]
    draws: int


LAYERS = {
    "attention": Layer(
        fewbit.functional.scaled_dot_product_attention,
        functional.scaled_dot_product_attention,
        ("query", "key", "value"),
        (16, 16),
        10_000,
    ),
    "swiglu": Layer(
        fewbit.functional.swiglu,
        lambda gate, up: functional.silu(gate) * up,
        ("gate", "up"),
        (256,),
        20_000,
    ),
    "geglu": Layer(
        fewbit.functional.geglu,
        lambda gate, up: functional.gelu(gate) * up,
        ("gate", "up"),
        (256,),
        20_000,
    ),
    "softmax": Layer(
        partial(fewbit.functional.softmax, dim=-1),
        partial(functional.softmax, dim=-1),
        ("input",),
        (64,),
        50_000,
    ),
    "layer_norm": Layer(
        partial(layer_norm, fewbit.functional),
        partial(layer_norm, functional),
        ("input",),
        (96,),
        50_000,
    ),
    "batch_norm": Layer(
        partial(batch_norm, fewbit.functional),
        partial(batch_norm, functional),
        ("input",),
        (2, 4, 8, 8),
        5_000,
    ),
}


def gradients(function, tensors, grad, count):
    """Return the gradients of `count` backward passes that are computed at once, (count, *shape) for each tensor."""
    many = [x.expand(count, *x.shape).clone().requires_grad_() for x in tensors]
    y = function(*many)
    return torch.autograd.grad(y, many, grad.expand_as(y))


def bias_and_noise(layer, kind, bits, seed, draws):
    """Yield (bias, sampling error of the mean, noise) for each gradient, divided by the norm of torch's gradient."""
    torch.manual_seed(1000 + seed)
    *tensors, grad = (torch.randn(layer.shape) for _ in (*layer.names, "grad"))
    exact = gradients(layer.theirs, [x.double() for x in tensors], grad.double(), 1)
    off = [torch.zeros_like(x[0]) for x in exact]  # sums of errors
    squares = [0.0] * len(exact)
    for _ in range(draws // CHUNK):
        found = gradients(partial(layer.ours, bits=bits, quantizer=kind), tensors, grad, CHUNK)
        for i, (a, b) in enumerate(zip(found, exact, strict=True)):
            errors = a.double().sub_(b)
            off[i] += errors.sum(0)
            squares[i] += errors.square_().sum().item()
    for error, square, b in zip(off, squares, exact, strict=True):
        size = b.square().sum().item()
        of_mean, of_one = (error / draws).square().sum().item() / size, square / draws / size
        sampling = (of_one - of_mean) / (draws - 1)
        yield max(of_mean - sampling, 0) ** 0.5, sampling**0.5, of_one**0.5


def bias(inputs, fewer):
    """Yield a row for each layer, kind of copies, number of bits and gradient.

    A row has medians over inputs, and the extremes of the bias.

    Args:
        inputs: The number of random inputs.
        fewer: The factor by which the number of backward passes is reduced.
    """
    for (name, layer), kind in product(LAYERS.items(), KINDS):
        draws = layer.draws // fewer
        for bits in BIAS_BITS:
            found = [bias_and_noise(layer, kind, bits, seed, draws) for seed in range(inputs)]
            for gradient_of, each in zip(layer.names, zip(*found, strict=True), strict=True):
                biases, errors, noises = zip(*each, strict=True)
                assert bits < 8 or max(noises) < 0.1, "wrong backward pass"
                yield {
                    "layer": name,
                    "quantizer": kind,
                    "bits": bits,
                    "gradient": gradient_of,
                    "inputs": inputs,
                    "draws": draws,
                    "bias": statistics.median(biases),
                    "least_bias": min(biases),
                    "greatest_bias": max(biases),
                    "sampling_error": statistics.median(errors),
                    "noise": statistics.median(noises),
                }


PARTS = {
    "norms": "norms keep {kept:16} in {bits} bits: error {relative_error:.3f}, norm {relative_norm:.3f}",
    "attention": "attention {attention_bits} bits, seed {seed}: {final:.4f}",
    "bias": "{layer:10} {quantizer:8} {bits} bits, {gradient:5}: bias {bias:8.4%}, sampling error {sampling_error:.4%}, "
    "noise {noise:8.3%}",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    arguments = parser.parse_args()
    about = harness.machine("torch") | {"fewbit": fewbit.__version__}
    for part in [arguments.only] if arguments.only else PARTS:
        rows = []
        for row in rows_of(part, arguments.quick, arguments.jobs):
            rows.append(row)
            print(PARTS[part].format(**row), flush=True)
        harness.save(f"choice_{part}" + "_quick" * arguments.quick, about, rows)


def rows_of(part, quick, jobs):
    seeds = 1 if quick else 5
    if part == "attention":
        return attention(seeds, jobs, 20 if quick else Settings.steps)
    if part == "bias":
        return bias(8, 5) if quick else bias(96, 1)
    check = gradient(resnet("input", 8), 0) - gradient(resnet("exact", None), 0)
    assert check.norm() < 0.5 * gradient(resnet("exact", None), 0).norm(), "wrong backward pass"
    return norms(seeds)


if __name__ == "__main__":
    main()
