"""The pictures of docs/concepts/how-it-works.md and docs/concepts/gradients.md.

    python benchmarks/study.py how_it_works    # about 10 s on one core

Everything that the pictures show is computed here, from fixed seeds:

- docs/images/how_bytes.png: the bytes that a training step of the README's transformer holds for the backward pass, layer
  by layer, exact and with 4 bits.
- docs/images/how_copies.png: a group of 256 elements, and its uniform and its rotated copy with 2 bits.
- docs/images/how_gradients.png: the error of the mean of n gradients, exact in expectation or biased.

Writes the figures of the pictures to results/how_it_works.json.
"""

from __future__ import annotations

from itertools import accumulate

import harness
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import nn

import fewbit
from fewbit.render import figures as style
from fewbit.runtime.ops import quantizer_ops

EXACT, OURS, THIRD = style.MUTED, "#0e7490", "#15803d"
MIB = 2**20


def panels(width, height, columns=1):
    """Return a figure and its axes, a list if there are several columns."""
    made = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    return made, made.subplots(ncols=columns, sharey=True)


def save(made, name):
    """Write a picture of the documentation."""
    made.savefig(harness.IMAGES / f"how_{name}.png", dpi=130)


def draw_bytes():
    """Draw the bytes that are held during a training step, and return a row for each curve."""
    layer = nn.TransformerEncoderLayer(256, nhead=8, dim_feedforward=1024, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
    x = torch.randn(16, 128, 256)
    made, axes = panels(8, 3.6)
    rows = []
    for name, color in (("exact", EXACT), ("4 bits", OURS)):
        if name != "exact":
            fewbit.compress_(model, bits=4, verbose=False)
        entries = fewbit.saved_bytes(model, x).kept
        held = [0, *accumulate(entry.bytes for entry in entries)]
        # The forward pass is the first half of the step. The backward pass frees tensors in reverse order.
        there = [number / len(entries) for number in range(len(held))]
        times = [*there, *(2 - time for time in reversed(there))]
        mib = [size / MIB for size in (*held, *reversed(held))]
        axes.fill_between(times, mib, color=color, alpha=0.25, linewidth=0)
        axes.plot(times, mib, color=color, linewidth=1.6)
        label = f"{name}: {held[-1] / MIB:.1f} MiB"
        axes.annotate(label, (1, held[-1] / MIB), (8, 5), textcoords="offset points", color=color)
        rows.append({"picture": "bytes", "curve": name, "value": held[-1]})
    axes.axvline(1, color=style.INK, linewidth=0.8, linestyle=":")
    axes.set(xlim=(0, 2), ylim=(0, 330), xticks=[0.5, 1.5], ylabel="saved tensors held, MiB")
    axes.set_xticklabels(["forward pass, layer by layer", "backward pass, in the reverse order"])
    axes.grid(False, axis="x")
    style.title(axes, "Saved tensors during one training step")
    save(made, "bytes")
    return rows


def copy_of(group, kind):
    """Return the dequantized copy of a group of 256 elements with 2 bits."""
    row, seed = group[None], torch.tensor([3])
    packed, ranges = quantizer_ops.quantize(row, seed, bits=2, group_size=256, kind=kind)
    shape = row.shape, row.stride(), row.dtype
    return quantizer_ops.dequantize(packed, ranges, 2, 256, *shape, kind=kind)[0]


def draw_copies():
    """Draw a group with a few large elements and both kinds of copies of it, and return a row for each copy."""
    group = torch.randn(256) * torch.randn(256).abs() ** 1.5
    limit = float(group.abs().max()) * 1.05
    made, axes = panels(9.5, 3.7, 2)
    rows = []
    for own, kind, color in zip(axes, ("uniform", "rotated"), (EXACT, OURS), strict=True):
        values = copy_of(group, kind)
        error = float((values - group).square().mean() / group.var(correction=0))
        own.plot([-limit, limit], [-limit, limit], color=style.INK, linewidth=0.8)
        own.plot(group, values, "o", color=color, markersize=3, alpha=0.7)
        own.set(xlim=(-limit, limit), ylim=(-limit, limit), xlabel="element of the group")
        style.title(own, f"{kind}: squared error / variance = {error:.2f}")
        rows.append({"picture": "copies", "curve": kind, "value": error})
    axes[0].set_ylabel("dequantized element")
    save(made, "copies")
    return rows


def gradient(module, x, g, name):
    """Return the gradient of sum(module(x) * g) of x, or of the parameter `name`."""
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    (module(leaf) * g).sum().backward()
    return leaf.grad if name == "x" else module.get_parameter(name).grad.clone()


def draw_gradients():
    """Draw the error of the mean of n gradients for three layers, and return a row for each point."""
    counts = [2**power for power in range(13)]
    x = torch.randn(32, 96)
    layers = [
        ("weight of Linear, 2 bits: exact in expectation", OURS, nn.Linear(96, 64), "weight"),
        ("input of LayerNorm, 2 bits: a small bias", THIRD, nn.LayerNorm(96), "x"),
        ("input of GELU with a table of 3 bits: the table's error", style.ERROR, nn.GELU(), "x"),
    ]
    made, axes = panels(8, 3.8)
    rows = []
    for label, color, module, name in layers:
        g = torch.randn(module(x).shape)
        exact = gradient(module, x, g, name).double()
        if isinstance(module, nn.GELU):
            module = fewbit.GELU(table=fewbit.load_table("gelu", bits=3))
        else:
            fewbit.compress_(nn.Sequential(module), bits=2, verbose=False)
        total, errors = torch.zeros_like(exact), []
        for number in range(1, counts[-1] + 1):
            total += gradient(module, x, g, name)
            if number in counts:
                errors.append(float((total / number - exact).norm() / exact.norm()))
        percent = [100 * error for error in errors]
        axes.plot(counts, percent, "o-", color=color, markersize=4, label=label)
        for count, error in zip(counts, errors, strict=True):
            rows.append({"picture": "gradients", "curve": label, "n": count, "value": error})
    axes.set(xscale="log", yscale="log", xlabel="number of gradients in the mean")
    axes.set_ylabel("error of the mean,\n% of the exact gradient")
    axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.minorticks_off()
    axes.legend(loc="lower left")
    style.title(axes, "Noise averages out, bias does not")
    save(made, "gradients")
    return rows


def main():
    """Draw all pictures and save their figures."""
    rows = []
    with rc_context(style.STYLE):
        for draw in (draw_bytes, draw_copies, draw_gradients):
            torch.manual_seed(0)
            rows += draw()
    harness.save("how_it_works", harness.machine("torch", "fewbit"), rows)
