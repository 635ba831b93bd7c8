"""ActNN's levels of compression: saved bytes and the variance of the gradient.

    python benchmarks/study.py levels            # a quarter of an hour on 2 cores
    python benchmarks/study.py levels --quick    # one seed and few steps, to check that it works

The networks are the demo's transformer and a ResNet for 8 by 8 digits, after exact training. In L2 the bits follow from a rule;
in L2.5 the samples of a tensor share its bits; in L3 all tensors of the model share them too, and the bits are adapted on other
batches first. "Numbered" is L3 where the training loop says which digits a batch has.

For appendix E of "Few-bit Backward" (ICML 2023), the ResNet has GELU. At level L3, GELU saves the codes of a few-bit table
("tables"), its input quantized ("quantized"), or nothing, because it uses the copy that the norm before it saves ("shared").

The variance of a gradient g^ is half the mean of |g^ - g^'|^2 over pairs of draws, and its error is the mean of |g^ - g|^2, both over
|g|^2 with the exact gradient g. Rows of "batches" have the variance of g from batch to batch.

Writes results/levels.json with a row for each network, seed, method and number of bits, and levels_summary.* with means over seeds.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from itertools import islice

import harness
import torch
from networks import digits_resnet
from studies import compressed_training
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import fewbit
from fewbit.convert.function_mode import FunctionMode
from fewbit.demo import text, training
from fewbit.runtime.quantizers import copies
from fewbit.runtime.saved.context import measuring
from fewbit.runtime.saved.saving_function import SavingFunction

WHOLE, ALL = (1, 2, 3, 4), (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4)
LEVELS = {"L2": WHOLE, "L2.5": ALL, "L3": ALL}
METHODS = {
    "transformer": LEVELS,
    "resnet": LEVELS | {"L3, numbered": ALL},
    "gelu resnet": {"tables": WHOLE, "quantized": WHOLE, "shared": WHOLE},
}
"""{network: {method: average bits}}."""
SEEDS, STEPS, PAIRS = 3, 300, 16
ADAPTATION_STEPS, NUMBERED_STEPS = 40, 70
"""Steps on other batches before the measurement. 70 are three epochs of digits."""


def build(network, seed, steps):
    """Return a network with the initial weights of a seed."""
    if network == "gelu resnet":
        return digits_resnet.build(nn.GELU, seed)
    return compressed_training.build(network, seed, training.TrainingSettings(steps=steps))


def batches(network, seed):
    """Yield batches (inputs, labels) of training steps without end."""
    generator = torch.Generator().manual_seed(seed)
    settings = training.TrainingSettings()
    while network == "transformer":
        yield text.python_topics().batch(settings.batch, settings.context, generator)
    yield from digits_resnet.endless_batches(generator)


def compress(model, method, bits):
    """Compress a model by a method of METHODS."""
    quiet = partial(fewbit.compress_, model, verbose=False)
    if method in ("L2", "L2.5"):
        return quiet(fewbit.Level(method, bits))
    if method == "tables":
        return quiet(fewbit.AdaptiveBits(bits), layers={"activation_bits": bits})
    if method in ("quantized", "shared"):
        controller = quiet(fewbit.AdaptiveBits(bits), exclude=is_gelu)
        return quantize_activations(controller, method == "shared")
    controller = quiet(fewbit.AdaptiveBits(bits))
    return number_digits(controller) if "numbered" in method else controller


def number_digits(controller):
    """Pass the numbers of a batch's digits to the controller before each forward pass. Digits are recognized by their pixels."""
    numbers = {image.numpy().tobytes(): n for n, image in enumerate(digits_resnet.digits()[0])}

    def tell(model, inputs):
        if model.training:
            controller.number_samples([numbers[image.numpy().tobytes()] for image in inputs[0]])

    controller.model.register_forward_pre_hook(tell, prepend=True)


def is_gelu(path: str, module: nn.Module) -> bool:
    """Return whether the module is torch's GELU."""
    return type(module) is nn.GELU


class _QuantizedGELUFunction(SavingFunction):
    @staticmethod
    def forward(ctx, x, quantizer, shared):
        return copies.keep(ctx, gelu(x), x=quantizer.quantize(x, shared))

    @staticmethod
    def backward(ctx, grad):
        x = copies.Kept(ctx).values("x", grad.dtype)
        return torch.ops.aten.gelu_backward(grad, x), None, None


