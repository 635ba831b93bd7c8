"""The small networks of studies/compiled.py, with random weights, and their losses and batches of characters and digits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from networks import digits_resnet
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint
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
from fewbit.compiler.compiling import _aot_eager
from fewbit.demo import text
from fewbit.models.efficientnet import MBConv, _unit
from fewbit.models.resnet import BasicBlock

WIDTH, LAYERS, HEADS, BATCH, LENGTH, VOCABULARY = 128, 2, 4, 16, 64, 256
STEPS = 32
"""The number of tokens of recurrences, whose loops torch.compile unrolls."""


corpus = functools.cache(text.python_topics)


class Network(NamedTuple):
    """A network and its training.

    Attributes:
        build: a function that returns the model, in training mode. The parameters depend on torch's seed.
        batch: a function of the number of a step, which returns the step's (inputs, targets).
        loss: a function of (model, inputs, targets).
    """

    build: Callable
    batch: Callable
    loss: Callable


class Block(nn.Module):
    """A block of GPT-2 that calls F.gelu and F.scaled_dot_product_attention."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Return the block's result, in the shape of x."""
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class EinsumBlock(nn.Module):
    """Attention that is written with einsum, and a gate."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Parameter(torch.randn(3, width, width) / width**0.5)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        y = torch.einsum("ntd,kde->knte", self.norm(x), self.qkv)
        q, k, v = y.unflatten(-1, (self.heads, -1))
        scores = torch.einsum("nqhd,nkhd->nhqk", q, k) / q.shape[-1] ** 0.5
        mixed = torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1), v).flatten(2)
        return x + self.out(mixed * torch.sigmoid(y[0]))


class Experts(nn.Module):
    """A mixture of 4 experts, of which each token uses the best 2 of its router."""

    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x):
        """Return the block's result, in the shape of x."""
        inputs = self.norm(x)
        weights, chosen = self.router(inputs).softmax(-1).topk(2, -1)
        for number, expert in enumerate(self.experts):
            x = x + expert(inputs) * (weights * (chosen == number)).sum(-1, keepdim=True)
        return x


class LSTM(nn.Module):
    """An LSTM that is written out as a loop."""

    def __init__(self):
        super().__init__()
        self.inputs, self.states = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x):
        """Return the states at all times, in the shape of x."""
        inputs, found = self.inputs(x), []
        state = cell = torch.zeros_like(x[:, 0])
        for time in range(x.shape[1]):
            gates = (inputs[:, time] + self.states(state)).chunk(4, -1)
            enter, forget, leave = (torch.sigmoid(gate) for gate in gates[:3])
            cell = forget * cell + enter * torch.tanh(gates[3])
            state = leave * torch.tanh(cell)
            found.append(state)
        return torch.stack(found, 1)


class Scan(nn.Module):
    """A selective state-space scan as in Mamba, with 8 states for each channel."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.gate = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.step, self.matrices = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16)
        self.rates = nn.Parameter(torch.arange(1.0, 9.0).log().repeat(WIDTH, 1))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        """Return the block's result, in the shape of x."""
        y = self.norm(x)
        u, step = F.silu(self.inner(y)), F.softplus(self.step(y))
        enter, leave = self.matrices(y).chunk(2, -1)
        decay = torch.exp(-step[..., None] * self.rates.exp())
        added = (step * u)[..., None] * enter[:, :, None]
        state, found = torch.zeros_like(added[:, 0]), []
        for time in range(x.shape[1]):
            state = decay[:, time] * state + added[:, time]
            found.append((state * leave[:, time, None]).sum(-1))
        return x + self.out(torch.stack(found, 1) * F.silu(self.gate(y)))


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


def _of_blocks(block, length=LENGTH, count=2) -> Network:
    def build():
        blocks = [block() for _ in range(count)]
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))

    def batch(step):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCABULARY, (BATCH, length + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def loss(model, ids, targets):
        return cross_entropy(model(ids).flatten(0, 1), targets.flatten())

    return Network(build, batch, loss)


def of_blocks(count: int) -> Network:
    """Return a GPT-2 of some blocks."""
    return _of_blocks(Block, count=count)


def inverted_bottleneck(channels=32, width=192):
    """Return a block of MobileNetV2."""
    relu6 = nn.ReLU6
    return Residual(
        _unit(channels, width, 1, activation=relu6),
        _unit(width, width, 3, groups=width, activation=relu6),
        _unit(width, channels, 1),
    )


class Residual(nn.Sequential):
    """Layers with a shortcut around them."""

    def forward(self, x):
        """Return x + the layers' result."""
        return x + super().forward(x)


def convolutional() -> dict:
    """Return {name: (function that builds blocks of the network, shape of their input)}."""

    def efficient():
        return MBConv(40, 40, 6, 5, 1, 0.0, nn.SiLU, {})

    return {
        "ResNet, 2 blocks": (
            lambda: nn.Sequential(*(BasicBlock(64, 64, 1, nn.ReLU) for _ in range(2))),
            (8, 64, 32, 32),
        ),
        "MobileNetV2, 2 blocks": (
            lambda: nn.Sequential(*(inverted_bottleneck() for _ in range(2))),
            (16, 32, 28, 28),
        ),
        "EfficientNet, 2 blocks": (
            lambda: nn.Sequential(*(efficient() for _ in range(2))),
            (16, 40, 28, 28),
        ),
    }


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


def _characters(step):
    generator = torch.Generator().manual_seed(step)
    return corpus().batch(BATCH, LENGTH, generator)


def _digits(step):
    images, labels, _, _ = digits_resnet.digits()
    chosen = torch.randint(len(images), (64,), generator=torch.Generator().manual_seed(step))
    return images[chosen], labels[chosen]


def _noisy_digits(step):
    images, _ = _digits(step)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(step + 1))
    return images + noise, noise


