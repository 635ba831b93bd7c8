"""The memory and the time of the cross-entropy of a large vocabulary (docs/concepts/layers.md).

    python benchmarks/study.py cross_entropy            # about two minutes on 2 cores
    python benchmarks/study.py cross_entropy --quick

The logits are products of normal hidden states and of a weight, plus the logarithm of a Zipf distribution, and targets are drawn
from their probabilities. Each way to compute the loss runs in a process of its own. `saved` is the resident
memory between the forward and the backward pass, and `peak` the most resident memory during both, minus the resident
memory before. The peak contains the gradients of hidden states and weight, 51 MiB in all. MALLOC_MMAP_THRESHOLD_ makes
the C library return large blocks to the system when they are freed, so that freed memory does not count. Losses and
gradients are compared with torch's. The time is the processor time of a forward and a backward pass with one thread.

Writes results/cross_entropy_memory.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import harness
import torch
from torch.nn import functional as torch_f

import fewbit
import fewbit.functional as F

SIZES = {"tokens": 2048, "classes": 50000, "features": 256}
QUICK = {"tokens": 64, "classes": 2000, "features": 32}


def tensors(tokens, classes, features):
    """Return (hidden states, weight, targets)."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, features, generator=generator)
    weight = 0.8 * features**-0.5 * torch.randn(classes, features, generator=generator)
    logits = hidden @ weight.t() - torch.arange(1, classes + 1).log()
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    return hidden, weight, target


def plain(hidden, weight, target):
    return torch_f.cross_entropy(torch_f.linear(hidden, weight), target)


def quantized(hidden, weight, target):
    return F.cross_entropy(torch_f.linear(hidden, weight), target, bits=2)


def chunked(hidden, weight, target):
    return F.linear_cross_entropy(hidden, weight, target)


def regions(hidden, weight, target):
    """Compute linear_cross_entropy as in versions of torch that have no chunked function."""
    from fewbit.functional import losses

    losses._torch_supports = lambda *_: False
    return F.linear_cross_entropy(hidden, weight, target)


def torch_chunks(hidden, weight, target):
    options = torch.nn.LinearCrossEntropyOptions()
    return torch_f.linear_cross_entropy(hidden, weight, target, options=options)


WAYS = {
    "torch": plain,
    "cross_entropy, 2 bits": quantized,
    "linear_cross_entropy": chunked,
    "linear_cross_entropy, regions": regions,
    "torch's linear_cross_entropy": torch_chunks,
}


def measure(way, sizes):
    """Return (seconds, saved bytes, peak bytes, loss, norms of the gradients) of one way."""
    torch.set_num_threads(1)
    hidden, weight, target = tensors(**sizes)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    WAYS[way](*leaves, target).backward()
    times = []
    for _ in range(3):
        hidden.grad = weight.grad = None
        start = time.thread_time()
        WAYS[way](*leaves, target).backward()
        times.append(time.thread_time() - start)
    norms = [float(leaf.grad.norm()) for leaf in leaves]
    hidden.grad = weight.grad = None
    before = harness.resident_bytes()
    with harness.watched(harness.resident_bytes) as found:
        loss = WAYS[way](*leaves, target)
        saved = harness.resident_bytes() - before
        loss.backward()
    return statistics.median(times), saved, found.most - before, loss.item(), norms


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    ending = "_quick" * arguments.quick
    about = harness.machine("torch") | {"fewbit": fewbit.__version__}
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # child processes inherit this
    rows = []
    form = "{:30} {:>9} {:>6} {:>10} {:>10}"
    print(form.format("way", "time", "ratio", "saved", "peak"))
    for way in WAYS:
        if way == "torch's linear_cross_entropy" and not hasattr(torch_f, "linear_cross_entropy"):
            continue
        sizes = QUICK if arguments.quick else SIZES
        seconds, saved, peak, loss, norms = harness.in_process(measure, way, sizes)
        first = rows[0] if rows else None
        row = {"way": way, "seconds": seconds, "saved_bytes": saved, "peak_bytes": peak}
        row |= {"loss": loss, "hidden_norm": norms[0], "weight_norm": norms[1]}
        if first:
            assert abs(loss / first["loss"] - 1) < 1e-5
            tolerance = 0.05 if "bits" in way else 1e-4
            for name in ("hidden_norm", "weight_norm"):
                assert abs(row[name] / first[name] - 1) < tolerance
        rows.append(row)
        ratio = f"{seconds / rows[0]['seconds']:.2f}"
        sizes = (f"{number / 2**20:.0f} MiB" for number in (saved, peak))
        print(form.format(way, harness.show(seconds), ratio, *sizes))
    harness.save("cross_entropy_memory" + ending, about, rows)