class QuantizedGELU(nn.GELU):
    """A GELU that saves its input quantized, or uses the copy that the norm before it has of the same tensor."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        return _QuantizedGELUFunction.call(x, self.quantizer, self.shared)


def quantize_activations(controller, shared: bool) -> None:
    """Make the GELUs of a compressed model, which `compress_` has left out, save their inputs quantized."""
    mode = next(each for each in controller.context.contexts if isinstance(each, FunctionMode))
    for path, module in controller.model.named_modules():
        if is_gelu(path, module):
            module.__class__ = QuantizedGELU
            module.quantizer = mode.settings.quantizer.copy_for(path)
            module.shared = shared


def gradient(model, inputs, labels):
    """Return the gradient of all parameters as one float64 vector."""
    model.zero_grad()
    cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()]).double()


def spread(draw, exact, pairs):
    """Return {"variance", "error"} of random gradients, as means over pairs of draws."""
    variances, errors = [], []
    for _ in range(pairs):
        a, b = draw(), draw()
        variances.append((a - b).square().sum() / 2)
        errors.append(((a - exact).square().sum() + (b - exact).square().sum()) / 2)
    size = exact.square().sum()
    return {
        "variance": float(sum(variances) / pairs / size),
        "error": float(sum(errors) / pairs / size),
    }


def run(network, seed, quick):
    """Train a network exactly, and return {"found": [a row for each method and number of bits]}."""
    torch.set_num_threads(1)
    steps, pairs = (20, 2) if quick else (STEPS, PAIRS)
    trained = build(network, seed, steps)
    kind = "transformer" if network == "transformer" else "resnet"
    compressed_training.train(kind, trained, seed, training.TrainingSettings(steps=steps))
    batch = next(batches(network, 1000 + seed))
    exact = gradient(trained, *batch)
    others = batches(network, 2000 + seed)
    sampled = spread(lambda: gradient(trained, *next(others)), exact, pairs)
    found = [{"method": "batches", "bits": 0, "saved_bytes": None, **sampled}]
    for method, all_bits in METHODS[network].items():
        for bits in (2,) if quick else all_bits:
            model = build(network, seed, steps)
            model.load_state_dict(trained.state_dict())
            compress(model, method, bits)
            torch.manual_seed(seed)
            count = NUMBERED_STEPS if "numbered" in method else ADAPTATION_STEPS
            for other in islice(batches(network, 3000 + seed), 0 if method[:2] == "L2" else count):
                gradient(model, *other)
            saved = fewbit.saved_bytes(model, batch[0]).total
            draw = partial(gradient, model, *batch)
            if "numbered" in method:  # the gradients of samples take effect only in training steps
                row = spread(draw, exact, pairs)
            else:
                with measuring():
                    row = spread(draw, exact, pairs)
            assert row["error"] < 10, (network, method, bits, row)
            found.append({"method": method, "bits": bits, "saved_bytes": saved, **row})
    return {"found": found}


def summary(rows):
    """Yield a row for each network, method and number of bits, with means over seeds."""
    grouped = {}
    for row in rows:
        grouped.setdefault((row["network"], row["method"], row["bits"]), []).append(row)
    for (network, method, bits), own in grouped.items():
        yield {
            "network": network,
            "method": method,
            "bits": bits,
            "seeds": len(own),
            "saved_bytes": own[0]["saved_bytes"],
            **{n: statistics.fmean(row[n] for row in own) for n in ("variance", "error")},
        }


def main():
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    options = parser.parse_args()
    name = "levels" + "_quick" * options.quick
    about = harness.machine("torch", "scikit-learn") | {"fewbit": fewbit.__version__}
    seeds = range(1 if options.quick else SEEDS)
    tasks = [{"network": network, "seed": seed} for seed in seeds for network in METHODS]
    runs = harness.run_missing(name, about, run, tasks, options.jobs, options.quick)
    rows = [
        {"network": each["network"], "seed": each["seed"], **row}
        for each in runs
        for row in each["found"]
    ]
    records = list(summary(rows))
    harness.save(name + "_summary", about, records)
    for row in records:
        print(
            ", ".join(
                f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()
            )
        )
