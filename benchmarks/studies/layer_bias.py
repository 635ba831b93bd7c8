"""The bias of the gradients of single layers, for docs/concepts/layers.md.

    python benchmarks/study.py layer_bias            # about 10 minutes
    python benchmarks/study.py layer_bias --quick

The layers are those of LAYERS, whose gradients are not exact in expectation, on normal random inputs, with rotated and uniform
copies. The bias is the distance between the mean gradient over many backward passes and torch's gradient in float64, after
correction for the sampling error of the mean. The noise is the root mean square error of a single backward pass. Bias,
sampling error and noise are divided by the norm of torch's gradient, and are medians over inputs.

Writes results/layer_bias.json.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import harness
import torch
from torch.nn import functional

import fewbit
import fewbit.functional

BIAS_BITS = (2, 3, 4, 8)
KINDS = ("rotated", "uniform")
CHUNK = 1000
"""Backward passes that are computed at once."""


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


FORM = "{layer:10} {quantizer:8} {bits} bits, {gradient:5}: bias {bias:8.4%}, sampling error {sampling_error:.4%}, noise {noise:8.3%}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rows = []
    for row in bias(8, 5) if quick else bias(96, 1):
        rows.append(row)
        print(FORM.format(**row), flush=True)
    harness.save(
        "layer_bias" + "_quick" * quick,
        harness.machine("torch") | {"fewbit": fewbit.__version__},
        rows,
    )
