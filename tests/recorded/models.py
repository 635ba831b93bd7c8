"""Small models to train, with batches and a loss; all but the pre-activation blocks are built of torch and transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recorded import api

STEPS = 5
"""Batches of a case, and steps of a training."""


@dataclass
class Case:
    """A model with its batches.

    Attributes:
        model: in training mode.
        batches: STEPS tuples of positional inputs, or mappings of keyword inputs.
        loss: called as loss(model, batch), returns a scalar.
    """

    model: nn.Module
    batches: list
    loss: Callable = field(default=None)

    def __post_init__(self):
        self.model.train()
        self.loss = self.loss or regression

    @property
    def inputs(self) -> tuple[tuple, dict]:
        """Positional and keyword inputs of the first batch."""
        batch = self.batches[0]
        return ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})


def regression(model, batch):
    """Return the mean squared distance of the result from a fixed wave."""
    y = model(*batch).float()
    wave = torch.arange(y.numel(), dtype=torch.float32).mul(0.7).sin().view(y.shape)
    return (y - wave).square().mean()


def language(model, batch):
    """Return the loss that a model of transformers computes itself."""
    return model(**batch).loss


def _normal(*shape, **options):
    return [(torch.randn(shape, **options),) for _ in range(STEPS)]


# -- models of torch ---------------------------------------------------------------------------------------


def mlp() -> Case:
    """Linear layers, a layer norm and activations as modules."""
    layers = nn.Linear(48, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.SiLU()
    return Case(nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(64, 10)), _normal(16, 48))


class FunctionBlock(nn.Module):
    """A transformer block that calls functions of torch."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(64, 32)
        self.first, self.second = nn.Parameter(torch.ones(32)), nn.Parameter(torch.ones(32))

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (4, 8)).transpose(1, 2)
            for part in self.qkv(F.layer_norm(x, (32,), self.first)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.up(F.rms_norm(x, (32,), self.second)).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        weights = torch.softmax(x @ x.transpose(-1, -2), -1)
        return F.dropout(F.gelu(weights @ x), 0.1, self.training)


def functions() -> Case:
    """Two blocks of functions."""
    return Case(nn.Sequential(FunctionBlock(), FunctionBlock()), _normal(4, 12, 32))


def transformer() -> Case:
    """torch's own encoder layers."""
    layers = [nn.TransformerEncoderLayer(32, 4, 64, 0.1, "gelu", batch_first=True) for _ in "ab"]
    return Case(nn.Sequential(*layers, nn.Linear(32, 5)), _normal(4, 12, 32))


class AttentionBlock(nn.Module):
    """MultiheadAttention beside a residual, with a norm before it."""

    def __init__(self):
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 64), nn.ELU(), nn.Linear(64, 32))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attend(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


def attention() -> Case:
    """Two attention blocks."""
    return Case(nn.Sequential(AttentionBlock(), AttentionBlock()), _normal(4, 12, 32))


def convolutions() -> Case:
    """A convolutional network with every norm, pooling and upsampling."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.GroupNorm(4, 16),
        nn.Hardswish(),
        nn.Conv2d(16, 16, 3, padding="same", groups=2),
        nn.InstanceNorm2d(16, affine=True),
        nn.LeakyReLU(0.1),
        nn.ConvTranspose2d(16, 8, 2, stride=2),
        nn.LayerNorm((8, 12, 12)),
        nn.PReLU(8),
        nn.AvgPool2d(2),
        nn.Dropout2d(0.2),
        nn.Upsample(scale_factor=2),
        nn.RMSNorm((12, 12)),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 10),
        nn.LogSoftmax(-1),
    )
    return Case(model, _normal(4, 3, 12, 12))


def channels_last() -> Case:
    """The same network and images with channels last in memory."""
    case = convolutions()
    last = torch.channels_last
    case.model.to(memory_format=last)
    case.batches = [(x.contiguous(memory_format=last),) for (x,) in case.batches]
    return case


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut; pre: norms and activations before the convolutions."""

    def __init__(self, width: int, out: int, stride: int, pre: bool):
        super().__init__()
        self.pre = pre
        self.norm1, self.norm2 = nn.BatchNorm2d(width if pre else out), nn.BatchNorm2d(out)
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.relu = nn.ReLU(inplace=not pre)
        self.short = nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x):
        if self.pre:
            h = self.relu(self.norm1(x))
            return self.short(h) + self.conv2(F.relu(self.norm2(self.conv1(h))))
        h = self.conv2(self.relu(self.norm1(self.conv1(x))))
        return self.relu(self.norm2(h) + self.short(x))


