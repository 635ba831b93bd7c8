"""Test two simple assumptions: about the noise of rounding, and about the samples for which this noise matters.

    python benchmarks/rounding_noise.py           # half a minute

The weights are those at the end of exact training, for one batch and every layer whose input divides into groups of
256. The saved tensor is the layer's input, or for norms the normalized input. The step of a group with b bits is its
range / (2^b - 1).

- noise_b tests an assumption of fewbit/runtime/saved/assignment.py. It is the variance that rounding to b bits adds,
  divided by the sum of step^2 / 6. The variance is the sum of f (1 - f) step^2, where f is the distance of an element
  from the level below, in steps. Its mean is step^2 / 6 if f is uniform.
- by_range and by_gradient test how samples share 1.75 bits on average. They are the variance that rounding adds to the
  layer's weight gradient, divided by the same variance if bits are given to samples at random. For by_range, bits
  follow the squared ranges (level L2.5); for by_gradient, the squared ranges times squared gradients, which are not
  known when bits are chosen. The variance is taken as the sum over samples of squared range * squared gradient /
  (2^bits - 1)^2.

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
from fewbit.config import UNIFORM
from fewbit.runtime.format.bit_sharing import share_bits

BITS = (1, 2, 3, 4)
GROUP, SHARED, MOST = 256, 1.75, 3
LAYERS = nn.Conv2d, nn.BatchNorm2d, nn.Linear, nn.LayerNorm


def kept(layer, x):
    """Return what a layer saves of its input x, as (samples, groups, GROUP), or None if groups do not fit."""
    if isinstance(layer, nn.BatchNorm2d):
        x = F.batch_norm(x, None, None, training=True)
    elif isinstance(layer, nn.LayerNorm):
        x = F.layer_norm(x, x.shape[-1:])
    rows = x.reshape(len(x), -1)
    return rows.view(len(x), -1, GROUP) if rows.shape[1] % GROUP == 0 else None


def of_rounding(groups):
    """Return {"noise_b": ratio} for each number of bits b in BITS. `groups` is (samples, groups, GROUP)."""
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
    """Return by_range, by_gradient, and the share of the squared gradients that the MOST largest samples have.

    Args:
        groups: (samples, groups, GROUP), the saved tensor.
        grads: (samples,), the squared gradients of the layer's result.
    """
    squares = GROUP * (groups.amax(2) - groups.amin(2)).square().sum(1)

    def added(bits):
        return (grads * squares / (2.0**bits - 1) ** 2).sum()

    total = int(SHARED * len(squares))
    more = total / len(squares) - 1
    at_random = (1 - more) * added(torch.tensor(1.0)) + more * added(torch.tensor(2.0))
    return {
        f"gradient_of_{MOST}": (grads.topk(MOST).values.sum() / grads.sum()).item(),
        "by_range": (added(share_bits(squares, total, UNIFORM).float()) / at_random).item(),
        "by_gradient": (
            added(share_bits(grads * squares, total, UNIFORM).float()) / at_random
        ).item(),
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
