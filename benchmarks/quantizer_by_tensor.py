"""Measure the errors of copies by kind of saved tensor, in the networks of quantizer_choice.py (docs/decisions/0016).

    python benchmarks/quantizer_by_tensor.py            # about 40 minutes on one core
    python benchmarks/quantizer_by_tensor.py --quick    # few steps and draws, to check that it works

The kind of a tensor is the class of the layer that saves it, or the name of the function, with the number of the input:
"LayerNorm 0" or "scaled_dot_product_attention 1" (the keys). These methods make a copy:

    uniform         ActNN's quantizer
    rotated         fewbit's rotated copies; the method is called "masked" if the tensor is a ReLU's result
    centered        rotated copies of the tensor minus the mean of each channel; the means are saved in float32
    standardized    the mean of each channel is subtracted, the result is divided by the channel's standard deviation, and a
                    rotated copy of this is made. Both numbers come from another batch, as if a layer had kept them from
                    an earlier step
    fixed signs     a rotation with the same signs in every step, computed in NumPy: for comparison

Tensors are measured at the start of training ("early") and after 200 steps of exact training ("late"). The last
method divides the tensor into rows of 256 elements, and leaves out the elements that do not fill a row.

Every tensor is copied several times with fresh random numbers. Let x be the exact tensor, and e the error of a copy.
"error" is the mean of |e|^2 / |x|^2. "worst channel" is the greatest such ratio of a channel: an entry of the last
dimension, or of dimension 1 for convolutions, batch and group norms. "bias" is |mean of e|^2 / |x|^2, minus the
sampling error of the mean. "gradient" is the squared error of the network's gradient, divided by the squared norm of
the exact gradient, if tensors of this kind have uniform or rotated copies and all other tensors have uniform copies of
8 bits. The errors of these other copies are part of the number.

Writes results/quantizer_by_tensor.*: a row for each network, time, kind of tensor, method and number of bits.
"""

from __future__ import annotations

import copy
import statistics
from collections import defaultdict
from contextlib import contextmanager
from unittest import mock

import numpy as np
import quantizer_choice
import torch

import fewbit
from fewbit.catalog.quantizers import restore_rotated
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.quantizers.spec import QuantizationRecord

BITS = (1, 2, 4)
GROUP = 256
LATE, COPIES, DRAWS = 200, 16, 4


@contextmanager
def observed(model, observe):
    """Call `observe(kind of tensor, x, saved)` for every copy that a layer of the model makes.

    x is the exact tensor that was quantized, and `saved` is its copy.
    """
    quantize = Quantizer._quantize

    def observing(self, x, dtype, slot=0, normalize=None, *rest, **options):
        saved = quantize(self, x, dtype, slot, normalize, *rest, **options)
        record = QuantizationRecord(
            x.detach(), saved.tensors, saved.spec, self.group_size, normalize
        )
        observe(kind_of_tensor(model, self.name, slot), record.exact(), saved)
        return saved

    with mock.patch.object(Quantizer, "_quantize", observing):
        yield


@contextmanager
def only(model, kind, quantizer, bits):
    """Quantize tensors of one kind with these bits, and all others with 8 bits and uniform copies."""
    quantize = Quantizer._quantize

    def quantizing(self, x, dtype, slot=0, *rest, **options):
        before = self.bits, self.kind
        is_chosen = kind_of_tensor(model, self.name, slot) == kind
        self.bits, self.kind = (bits, quantizer) if is_chosen else (8, "uniform")
        if self.kind == "uniform":
            options.pop("mask", None)
        try:
            return quantize(self, x, dtype, slot, *rest, **options)
        finally:
            self.bits, self.kind = before

    with mock.patch.object(Quantizer, "_quantize", quantizing):
        yield


def kind_of_tensor(model, name, slot):
    """Return the class of the layer, or the name of the function that it calls, and the number of the input."""
    path, _, function = name.partition(":")
    layer = function.partition("#")[0] or type(model.get_submodule(path)).__name__
    return f"{layer} {slot}"


def relative_errors(x, restored):
    """Return error, worst channel and bias of copies.

    Args:
        x: the exact tensor, (rows, channels).
        restored: the copies, (copies, rows, channels).
    """
    errors = restored - x
    energy, count = x.square().sum(), len(restored)
    error = errors.square().sum((1, 2)).mean() / energy
    by_channel = errors.square().sum(1).mean(0) / x.square().sum(0)
    mean = errors.mean(0).square().sum() / energy
    bias = (mean - error / count) * count / (count - 1)
    found = {"error": error, "worst channel": by_channel[x.square().sum(0) > 0].max(), "bias": bias}
    return {name: float(value) for name, value in found.items()}


def channels_last(x, kind):
    """Return the tensor as (rows, channels)."""
    is_by_channel = kind.startswith(("Conv", "BatchNorm", "GroupNorm")) and x.dim() > 2
    return (x.movedim(1, -1) if is_by_channel else x).reshape(
        -1, x.shape[1 if is_by_channel else -1]
    )


def by_library(saved, bits, quantizer, x):
    """Return a copy of x by fewbit's quantizer, in the tensor's shape."""
    if not saved.spec.has_mask or quantizer == "uniform":
        made = Quantizer(bits, kind=quantizer).quantize(x, shared=False)
    else:
        made = Quantizer(bits)._quantize(x, x.dtype, mask=saved.tensors[-1])
    return made.spec.dequantize(made.tensors)