def _residual(pre: bool) -> Case:
    blocks = ResidualBlock(8, 8, 1, pre), ResidualBlock(8, 16, 2, pre)
    head = nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    return Case(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, *head), _normal(4, 3, 10, 10))


def resnet() -> Case:
    """A ResNet with in-place activations after the norms."""
    return _residual(False)


def pre_resnet() -> Case:
    """A ResNet with norms and activations before the convolutions."""
    return _residual(True)


def pre_blocks() -> Case:
    """fewbit's own pre-activation blocks, in a model of torch's layers."""
    convolution = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
    linear = nn.LayerNorm(32), nn.Linear(32, 10), nn.LeakyReLU(0.2)
    blocks = api.layer("PreActivation", *convolution), api.layer("PreActivation", *linear, bits=2)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), blocks[0], nn.AdaptiveAvgPool2d(2), nn.Flatten(), blocks[1]
    )
    return Case(model, _normal(4, 3, 8, 8))


class Nested(nn.Module):
    """Nested containers, a module used twice under two names, and a tied weight."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.LayerNorm(32), nn.Mish()))
            for _ in range(2)
        )
        self.shared = nn.Linear(32, 32)
        self.again = self.shared
        self.branches = nn.ModuleDict({name: nn.Linear(32, 16) for name in ("left", "right")})
        self.tied = nn.Linear(32, 32)
        self.tied.weight = self.shared.weight

    def forward(self, x):
        for block in self.blocks:
            x = x + self.shared(block(x))
        y = torch.tanh(self.again(x))
        return self.tied(torch.cat([self.branches["left"](y), self.branches["right"](y)], -1))


def nested() -> Case:
    """Nested, shared and tied modules."""
    return Case(Nested(), _normal(8, 32))


class Checkpointed(nn.Module):
    """A residual around a checkpointed body."""

    def __init__(self, use_reentrant: bool):
        super().__init__()
        self.use_reentrant = use_reentrant
        layers = nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)
        self.body = nn.Sequential(*layers)

    def forward(self, x):
        return x + checkpoint(self.body, x, use_reentrant=self.use_reentrant)


def _checkpointed(use_reentrant: bool) -> Case:
    blocks = Checkpointed(use_reentrant), Checkpointed(use_reentrant)
    return Case(nn.Sequential(nn.Linear(32, 32), *blocks, nn.Linear(32, 8)), _normal(8, 32))


def checkpointed() -> Case:
    """Blocks of a checkpoint without reentrance."""
    return _checkpointed(False)


def reentrant() -> Case:
    """Blocks of a reentrant checkpoint."""
    return _checkpointed(True)


class Text(nn.Module):
    """An embedding, a bilinear layer and a softmax as modules."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 24)
        self.pair = nn.Bilinear(24, 24, 32)
        self.head = nn.Sequential(nn.PReLU(), nn.Linear(32, 32), nn.Softmax(-1), nn.Linear(32, 5))

    def forward(self, tokens):
        words = self.words(tokens)
        return self.head(self.pair(words, words.roll(1, 1)))


def text() -> Case:
    """Token numbers as input."""
    return Case(Text(), [(torch.randint(50, (4, 9)),) for _ in range(STEPS)])


def every_activation() -> Case:
    """Every activation of torch that fewbit knows, one after the other."""
    names = (
        "CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish RReLU ReLU ReLU6 SELU SiLU "
        "Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink"
    )
    layers = []
    for name in names.split():
        layers += [nn.BatchNorm1d(16), getattr(nn, name)()]
    return Case(nn.Sequential(nn.Linear(16, 16), *layers), _normal(12, 16))


def signals() -> Case:
    """Convolutions in one dimension, with dropout of channels."""
    layers = nn.Conv1d(4, 16, 3), nn.BatchNorm1d(16), nn.ReLU6(), nn.Dropout1d(0.2)
    last = nn.ConvTranspose1d(16, 4, 3), nn.InstanceNorm1d(4), nn.Softplus()
    return Case(nn.Sequential(*layers, *last), _normal(4, 4, 40))


