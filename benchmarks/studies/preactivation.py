"""The memory of pre-activation networks by depth, and their gradient errors beside the noise of SGD (the paper BLPA).

    python benchmarks/study.py preactivation [--quick | --plot]

- results/preactivation_memory.json: the bytes that pre-activation ResNets of several depths save in a forward
  of 32 by 32 images, with several numbers of bits. For comparison: the bytes by a formula (K bits per element and a
  standard deviation per channel), those of torch's own network, and those of a network that saves one exact tensor per
  block. Also docs/images/preactivation_memory.png.
- results/preactivation_noise.json: for the weight of each convolution, the squared error of the gradient with
  K bits, and the variance of the exact gradient between batches (figure 2, right). They are measured at the start and
  at the end of training on scikit-learn's digits. Also preactivation_noise_summary.json, with ratios of the two, and
  docs/images/preactivation_noise.png.

With --quick, there are fewer depths, a network of 29 layers and two epochs, and all files go to a folder that is
printed. The full run takes some minutes, nearly all of it for training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path

import harness
import torch
from networks import digits_resnet
from studies.parts import preactivation_plots as plots
from torch import nn
from torch.nn.functional import cross_entropy

import fewbit
from fewbit.models.preactivation_resnet import DEPTHS, PreActivationBlock, PreActivationResNet
from fewbit.runtime.format.encoding import packed_words

BITS = (8, 4, 2)
NOISE_BITS = (8, 4)
BATCHES = 16


class OneTensor(torch.autograd.Function):
    """The paper's baseline: ReLU of a batch norm, which saves only the normalized input, in float32."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, mean, rstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        shape = 1, -1, 1, 1
        ctx.save_for_backward((x - mean.view(shape)) * rstd.view(shape), rstd, weight, bias)
        return y.relu_()

    @staticmethod
    def backward(ctx, grad):
        x, rstd, weight, bias = ctx.saved_tensors
        shape, dims = (1, -1, 1, 1), (0, 2, 3)
        grad = grad * (x * weight.view(shape) + bias.view(shape) > 0)
        g = grad * weight.view(shape)
        centered = g - g.mean(dims, keepdim=True) - x * (x * g).mean(dims, keepdim=True)
        return centered * rstd.view(shape), (grad * x).sum(dims), grad.sum(dims), None


class OneTensorConvolution(torch.autograd.Function):
    """A convolution of the result of `OneTensor`. It recomputes its input from the tensor that is saved there."""

    @staticmethod
    def forward(ctx, y, kept, weight, norm, convolution):
        ctx.settings = convolution.stride, convolution.padding, convolution.dilation
        ctx.save_for_backward(kept, weight, norm.weight, norm.bias)
        return nn.functional.conv2d(y, weight, None, *ctx.settings)

    @staticmethod
    def backward(ctx, grad):
        x, weight, gamma, beta = ctx.saved_tensors
        shape = 1, -1, 1, 1
        y = (x * gamma.view(shape) + beta.view(shape)).relu_()
        rest = *ctx.settings, False, (0, 0), 1, (True, True, False)
        grad_y, grad_weight, _ = torch.ops.aten.convolution_backward(grad, y, weight, None, *rest)
        return grad_y, None, grad_weight, None, None


class OneTensorBlock(PreActivationBlock):
    """An exact block in which `OneTensor` and `OneTensorConvolution` save the same tensor."""

    def forward(self, input):
        norm = self.norm
        y = OneTensor.apply(input, norm.weight, norm.bias, norm.eps)
        kept = y.grad_fn.saved_tensors[0]
        return OneTensorConvolution.apply(y, kept, self.linear.weight, norm, self.linear)


def kept(network, x) -> int:
    return fewbit.saved_bytes(network, x).total


def elements(network, x) -> tuple[list[int], int]:
    """Return (list of the number of elements of each block's input, sum of these inputs' channels)."""
    sizes, hooks = [], []
    for module in network.modules():
        if isinstance(module, PreActivationBlock | fewbit.nn.PreActivation):
            hook = module.register_forward_pre_hook(
                lambda _, inputs: sizes.append((inputs[0].numel(), inputs[0].shape[1]))
            )
            hooks.append(hook)
    with torch.no_grad():
        network(x)
    for hook in hooks:
        hook.remove()
    return [n for n, _ in sizes], sum(channels for _, channels in sizes)


def memory(depths):
    """Return a row for each depth and kind of block.

    In a row, "bytes" are those of the whole network, "of_blocks" those of the blocks as counted, and "formula" those of
    the blocks by the formula.
    """
    rows, x = [], torch.randn(2, 3, 32, 32)
    for depth in depths:
        torch.manual_seed(0)
        sizes, channels = elements(PreActivationResNet(depth), x)

        def row(kind, bits, network, formula, depth=depth):
            total = kept(network, x)
            of_blocks = sum(
                entry.bytes
                for entry in fewbit.saved_bytes(network, x).kept
                if entry.module.startswith("stages")
            )
            rows.append(
                {
                    "depth": depth,
                    "kind": kind,
                    "bits": bits,
                    "bytes": total,
                    "of_blocks": of_blocks,
                    "formula": formula,
                }
            )
            print(f"{depth:5} {kind:12} {bits:2} bits  {total / 2**20:8.2f} MiB", flush=True)
            return of_blocks

        row("torch", 32, PreActivationResNet(depth), None)
        one = 4 * sum(sizes) + 4 * channels
        exact = row("one tensor", 32, PreActivationResNet(depth, block=OneTensorBlock), one)
        assert exact == one, (exact, one)
        for bits in BITS:
            formula = 4 * sum(packed_words(n, bits) for n in sizes) + 4 * channels
            network = PreActivationResNet(depth, block=partial(fewbit.nn.PreActivation, bits=bits))
            assert row("PreActivation", bits, network, formula) == formula
            network = PreActivationResNet(depth)
            fewbit.compress_(network, bits=fewbit.PreActivationBits(bits), verbose=False)
            row("compress_", bits, network, formula)
    return rows


