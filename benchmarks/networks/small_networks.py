"""Small networks with random weights, and their training on characters, digits and photographs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from networks import digits_resnet, super_resolution, text_classifier
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

from fewbit.demo import text, training

WIDTH, LAYERS, HEADS, CONTEXT = 128, 2, 4, 64


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
    settings = training.TrainingSettings()
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