def volumes() -> Case:
    """Convolutions in three dimensions."""
    layers = nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8), nn.SELU(), nn.MaxPool3d(2)
    return Case(nn.Sequential(*layers, nn.ConvTranspose3d(8, 2, 2)), _normal(2, 2, 6, 6, 6))


def bfloat16() -> Case:
    """The layers of `mlp` in bfloat16."""
    case = mlp()
    case.model.bfloat16()
    case.batches = [(x.bfloat16(),) for (x,) in case.batches]
    return case


def float64() -> Case:
    """The layers of `mlp` in float64."""
    case = mlp()
    case.model.double()
    case.batches = [(x.double(),) for (x,) in case.batches]
    return case


def autocast() -> Case:
    """A model that computes under autocast to bfloat16."""
    case = transformer()

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return regression(model, batch)

    case.loss = loss
    return case


def frozen() -> Case:
    """A model of which some parameters need no gradient."""
    case = mlp()
    for module in (case.model[0], case.model[1]):
        module.requires_grad_(False)
    return case


# -- models of transformers --------------------------------------------------------------------------------


def _tokens(**more) -> list[dict]:
    found = [torch.randint(3, 90, (3, 12)) for _ in range(STEPS)]
    return [{"input_ids": tokens, "labels": tokens} | more for tokens in found]


def llama() -> Case:
    """A Llama of two layers."""
    import tiny_models
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    return Case(LlamaForCausalLM(tiny_models.llama()), _tokens(), language)


def gpt2() -> Case:
    """A GPT-2 of two layers."""
    import tiny_models
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    return Case(GPT2LMHeadModel(tiny_models.gpt2()), _tokens(), language)


def bert() -> Case:
    """A BERT of two layers that classifies."""
    import tiny_models
    from transformers.models.bert.modeling_bert import BertForSequenceClassification

    model = BertForSequenceClassification(tiny_models.bert())
    return Case(model, _tokens(labels=torch.tensor([0, 1, 0])), language)


def t5() -> Case:
    """A T5 of two layers."""
    import tiny_models
    from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration

    return Case(T5ForConditionalGeneration(tiny_models.t5()), _tokens(), language)


def vit() -> Case:
    """A ViT of two layers."""
    import tiny_models
    from transformers.models.vit.modeling_vit import ViTForImageClassification

    labels = torch.tensor([0, 1, 0])
    batches = [{"pixel_values": torch.randn(3, 3, 32, 32), "labels": labels} for _ in range(STEPS)]
    return Case(ViTForImageClassification(tiny_models.vit()), batches, language)


def mixtral() -> Case:
    """A Mixtral of two layers."""
    import tiny_models
    from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

    return Case(MixtralForCausalLM(tiny_models.mixtral()), _tokens(), language)


def lora() -> Case:
    """A Llama with adapters of peft, whose own weights are frozen."""
    from peft import LoraConfig, get_peft_model

    case = llama()
    adapters = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "up_proj"])
    case.model = get_peft_model(case.model, adapters).train()
    return case


TORCH = {
    "mlp": mlp,
    "functions": functions,
    "transformer": transformer,
    "attention": attention,
    "convolutions": convolutions,
    "channels last": channels_last,
    "resnet": resnet,
    "pre-activation resnet": pre_resnet,
    "pre-activation blocks": pre_blocks,
    "nested": nested,
    "checkpointed": checkpointed,
    "reentrant": reentrant,
    "text": text,
    "every activation": every_activation,
    "signals": signals,
    "volumes": volumes,
    "bfloat16": bfloat16,
    "float64": float64,
    "autocast": autocast,
    "frozen": frozen,
}
TRANSFORMERS = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "mixtral": mixtral,
}
PEFT = {"lora": lora}


def names() -> list[str]:
    """Return the names of the models that can be built here."""
    found = list(TORCH)
    if importlib.util.find_spec("transformers"):
        found += TRANSFORMERS
        if importlib.util.find_spec("peft"):
            found += PEFT
    return found


def made(name: str) -> Case:
    """Build a case by its name; the same for the same name, whatever ran before."""
    torch.manual_seed(20240607)
    return (TORCH | TRANSFORMERS | PEFT)[name]()