def gradients(network, batch) -> dict[str, torch.Tensor]:
    """Return {name: gradient} for the weights of convolutions."""
    images, labels = batch
    network.zero_grad()
    cross_entropy(network(images), labels).backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in network.named_parameters()
        if parameter.dim() == 4
    }


def noise(network, batches, moment):
    """Return a row for each convolution and number of bits, with means over batches and elements of the weight.

    `moment` is "start" or "end". Each forward changes the running statistics, but no gradient depends on them.
    """
    exact = [gradients(network, batch) for batch in batches]
    rows = []
    for bits in NOISE_BITS:
        fewbit.compress_(network, bits=fewbit.PreActivationBits(bits), verbose=False)
        ours = [gradients(network, batch) for batch in batches]
        fewbit.restore_(network)
        for layer, name in enumerate(exact[0]):
            values = torch.stack([each[name] for each in exact]).double()
            error = torch.stack([each[name] for each in ours]).double() - values
            variance, squares = values.var(0).mean().item(), error.square().mean().item()
            rows.append(
                {
                    "moment": moment,
                    "bits": bits,
                    "layer": layer,
                    "name": name,
                    "error": squares,
                    "variance": variance,
                    "ratio": variance / squares,
                }
            )
    return rows


def summary(rows):
    result = []
    for key in dict.fromkeys((row["moment"], row["bits"]) for row in rows):
        # The stem is left out: it is not a block, so its input is rounded at random, and the paper does not compress
        # it.
        ratios = [
            row["ratio"]
            for row in rows
            if (row["moment"], row["bits"]) == key and row["name"] != "stem.weight"
        ]
        quantiles = statistics.quantiles(ratios, n=20)
        result.append(
            {
                "moment": key[0],
                "bits": key[1],
                "layers": len(ratios),
                "least": min(ratios),
                "of_5_percent": quantiles[0],
                "median": statistics.median(ratios),
                "greatest": max(ratios),
                "above_10": sum(ratio >= 10 for ratio in ratios) / len(ratios),
            }
        )
        print(
            f"{key[0]:6} {key[1]} bits: variance over squared error {min(ratios):.3g} .. "
            f"{max(ratios):.3g}, median {statistics.median(ratios):.3g}",
            flush=True,
        )
    return result


def train(network, epochs):
    """Train with SGD as in the paper's section 4 (momentum 0.9, weight decay 2e-4, warm-up, cosine), but shorter."""
    steps = max(1, epochs * (len(digits_resnet.digits()[1]) // digits_resnet.BATCH))
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, weight_decay=2e-4)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=max(1, steps // 20))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    for epoch in range(epochs):
        losses = []
        for images, labels in digits_resnet.batches(generator):
            optimizer.zero_grad()
            loss = cross_entropy(network(images), labels)
            loss.backward()
            optimizer.step()
            warm.step()
            cosine.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {statistics.mean(losses):.4f}", flush=True)


def _stored(name) -> list[dict]:
    return json.loads((harness.RESULTS / f"{name}.json").read_text())["rows"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="seconds in place of minutes")
    parser.add_argument("--only", choices=("memory", "noise"), help="one of the two parts")
    parser.add_argument("--plot", action="store_true", help="draw what is measured already")
    options = parser.parse_args()
    images = harness.IMAGES
    if options.plot:
        plots.memory(_stored("preactivation_memory"), images / "preactivation_memory.png")
        plots.noise(_stored("preactivation_noise"), images / "preactivation_noise.png")
        return
    if options.quick:
        harness.RESULTS = images = Path(tempfile.mkdtemp())
        print(f"results in {images}")
    about = harness.machine("torch")
    if options.only != "noise":
        rows = memory((29, 56) if options.quick else DEPTHS)
        harness.save("preactivation_memory", about, rows)
        plots.memory(rows, images / "preactivation_memory.png")
    if options.only != "memory":
        torch.manual_seed(0)
        depth, epochs, count = (29, 2, 4) if options.quick else (164, 15, BATCHES)
        network = PreActivationResNet(depth, channels=1)
        batches = list(digits_resnet.batches(torch.Generator().manual_seed(1)))[:count]
        rows = noise(network, batches, "start")
        train(network, epochs)
        rows += noise(network, batches, "end")
        about |= {"depth": depth, "epochs": epochs, "batches": len(batches)}
        harness.save("preactivation_noise", about, rows)
        harness.save("preactivation_noise_summary", about, summary(rows))
        plots.noise(rows, images / "preactivation_noise.png")
