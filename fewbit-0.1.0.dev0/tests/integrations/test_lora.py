"""Tests of LoRA adapters of PEFT in compressed models: what they save, their gradients, and the frozen base."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fewbit

pytest.importorskip("peft")
from peft import LoraConfig, get_peft_model  # noqa: E402

SAMPLES, WIDTH, RANK = 8, 256, 8
VARIANTS = {
    "lora": {},
    "dropout": {"lora_dropout": 0.1},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
}


class Projections(nn.Module):
    """Three linear layers of the same input, as q, k and v of attention, and one of their sum."""

    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v", "out"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        x = x * 1.0
        return self.out(self.q(x) + self.k(x) + self.v(x))


def adapted(model, **changes):
    """Return the model with adapters, all of whose parameters have gradients that are not zero."""
    settings = {"r": RANK, "lora_alpha": 16, "target_modules": "all-linear"}
    model = get_peft_model(model, LoraConfig(**settings | changes)).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def copy_size(bits, features):
    """Return the bytes of a quantized copy of an input with so many features, saved by a layer of its own."""
    layer = nn.Linear(features, 4)
    fewbit.compress_(layer, bits, verbose=False)
    return fewbit.saved_bytes(layer, torch.randn(SAMPLES, features)).total


def gradients(model, **inputs):
    model.zero_grad()
    torch.manual_seed(0)
    output = model(**inputs)
    loss = output.loss if hasattr(output, "loss") else (output - 1).square().mean()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all("lora" in name for name in grads)
    return grads


def cosine(first, second):
    assert first.keys() == second.keys()
    flat = [torch.cat([grads[name].flatten() for name in first]) for grads in (first, second)]
    return F.cosine_similarity(*flat, dim=0)


@pytest.mark.parametrize("bits", [2, 4])
def test_adapters_share_one_copy_and_the_base_saves_nothing(bits):
    model, x = adapted(Projections()), torch.randn(SAMPLES, WIDTH)
    fewbit.compress_(model, bits, verbose=False)
    saved = fewbit.saved_bytes(model, x)
    wide, narrow = copy_size(bits, WIDTH), copy_size(bits, RANK)
    # Wide copies: the input of q, k and v, which lora_A of all three share, and that of out. Narrow copies: the inputs of
    # lora_B of four layers.
    assert saved.total == 2 * wide + 4 * narrow


def test_report_of_a_frozen_base():
    model = adapted(Projections())
    report = fewbit.compress_(model, 2, verbose=False).report
    saves = {row.path.removeprefix("base_model.model."): row.saves for row in report.converted}
    assert saves["q.base_layer"] == "no input"
    assert saves["q.lora_A.default"] == saves["q.lora_B.default"] == "2 bits"
    assert not report.left_alone


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_gradients_and_the_base(changes):
    torch.manual_seed(1)
    model, x = adapted(Projections(), **changes), torch.randn(64, WIDTH)
    base = {name: value.clone() for name, value in model.state_dict().items() if "base" in name}
    exact = gradients(model, x=x)
    fewbit.compress_(model, 8, verbose=False)
    assert cosine(exact, gradients(model, x=x)) > 0.999
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    gradients(model, x=x)
    optimizer.step()
    after = model.state_dict()
    frozen = [name for name in base if "base_layer" in name]
    assert len(frozen) == 8
    assert all(torch.equal(base[name], after[name]) for name in frozen)


def language_model(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "use_cache": False, "bos_token_id": None, "eos_token_id": None}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_positions=64, n_embd=128, n_layer=2, n_head=4, **sizes)
        return transformers.GPT2LMHeadModel(config)
    sizes |= {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "llama":
        config = transformers.LlamaConfig(intermediate_size=344, num_key_value_heads=2, **sizes)
        return transformers.LlamaForCausalLM(config)
    return transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=96, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_language_models_save_a_fifth_of_plain_peft(kind, variant):
    torch.manual_seed(1)
    model = adapted(language_model(kind), **VARIANTS[variant])
    ids = torch.randint(96, (4, 64))
    inputs = {"input_ids": ids, "labels": ids}
    plain = fewbit.saved_bytes(model, **inputs).total
    exact = gradients(model, **inputs)
    sizes = {}
    for bits, least in ((4, 0.9), (2, 0.7)):
        fewbit.compress_(model, bits, verbose=False)
        sizes[bits] = fewbit.saved_bytes(model, **inputs).total
        assert sizes[bits] < plain / 5
        if variant != "dropout" and kind == "llama":  # without dropout, forwards are equal
            assert cosine(exact, gradients(model, **inputs)) > least
    assert sizes[2] < sizes[4]
