"""LoRA over quantized bases: the bytes that a forward saves, and the gradients, without and with fewbit.

    python benchmarks/study.py qlora

The networks are the small Llama and BERT of `lora.py`, with random weights. bitsandbytes or torchao quantizes their linear
layers, and PEFT adds LoRA adapters, all of whose matrices are random here, so that no gradient is zero. `fewbit.compress_`
compresses the models with 4 or 2 bits. "cosine" is that of the angle between the gradient of all adapters and the gradient
without fewbit, as the mean of several draws of the random rounding.

Writes results/qlora.json.
"""

from __future__ import annotations

import statistics

import harness
import torch
import torchao.quantization as ao
from studies import lora
from torch import nn

import fewbit

NETWORKS = ("llama", "bert")
DRAWS = 4


def is_base(module, name):
    return isinstance(module, nn.Linear) and not any(
        part in name for part in ("lm_head", "decoder")
    )


def with_bitsandbytes(model):
    """Replace linear layers by Linear4bit with NF4."""
    import bitsandbytes  # only for Linux

    for name, module in list(model.named_modules()):
        if is_base(module, name):
            parent, _, own = name.rpartition(".")
            sizes = module.in_features, module.out_features, module.bias is not None
            new = bitsandbytes.nn.Linear4bit(*sizes, quant_type="nf4", compute_dtype=torch.float32)
            new.load_state_dict(module.state_dict())
            setattr(model.get_submodule(parent), own, new.requires_grad_(False).to("cpu"))


def with_nf4(model):
    """Replace the weights of linear layers by torchao's NF4Tensor."""
    for name, module in model.named_modules():
        if is_base(module, name):
            weight = ao.to_nf4(module.weight.detach(), 64, 2)
            module.weight = nn.Parameter(weight, requires_grad=False)


BASES = {
    "float32": lambda model: None,
    "bitsandbytes NF4": with_bitsandbytes,
    "torchao NF4": with_nf4,
    "torchao int8": lambda model: ao.quantize_(model, ao.Int8WeightOnlyConfig(), is_base),
    "torchao int4": lambda model: ao.quantize_(
        model, ao.IntxWeightOnlyConfig(weight_dtype=torch.int4), is_base
    ),
}


def build(network, base):
    torch.manual_seed(0)
    model = lora.network(network)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.requires_grad_(False)
    BASES[base](model)
    settings = lora.LORA | {"lora_dropout": 0.0}
    model = lora.get_peft_model(model, lora.LoraConfig(**settings)).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def gradient(network, model, seed):
    model.zero_grad()
    torch.manual_seed(seed)
    model(**batch(network)).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def batch(network):
    return lora.batch(network, lora.help_texts()[0], torch.Generator().manual_seed(0))


def measure(network, base):
    """Yield a row for each number of bits."""
    model = build(network, base)
    exact = gradient(network, model, 0)
    plain = lora.saved(network, model)
    for bits in (4, 2):
        fewbit.compress_(model, bits, verbose=False)
        size = lora.saved(network, model)
        cosines = [
            torch.cosine_similarity(exact, gradient(network, model, seed), dim=0).item()
            for seed in range(DRAWS)
        ]
        assert min(cosines) > 0.5, f"{network}, {base}, {bits} bits: cosines {cosines}"
        yield {
            "network": network,
            "base": base,
            "bits": bits,
            "plain_bytes": plain,
            "saved_bytes": size,
            "factor": plain / size,
            "cosine": statistics.fmean(cosines),
            "least_cosine": min(cosines),
        }


def main():
    torch.set_num_threads(1)
    about = harness.machine("torch", "transformers", "peft", "bitsandbytes", "torchao")
    print(about)
    rows = []
    for network in NETWORKS:
        for base in BASES:
            rows += measure(network, base)
            for row in rows[-2:]:
                print(
                    f"{row['network']:6} {row['base']:17} {row['bits']} bits {row['factor']:6.2f}x less"
                    f"   cosine {row['cosine']:.4f}",
                    flush=True,
                )
    harness.save("qlora", about, rows)
