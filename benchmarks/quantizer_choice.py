"""Measure the gradient error of networks with uniform and rotated copies, at equal bits (docs/decisions/0016).

    python benchmarks/quantizer_choice.py            # about 35 minutes on one core
    python benchmarks/quantizer_choice.py --quick    # few steps and draws, to check that it works

Each network is compressed once with each kind of copies, by `layers={"quantizer": "uniform"}` and so on. Let g be the
exact gradient of all parameters for one batch, and g^ the gradient of the compressed network. The error is the mean of
|g^ - g|^2 / |g|^2 over draws of the random rounding. It is measured at the start of training ("early"), and after 200
steps of exact training ("late"). Copies of both kinds take the same bytes, except for the 8 bytes of the seed, which
uniform copies do not have. Attention has the same bits as the other tensors. Activations have the same bits
too, but at least 3 (ReLU 1), so that their error does not hide that of the copies.

Writes results/quantizer_choice.json: a row for each network, time and number of bits.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
from collections.abc import Callable
from typing import NamedTuple

import digits_resnet
import harness
import super_resolution
import text_classifier
import torch
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss, mse_loss
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import fewbit
from fewbit.demo import text, training

BITS = range(1, 9)
KINDS = ("uniform", "rotated")
WIDTH, LAYERS, HEADS, CONTEXT = 128, 2, 4, 64
LATE, DRAWS = 200, 8


corpus = functools.cache(text.python_topics)


class Network(NamedTuple):
    """A network and its training.

    Attributes:
        build: a function that returns the model, in training mode. The parameters depend on torch's seed.
        batch: a function of the number of a step, which returns the step's (inputs, targets).
        loss: a function of (model, inputs, targets).
        rate: the learning rate of Adam.
    """

    build: Callable
    batch: Callable
    loss: Callable
    rate: float = 1e-3


class UNet(nn.Module):
    """Two levels of convolutions with group norm and SiLU, as in diffusion models. It predicts the noise of images."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.head = nn.Conv2d(1, width, 3, padding=1)
        self.down = _convolutions(width, width)
        self.middle = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, 2, 1), *_convolutions(2 * width, 2 * width)
        )
        self.up = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.tail = nn.Sequential(
            *_convolutions(2 * width, width), nn.Conv2d(width, 1, 3, padding=1)
        )

    def forward(self, x):
        """Return the predicted noise, in the shape of x."""
        first = self.down(self.head(x))
        return self.tail(torch.cat([first, self.up(self.middle(first))], 1))


def _convolutions(inputs, outputs):
    layers = []
    for width in (inputs, outputs):
        layers += [
            nn.Conv2d(width, outputs, 3, padding=1),
            nn.GroupNorm(8, outputs),
            nn.SiLU(),
        ]
    return nn.Sequential(*layers)


def _language_model(config, model):
    def build():
        return model(config)

    def batch(step):
        ids, targets = _characters(step)
        return ids, targets

    def loss(model, ids, targets):
        logits = model(input_ids=ids).logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Network(build, batch, loss)


def _characters(step, size=16, context=CONTEXT):
    generator = torch.Generator().manual_seed(step)
    return corpus().batch(size, context, generator)


def _digits(step):
    images, labels, _, _ = digits_resnet.digits()
    chosen = torch.randint(len(images), (64,), generator=torch.Generator().manual_seed(step))
    return images[chosen], labels[chosen]


def _noisy_digits(step):
    images, _ = _digits(step)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(step + 1))
    return images + noise, noise


def _first_of(task):
    """Return a function of a number, which returns the first batch of a task that is seeded with this number."""
    return lambda step: next(task.batches(torch.Generator().manual_seed(step)))


def _classify(model, inputs, targets):
    logits = model(inputs)
    return cross_entropy(getattr(logits, "logits", logits), targets)


