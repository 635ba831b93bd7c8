"""Saved bytes and gradient errors of models whose operations are compressed too, `layers={"everything": True}`.

    python benchmarks/everything.py            # about 3 minutes on 2 cores
    python benchmarks/everything.py gpt_oss    # only this model, with what it saves by module; stores nothing

The models are an LSTM and a GRU for language, attention written with einsum, and models of transformers with random
weights and two layers of width 64: experts, a state-space scan, and several kinds of attention. Each is compressed with
8 and 2 bits, with and without `everything`. Dropout is off, so that gradients can be compared.

"error" is the norm of the gradient's error divided by the norm of the exact gradient, for one rounding of one batch, and
"cosine" the cosine of the angle between the two. At 8 bits the error must be below 3 %.

Writes results/everything.*, a row for each model and setting.
"""

from __future__ import annotations

import argparse
import copy

import harness
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

import fewbit

VOCABULARY, BATCH, LENGTH = 256, 8, 128
IDS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
OWN_NAMES = {"n_layer": 2, "n_head": 4}  # of models that call their sizes otherwise
EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
ATTENTION_OF_DEEPSEEK = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
TRANSFORMERS = {
    "gpt2": {"n_embd": 64, **OWN_NAMES},
    "mixtral": {**SIZES, **EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {
        **SIZES,
        **EXPERTS,
        "num_experts": 4,
        "moe_intermediate_size": 64,
        "head_dim": 16,
    },
    "gpt_oss": {**SIZES, **EXPERTS, "num_local_experts": 4, "head_dim": 16},
    "deepseek_v3": {
        **SIZES,
        **EXPERTS,
        **ATTENTION_OF_DEEPSEEK,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    },
    "bloom": {"hidden_size": 64, **OWN_NAMES},
    "xlnet": {"d_model": 64, "d_inner": 128, **OWN_NAMES},
    "longformer": {**SIZES, "attention_window": [32, 32], "max_position_embeddings": 300},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "deberta": SIZES,
}
SETTINGS = [(bits, everything) for bits in (8, 2) for everything in (False, True)]


class Recurrent(nn.Module):
    """A language model with a recurrent layer."""

    def __init__(self, cls):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128)
        self.layer = cls(128, 256, 2, batch_first=True)
        self.head = nn.Linear(256, VOCABULARY)

    def forward(self, x):
        return self.head(self.layer(self.embedding(x))[0])


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


def einsum():
    """Return a language model of blocks of einsum attention."""
    blocks = [EinsumBlock(64, 4) for _ in range(2)]
    return nn.Sequential(nn.Embedding(VOCABULARY, 64), *blocks, nn.Linear(64, VOCABULARY))


def of_transformers(name):
    config = transformers.AutoConfig.for_model(name, **TRANSFORMERS[name], **IDS)
    config.use_cache = False
    is_causal = type(config) in transformers.AutoModelForCausalLM._model_mapping
    auto = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForMaskedLM
    return auto.from_config(config)


OWN = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "einsum attention": einsum,
}


def build(name):
    """Return a model in training mode, without dropout."""
    torch.manual_seed(0)
    model = OWN[name]() if name in OWN else of_transformers(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)


def loss(model, ids):
    output = model(ids)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return cross_entropy(logits.flatten(0, 1), ids.flatten())


def gradient(model, ids):
    torch.manual_seed(2)
    model.zero_grad()
    loss(model, ids).backward()
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return torch.cat([grad.flatten() for grad in grads]).double()


def measure(name, show=False):
    """Yield a row for each setting. Assert that gradients at 8 bits are close to exact ones."""
    model, ids = build(name), batch()
    exact, before = gradient(model, ids), fewbit.saved_bytes(model, ids).total
    for bits, everything in SETTINGS:
        few = copy.deepcopy(model)
        layers = {"everything": everything, "activation_bits": max(bits, 3)}
        fewbit.compress_(few, bits=bits, layers=layers, verbose=False)
        saved, found = fewbit.saved_bytes(few, ids), gradient(few, ids)
        error = float((found - exact).norm() / exact.norm())
        assert bits < 8 or error < 0.03, f"{name}: gradient error {error} at 8 bits"
        cosine = float(found @ exact / found.norm() / exact.norm())
        row = {
            "model": name,
            "bits": bits,
            "everything": everything,
            "exact_bytes": before,
            "saved_bytes": saved.total,
            "times_less": before / saved.total,
            "error": error,
            "cosine": cosine,
        }
        print(
            f"{name:17} {bits} bits{', everything' * everything:13} {row['times_less']:6.2f}x less, "
            f"error {error:.4f}, cosine {cosine:.5f}"
        )
        if show:
            print(saved)
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[[], *OWN, *TRANSFORMERS], metavar="MODEL")
    arguments = parser.parse_args()
    about = harness.machine("torch", "transformers") | {"fewbit": fewbit.__version__}
    print(about)
    names = arguments.models or [*OWN, *TRANSFORMERS]
    rows = [row for name in names for row in measure(name, bool(arguments.models))]
    if not arguments.models:
        harness.save("everything", about, rows)


if __name__ == "__main__":
    main()
