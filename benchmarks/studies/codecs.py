"""Codecs on real activations: compression, time relative to a memory copy, and error relative to the bound.

    python benchmarks/study.py codecs                 # under 3 minutes on 2 cores
    python benchmarks/study.py codecs --quick         # less training, one repeat

The digits ResNet (networks/digits_resnet.py) and the demo's transformer are trained for a while. Then tensors of one forward are
compressed: the inputs of convolutions, linear layers, norms and GELUs, and the outputs of ReLUs. Each tensor is
compressed with three bounds, for which `quant` needs 2, 4 and 6 bits. A bound limits the mean squared error; for
error-bounded codecs the root of the bound limits every element's error.

The numbers of a row are those of all tensors of one kind together. "compression" is their bytes divided by the bytes
of their payloads. Times are divided by the time of a memory copy of the tensors, in the same run on one thread.
"error" is the mean squared error divided by the bound, averaged over tensors. "worst" is its maximum over tensors.
"largest error" is the largest error of an element divided by the root of the bound.

Two other codecs of imagecodecs, the library that `error-bounded` uses, are measured for comparison. "zfp" is ZFP in
fixed-accuracy mode. "grid + zstd" rounds to multiples of twice the root of the bound, stores these as 8-bit or 16-bit
integers, and compresses them by Zstandard at level 1.

Writes results/codecs.json and prints a summary.
"""

from __future__ import annotations

import argparse
import statistics
import time

import harness
import numpy as np
import torch
from networks import digits_resnet
from torch import nn
from torch.nn.functional import cross_entropy

from fewbit.demo import text, training
from fewbit.runtime.codecs import CODECS
from fewbit.runtime.codecs.payload import Exact

BITS = (2, 4, 6)
GROUP = 256
IMAGES = 512  # in the forward whose tensors are compressed
INPUTS = {"convolution": nn.Conv2d, "linear": nn.Linear, "batch norm": nn.BatchNorm2d}
INPUTS |= {"layer norm": nn.LayerNorm, "GELU": nn.GELU}