def networks():
    """Return the networks by name."""
    common = {"vocab_size": len(corpus().alphabet)}
    gpt = GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=CONTEXT, **common)
    gpt.resid_pdrop = gpt.embd_pdrop = gpt.attn_pdrop = 0.0
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    llama = LlamaConfig(intermediate_size=344, num_key_value_heads=2, **sizes, **common)
    bert = BertConfig(intermediate_size=4 * WIDTH, **sizes, **common)
    bert.hidden_dropout_prob = bert.attention_probs_dropout_prob = 0.0
    written_out = BertConfig(attn_implementation="eager", **bert.to_dict())
    vit = ViTConfig(
        intermediate_size=4 * WIDTH, image_size=8, patch_size=2, num_channels=1, **sizes
    )
    vit.num_labels, vit.hidden_dropout_prob = 10, 0.0
    vit.attention_probs_dropout_prob = 0.0
    settings = training.Settings()
    return {
        "demo's transformer": Network(
            lambda: training.build(corpus(), settings, nn.GELU, torch.initial_seed()),
            lambda step: _characters(step, settings.batch, settings.context),
            lambda model, ids, targets: cross_entropy(model(ids).flatten(0, 1), targets.flatten()),
        ),
        "GPT-2": _language_model(gpt, GPT2LMHeadModel),
        "Llama": _language_model(llama, LlamaForCausalLM),
        "BERT": _language_model(bert, BertForMaskedLM),
        "BERT, attention written out": _language_model(written_out, BertForMaskedLM),
        "ViT on digits": Network(lambda: ViTForImageClassification(vit), _digits, _classify),
        "ResNet on digits": Network(
            lambda: digits_resnet.build(nn.ReLU, torch.initial_seed()), _digits, _classify
        ),
        "U-Net on digits": Network(
            UNet, _noisy_digits, lambda model, x, noise: mse_loss(model(x), noise)
        ),
        "text classifier": Network(
            text_classifier.TextClassifier,
            _first_of(text_classifier),
            _classify,
            text_classifier.LEARNING_RATE,
        ),
        "super-resolution": Network(
            super_resolution.SuperResolution,
            _first_of(super_resolution),
            lambda m, x, y: l1_loss(m(x), y),
        ),
    }


def gradient(network, model, batch):
    """Return the gradient of all parameters for a batch, as one float64 vector."""
    model.zero_grad()
    network.loss(model, *batch).backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def relative_errors(network, compressed, batch, exact, draws):
    """Return the squared error of each draw of a compressed gradient, divided by the square of the exact one's norm."""
    found = []
    for draw in range(draws):
        torch.manual_seed(draw)
        error = gradient(network, compressed, batch) - exact
        found.append((error.square().sum() / exact.square().sum()).item())
    return found


def trained(network, steps):
    """Train a network exactly. Yield (number of steps done, model) after 0 to `steps` steps."""
    torch.manual_seed(0)
    model = network.build().train()
    optimizer = torch.optim.Adam(model.parameters(), network.rate)
    for step in range(steps):
        yield step, model
        optimizer.zero_grad()
        network.loss(model, *network.batch(step)).backward()
        optimizer.step()
    yield steps, model


def errors(network, model, batch, draws):
    """Yield a row for each number of bits, with the error of each kind of copies and its standard error."""
    exact = gradient(network, model, batch)
    for bits in BITS:
        row = {"bits": bits}
        for kind in KINDS:
            compressed = copy.deepcopy(model)
            layers = {
                "quantizer": kind,
                "attention_bits": bits,
                "activation_bits": max(3, bits),
            }
            fewbit.compress_(compressed, bits=bits, layers=layers, verbose=False)
            found = relative_errors(network, compressed, batch, exact, draws)
            row[kind] = statistics.fmean(found)
            row[f"{kind} ±"] = statistics.stdev(found) / len(found) ** 0.5
        row["ratio"] = row["uniform"] / row["rotated"]
        yield row


def early_and_late(network, steps):
    """Train a network exactly. Yield ("early", 1, model) after one step, and ("late", steps, model) at the end."""
    times = {1: "early", steps: "late"}
    for step, model in trained(network, steps):
        if step in times:
            yield times[step], step, model


def measure(name, network, steps, draws):
    """Yield the rows of a network, early and late in training."""
    for time, step, model in early_and_late(network, steps):
        for row in errors(network, model, network.batch(10**6), draws):
            yield {"network": name, "time": time, "step": step, **row}


def run(name, description, measure, settings, quick_settings, line):
    """Measure all networks, or the one that the command line names. Print each row, and save the rows of full runs.

    Args:
        name: the name of the results.
        description: the first line of the help text.
        measure: a function of (name of a network, network, *settings), which yields rows.
        settings: the settings of a full run.
        quick_settings: the settings with the option --quick.
        line: a function that returns a row as a line of text.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", help="a network")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    about, rows = harness.machine("torch", "transformers"), []
    print(about)
    for network_name, network in networks().items():
        if arguments.only in (None, network_name):
            chosen = quick_settings if arguments.quick else settings
            for row in measure(network_name, network, *chosen):
                rows.append(row)
                print(line(row), flush=True)
    if not (arguments.quick or arguments.only):
        harness.save(name, about, rows)


def line(row):
    return (
        f"{row['network']:27} {row['time']:5} {row['bits']} bits: uniform {row['uniform']:.3g} "
        f"± {row['uniform ±']:.1g}, rotated {row['rotated']:.3g} ± {row['rotated ±']:.1g}, "
        f"ratio {row['ratio']:.2f}"
    )


if __name__ == "__main__":
    run("quantizer_choice", __doc__.splitlines()[0], measure, (LATE, DRAWS), (3, 2), line)
