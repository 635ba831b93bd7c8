"""What rounding adds to the tensors that layers keep, and which samples it matters for, beside simple assumptions.

    python benchmarks/rounding_noise.py           # half a minute

At the weights that exact training has at its end, for one batch and every layer with groups of 256, whose inputs (of
norms: normalized) are what is kept:

- noise_b: the variance that rounding to b bits adds, sum of f (1 - f) step^2, f being how far an element is from
  the level below in steps; over the sum of step^2 / 6, which is its mean where f is uniform (fewbit/runtime/saved/assignment.py).
- by_range, by_gradient: what an average of 1.75 bits, shared between samples, adds to the variance of the layer's
  weight gradient, taken as the sum over samples of squared range times squared gradient over (2^bits - 1)^2; over the
  same for bits given at random. Bits by the squares of ranges (level L2.5), and by those times squared gradients,
  which are not known when bits are chosen.

Writes results/rounding_noise.*.
"""

from __future__ import annotations

import statistics

import adaptive_bits
import harness
import torch
from torch import nn
from torch.nn import functional as F

import fewbit
from fewbit.runtime.format.bit_sharing import share_bits

BITS = (1, 2, 3, 4)
GROUP, SHARED, MOST = 256, 1.75, 3
LAYERS = nn.Conv2d, nn.BatchNorm2d, nn.Linear, nn.LayerNorm


def kept(layer, x):
    """(samples, groups, GROUP), or None where groups do not fit."""
    if isinstance(layer, nn.BatchNorm2d):
        x = F.batch_norm(x, None, None, training=True)
    elif isinstance(layer, nn.LayerNorm):
        x = F.layer_norm(x, x.shape[-1:])
    rows = x.reshape(len(x), -1)
    return rows.view(len(x), -1, GROUP) if rows.shape[1] % GROUP == 0 else None


def of_rounding(groups):
    """{noise_b: its ratio}."""
    least = groups.amin(2, keepdim=True)
    spans = groups.amax(2, keepdim=True) - least
    found = {}
    for bits in BITS:
        step = spans / (2**bits - 1)
        f = ((groups - least) / step).nan_to_num(0.0).frac()
        added = (f * (1 - f) * step**2).sum()
        found[f"noise_{bits}"] = (added / (step**2 / 6).expand_as(groups).sum()).item()
    return found


def of_sharing(groups, grads):
    """grads: (samples,) squared gradients of the layer's result."""
    squares = GROUP * (groups.amax(2) - groups.amin(2)).square().sum(1)

    def added(bits):
        return (grads * squares / (2.0**bits - 1) ** 2).sum()

    total = int(SHARED * len(squares))
    more = total / len(squares) - 1
    at_random = (1 - more) * added(torch.tensor(1.0)) + more * added(torch.tensor(2.0))
    return {
        f"gradient_of_{MOST}": (grads.topk(MOST).values.sum() / grads.sum()).item(),
        "by_range": (added(share_bits(squares, total).float()) / at_random).item(),
        "by_gradient": (added(share_bits(grads * squares, total).float()) / at_random).item(),
    }


def rows_of(network, seed):
    settings = adaptive_bits.settings_of(False)
    model = adaptive_bits.build(network, seed, settings)
    adaptive_bits.train(network, model, seed, settings)
    inputs, labels = next(adaptive_bits.batches(network, settings, 1000 + seed))
    results = {}

    def note(path):
        def hook(layer, arguments, y):
            y.retain_grad()
            results[path] = layer, arguments[0].detach(), y

        return hook

    for path, layer in model.named_modules():
        if isinstance(layer, LAYERS):
            layer.register_forward_hook(note(path))
    adaptive_bits.gradient(model, inputs, labels)
    for path, (layer, x, y) in results.items():
        groups = kept(layer, x)
        if groups is not None:
            about = {"network": network, "layer": path, "kind": type(layer).__name__, "seed": seed}
            zeros = {"zeros": (x == 0).float().mean().item()}
            grads = y.grad.reshape(len(y), -1).square().sum(1)
            yield about | zeros | of_rounding(groups) | of_sharing(groups, grads)


def main():
    torch.set_num_threads(1)
    about = harness.machine("torch", "scikit-learn") | {"fewbit": fewbit.__version__}
    rows = []
    for network in ("transformer", "resnet"):
        rows += rows_of(network, seed=0)
    harness.save("rounding_noise", about, rows)
    grouped = {}
    for row in rows:
        grouped.setdefault((row["network"], row["kind"]), []).append(row)
    for (network, kind), own in grouped.items():
        names = [name for name in own[0] if isinstance(own[0][name], float)]
        medians = (f"{name} {statistics.median(row[name] for row in own):.2f}" for name in names)
        print(f"{network:11} {kind:11} medians of {len(own)}:", ", ".join(medians))


if __name__ == "__main__":
    main()