def with_fixed_signs(bits, x):
    """Return a copy of the elements of x, in rows of GROUP elements. All rows have the same signs in every step."""
    rows = x.double().numpy()
    means = rows.mean(1, keepdims=True)
    rows = rows - means
    rows[~rows.any(1), 0] = 1e-30  # a row of zeros has no direction
    signs = np.sign(np.random.default_rng(0).standard_normal((1, GROUP)))
    return torch.from_numpy(means + restore_rotated(rows, bits, signs))


def standardized(x, earlier, bits):
    """Return a copy of x, (rows, channels), whose channels are standardized with the statistics of an earlier tensor.

    Args:
        x: the tensor.
        earlier: the same tensor of another batch, in the same shape.
        bits: the bits per element.
    """
    mean, deviation = earlier.mean(0), earlier.std(0, correction=0)
    deviation = deviation.where(deviation > 0, 1.0)
    saved = Quantizer(bits).quantize((x - mean) / deviation, shared=False)
    return saved.spec.dequantize(saved.tensors) * deviation + mean


def copies_of(kind, x, earlier, saved, copies):
    """Yield (method, bits, relative errors) for a tensor.

    Args:
        kind: the kind of the tensor.
        x: the tensor.
        earlier: the same tensor of another batch.
        saved: the copy that the layer made of x.
        copies: the number of copies to make.
    """
    for bits in BITS:
        for method in ("uniform", "rotated"):
            made = [
                channels_last(by_library(saved, bits, method, x), kind).double()
                for _ in range(copies)
            ]
            exact = channels_last(x, kind).double()
            is_masked = method == "rotated" and saved.spec.has_mask
            yield "masked" if is_masked else method, bits, relative_errors(exact, torch.stack(made))
        exact = channels_last(x, kind).float()
        left = exact - exact.mean(0)
        made = []
        for _ in range(copies):
            saved_left = Quantizer(bits).quantize(left, shared=False)
            made.append(saved_left.spec.dequantize(saved_left.tensors) + exact.mean(0))
        yield "centered", bits, relative_errors(exact.double(), torch.stack(made).double())
        before = channels_last(earlier, kind).float()
        made = torch.stack([standardized(exact, before, bits) for _ in range(copies)])
        yield "standardized", bits, relative_errors(exact.double(), made.double())
        whole = x.numel() // GROUP * GROUP
        if whole:
            rows = x.reshape(-1)[:whole].view(-1, GROUP)
            made = [with_fixed_signs(bits, rows)] * copies
            found = relative_errors(rows.double(), torch.stack(made))
            del found["worst channel"]  # rows of GROUP elements are not rows of channels
            yield "fixed signs", bits, found


def gradient_errors(network, model, batch, kinds, draws):
    """Return {(kind of tensor, method, bits): squared error of the gradient, divided by that of the exact one}."""
    exact = quantizer_choice.gradient(network, model, batch)
    compressed = copy.deepcopy(model)
    fewbit.compress_(compressed, bits=4, verbose=False)
    found = {}
    for kind in kinds:
        for bits in BITS:
            for method in ("uniform", "rotated"):
                with only(compressed, kind, method, bits):
                    errors = quantizer_choice.relative_errors(
                        network, compressed, batch, exact, draws
                    )
                found[kind, method, bits] = statistics.fmean(errors)
    return found


def tensors_of(network, model, batch):
    """Return {kind of tensor: [(x, copy), ...]} of all tensors that layers save for a batch, with copies of 4 bits."""
    model, seen = copy.deepcopy(model), {}
    fewbit.compress_(model, bits=4, verbose=False)
    torch.manual_seed(0)
    with observed(model, lambda kind, x, saved: seen.setdefault(kind, []).append((x, saved))):
        network.loss(model, *batch)
    return seen


def measure(name, network, steps, copies, draws):
    """Yield the rows of a network, early and late in training."""
    for time, _, model in quantizer_choice.early_and_late(network, steps):
        for row in measure_now(network, model, copies, draws):
            yield {"network": name, "time": time, **row}


def measure_now(network, model, copies, draws):
    """Yield the rows of a network with its present parameters."""
    batch = network.batch(10**6)
    seen = tensors_of(network, model, batch)
    earlier = tensors_of(network, model, network.batch(10**6 + 1))
    gradients = gradient_errors(network, model, batch, seen, draws)
    for kind, tensors in seen.items():
        found = defaultdict(list)
        for (x, saved), (before, _) in zip(tensors, earlier[kind], strict=True):
            for method, bits, errors in copies_of(kind, x, before, saved, copies):
                found[method, bits].append(errors)
        for (method, bits), several in found.items():
            means = {key: statistics.fmean(each[key] for each in several) for key in several[0]}
            as_layers = "rotated" if method == "masked" else method
            gradient = gradients.get((kind, as_layers, bits))
            row = {"tensor": kind, "tensors": len(tensors), "method": method, "bits": bits}
            yield {**row, **means, "gradient": gradient}


def line(row):
    numbers = ("error", "worst channel", "bias", "gradient")
    shown = ", ".join(f"{key} {row[key]:.3g}" for key in numbers if row.get(key) is not None)
    return f"{row['network']:27} {row['time']:5} {row['tensor']:30} {row['method']:12} {row['bits']} bits: {shown}"


if __name__ == "__main__":
    settings = LATE, COPIES, DRAWS
    quantizer_choice.run(
        "quantizer_by_tensor", __doc__.splitlines()[0], measure, settings, (3, 2, 1), line
    )
