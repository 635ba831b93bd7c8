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