def _classify(model, inputs, targets):
    logits = model(inputs)
    return cross_entropy(getattr(logits, "logits", logits), targets)


def networks() -> dict[str, Network]:
    """Return the networks by name."""
    common = {"vocab_size": len(corpus().alphabet)}
    gpt = GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=LENGTH, **common)
    gpt.resid_pdrop = gpt.embd_pdrop = gpt.attn_pdrop = 0.0
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    llama = LlamaConfig(intermediate_size=344, num_key_value_heads=2, **sizes, **common)
    bert = BertConfig(intermediate_size=4 * WIDTH, attn_implementation="eager", **sizes, **common)
    bert.hidden_dropout_prob = bert.attention_probs_dropout_prob = 0.0
    vit = ViTConfig(
        intermediate_size=4 * WIDTH, image_size=8, patch_size=2, num_channels=1, **sizes
    )
    vit.num_labels, vit.hidden_dropout_prob = 10, 0.0
    vit.attention_probs_dropout_prob = 0.0
    return {
        "GPT-2 with F.gelu": _of_blocks(Block),
        "GPT-2": _language_model(gpt, GPT2LMHeadModel),
        "Llama": _language_model(llama, LlamaForCausalLM),
        "BERT, attention written out": _language_model(bert, BertForMaskedLM),
        "mixture of experts": _of_blocks(Experts),
        "LSTM": _of_blocks(LSTM, STEPS, 1),
        "state-space scan": _of_blocks(Scan, STEPS, 1),
        "einsum attention": _of_blocks(lambda: EinsumBlock(WIDTH, HEADS)),
        "ViT on digits": Network(lambda: ViTForImageClassification(vit), _digits, _classify),
        "ResNet on digits": Network(
            lambda: digits_resnet.build(nn.ReLU, torch.initial_seed()), _digits, _classify
        ),
        "U-Net on digits": Network(
            UNet, _noisy_digits, lambda model, x, noise: mse_loss(model(x), noise)
        ),
    }


class Step(nn.Module):
    """A network with its loss."""

    def __init__(self, network: Network):
        super().__init__()
        self.model, self.loss = network.build().train(), network.loss

    def forward(self, *batch):
        """Return the loss."""
        return self.loss(self.model, *batch)


_torchs_region = functools.partial(checkpoint, use_reentrant=False)


def checkpointed(module: Step, region=_torchs_region) -> Step:
    """Let each block of a network be computed again in the backward pass; if it has no blocks, the whole network.

    Blocks are the modules in lists of modules, but not in lists within blocks, and not single layers. `region` is a
    function like torch's `checkpoint`, which calls a block.
    """
    found, todo = [], [module.model]
    while todo:
        inner = todo.pop()
        for child in inner.children():
            is_block = isinstance(inner, nn.ModuleList | nn.Sequential) and any(child.children())
            (found if is_block else todo).append(child)
    for block in found or [module.model]:
        block.forward = functools.partial(region, block.forward)
    return module


def plain(module, backend="aot_eager"):
    """Compile a module with torch's own partitioner."""
    if backend == "aot_eager":
        backend = _aot_eager(min_cut_rematerialization_partition)
    return torch.compile(module, backend=backend)


def with_budget(module, share):
    """Compile a module so that its forward pass saves a `share` of what it would save, and the rest is computed again.

    This is the memory budget of torch's partitioner. The graphs run op by op, like eager mode, and free each tensor after its last use.
    """
    backend = aot_autograd(fw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(module, backend=backend)

    def call(*inputs, **named):
        with functorch_config.patch(activation_memory_budget=share):
            return compiled(*inputs, **named)

    return call


def few(module, bits, backend="aot_eager"):
    """Compile a module with fewbit's partitioner."""
    return fewbit.compile(module, bits, backend=backend)


def gradient(module, run, batch, seed=0):
    """Return the gradient of all parameters, as a float64 vector, after one step of a module that `run` calls."""
    torch.manual_seed(seed)
    module.zero_grad()
    run(*batch).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).double()