def activations(quick):
    """Train both networks. Return a list of (network, kind, tensor), in which each tensor occurs once."""
    torch.manual_seed(0)
    resnet = digits_resnet.build(nn.ReLU, 0)
    optimizer = torch.optim.AdamW(resnet.parameters(), digits_resnet.LEARNING_RATE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(1 if quick else 4):
        for images, labels in digits_resnet.batches(generator):
            loss = cross_entropy(resnet(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = seen("ResNet", resnet, digits_resnet.digits()[0][:IMAGES])
    corpus = text.python_topics()
    settings = training.TrainingSettings()
    model = training.build(corpus, settings, nn.GELU, 0)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate / 3)
    for _ in range(10 if quick else 150):
        batch = corpus.batch(settings.batch, settings.context, generator)
        loss = training.loss(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    batch, _ = corpus.batch(settings.batch, settings.context, generator)
    return found + seen("transformer", model, batch)


def seen(network, model, batch):
    result, known = [], set()

    def hook(kind, takes_input):
        def note(module, inputs, output):
            tensor = (inputs[0] if takes_input else output).detach()
            if tensor.data_ptr() not in known and tensor.numel() > 10_000:
                known.add(tensor.data_ptr())
                result.append((network, kind, tensor))

        return note

    for module in model.modules():
        if isinstance(module, nn.ReLU):  # before the convolutions that get the same tensor
            module.register_forward_hook(hook("ReLU's output", False))
        for kind, each in INPUTS.items():
            if isinstance(module, each):
                module.register_forward_hook(hook(kind, True))
    model(batch)
    return result


def bound_of(x, bits):
    """Return a bound on the mean squared error of x, slightly above what `quant` guarantees with these bits."""
    rows = x.reshape(len(x), -1) if x[0].numel() >= GROUP else x.reshape(1, -1)
    cut = [each for each in rows.split(GROUP, 1)]
    total = sum(((each.amax(1) - each.amin(1)) ** 2).sum().item() * each.shape[1] for each in cut)
    return 1.04 * total / x.numel() / 4 / (2**bits - 1) ** 2


class Zfp:
    """ZFP with fixed accuracy, in two or three dimensions, as blocks across samples and channels compress less."""

    def compress(self, x, bound):
        import imagecodecs

        data = imagecodecs.zfp_encode(
            x.reshape(-1, *x.shape[-2:]).squeeze(0).numpy(),
            mode=imagecodecs.ZFP.MODE.FIXED_ACCURACY,
            level=bound**0.5,
        )
        return data, x.shape

    def decompress(self, payload):
        import imagecodecs

        data, shape = payload
        return torch.from_numpy(imagecodecs.zfp_decode(data)).reshape(shape)


class Grid:
    """Rounding to the nearest multiple of a step, then Zstandard."""

    def compress(self, x, bound):
        import imagecodecs

        step = 2 * bound**0.5 * (1 - 2.0**-10)
        codes = (x / step).round()
        dtype = np.int8 if codes.abs().max() < 128 else np.int16
        return imagecodecs.zstd_encode(codes.numpy().astype(dtype).tobytes(), 1), (
            x.shape,
            step,
            dtype,
        )

    def decompress(self, payload):
        import imagecodecs

        data, (shape, step, dtype) = payload
        codes = np.frombuffer(imagecodecs.zstd_decode(data), dtype).astype(np.float32)
        return torch.from_numpy(codes).reshape(shape) * step


OTHERS = {"zfp": Zfp(), "grid + zstd": Grid()}
HARD = ("error-bounded", *OTHERS)


def measure(name, x, bound, repeats):
    """Compress a tensor with one codec. Return its bytes, errors and times."""
    codec = CODECS.get(name) or OTHERS[name]
    payload = codec.compress(x, bound)
    values = codec.decompress(payload)
    errors = (values.double() - x.double()).square()
    worst = float(errors.max() / bound)
    assert name not in HARD or worst <= 1, f"{name}: {worst} of the bound"
    error = float(errors.mean() / bound)
    assert error <= 1.02, f"{name}: {error} of the bound in the mean"
    return {
        "bytes": payload.nbytes if name in CODECS else len(payload[0]),
        "is_exact": name in CODECS and isinstance(payload.spec, Exact),
        "error": error,
        "largest": worst**0.5,
        "compress": median(lambda: codec.compress(x, bound), repeats),
        "decompress": median(lambda: codec.decompress(payload), repeats),
    }


def median(call, repeats):
    return statistics.median(harness.seconds(call, repeats, warm=False))


def rows_of(found, repeats):
    """Yield a row for each network, kind, number of bits and codec."""
    groups = {}
    for network, kind, x in found:
        groups.setdefault((network, kind), []).append(x)
    for (network, kind), tensors in groups.items():
        size = sum(each.nbytes for each in tensors)
        # Each copy gets new memory, because codecs allocate new memory too.
        copy = sum(median(lambda x=x: x.clone(), 4 * repeats) for x in tensors)
        zeros = sum(int((each == 0).sum()) for each in tensors) * 4 / size
        for bits in BITS:
            for name in (*CODECS, *OTHERS):
                if name == "jpeg" and tensors[0].dim() != 4:
                    continue
                each = [measure(name, x, bound_of(x, bits), repeats) for x in tensors]
                yield {
                    "network": network,
                    "kind": kind,
                    "tensors": len(tensors),
                    "elements": size // 4,
                    "zeros": round(zeros, 4),
                    "bits": bits,
                    "codec": name,
                    "compression": round(size / sum(row["bytes"] for row in each), 3),
                    "exact": sum(row["is_exact"] for row in each),
                    "error": round(statistics.fmean(row["error"] for row in each), 4),
                    "worst": round(max(row["error"] for row in each), 4),
                    "largest_error": round(max(row["largest"] for row in each), 4),
                    "compress_over_copy": round(sum(row["compress"] for row in each) / copy, 2),
                    "decompress_over_copy": round(sum(row["decompress"] for row in each) / copy, 2),
                    "compress_ns": round(sum(row["compress"] for row in each) / size * 4e9, 3),
                    "decompress_ns": round(sum(row["decompress"] for row in each) / size * 4e9, 3),
                }


def show(rows):
    print(
        f"{'':34s}{'bits':>5s}  compression, compress and decompress over a copy, error over bound"
    )
    for row in rows:
        where = f"{row['network']}, {row['kind']}"
        times = f"{row['compress_over_copy']:7.1f} {row['decompress_over_copy']:7.1f}"
        print(
            f"{where:34s}{row['bits']:5d}  {row['codec']:14s}{row['compression']:7.2f} {times} {row['error']:6.2f}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    found = activations(arguments.quick)
    print(f"{len(found)} tensors after {time.perf_counter() - start:.0f} s")
    with torch.no_grad():
        rows = list(rows_of(found, 1 if arguments.quick else 5))
    show(rows)
    if not arguments.quick:
        harness.save("codecs", harness.machine("torch", "numpy", "imagecodecs"), rows)
    print(f"{time.perf_counter() - start:.0f} s")
