"""Saved bytes and gradient errors of models whose operations are compressed too, `layers={"everything": True}`.

    python benchmarks/everything.py            # about 5 minutes on 2 cores
    python benchmarks/everything.py gpt_oss    # only this model, with what it saves by module; stores nothing
    python benchmarks/everything.py --times    # times of training steps, about 4 minutes

The models are an LSTM and a GRU for language, attention written with einsum, and models of transformers with random
weights and layers of width 64: experts, a state-space scan, several kinds of attention, encoders with decoders. Each is
compressed with 8 and 2 bits, with and without `everything`. Dropout is off, so that gradients can be compared.

"error" is the norm of the gradient's error divided by the norm of the exact gradient, and "cosine" the cosine of the angle
between the two, both as means over DRAWS roundings of one batch. "expected_cosine" is 1 / sqrt(1 + v), with v the variance of
the gradient in these draws, divided by the squared norm of the exact gradient. It is the cosine of a gradient whose errors
are all random. "bias" is an estimate of the norm of the mean gradient's error, without what is left of the random errors in
the mean of DRAWS draws, divided by the norm of the exact gradient.

A gradient that is silently wrong has a bias of about 1. Activations, norms and softmax have small biases without `everything`
(docs/concepts/layers.md). `everything` may add 0.01 at 8 bits and 0.05 at 2 bits, and errors at 8 bits must be below 0.05.

Writes results/everything.*, a row for each model and setting, and with --times results/everything_times.*.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time

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
    "t5": {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4},
    "whisper": {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "max_source_positions": LENGTH,
        "max_target_positions": LENGTH,
        "decoder_start_token_id": 1,
    },
}
DRAWS = 4
MOST_BIAS = {8: 0.01, 2: 0.05}  # that `everything` may add
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
    if name == "whisper":
        return transformers.WhisperForConditionalGeneration(config)
    families = transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForCausalLM
    auto = next((auto for auto in families if type(config) in auto._model_mapping), None)
    return (auto or transformers.AutoModelForMaskedLM).from_config(config)


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


def batch(name):
    """Return (the arguments of the model, the tokens that it predicts)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    if name == "whisper":
        sound = torch.randn(BATCH, 80, 2 * LENGTH, generator=generator)
        return {"input_features": sound, "decoder_input_ids": ids}, ids
    if name == "t5":
        return {"input_ids": ids.flip(1), "decoder_input_ids": ids}, ids
    return {
        ("input" if name == "einsum attention" else "x" if name in OWN else "input_ids"): ids
    }, ids


def step(model, arguments, targets):
    """Run a forward and a backward pass."""
    model.zero_grad()
    output = model(**arguments)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()


def gradient(model, batch, seed=2):
    torch.manual_seed(seed)
    step(model, *batch)
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return torch.cat([grad.flatten() for grad in grads]).double()


def compressed(model, bits, everything):
    few = copy.deepcopy(model)
    layers = {"everything": everything, "activation_bits": max(bits, 3)}
    fewbit.compress_(few, bits=bits, layers=layers, verbose=False)
    return few


def compare(draws, exact):
    """Return the errors of draws of a gradient, relative to the exact gradient."""
    draws, norm = torch.stack(draws), exact.norm()
    mean = draws.mean(0)
    variance = float((draws - mean).square().sum() / (len(draws) - 1) / norm**2)
    off = float(((mean - exact).norm() / norm).square())
    return {
        "error": float(((draws - exact).norm(dim=1) / norm).mean()),
        "cosine": float((draws @ exact / draws.norm(dim=1) / norm).mean()),
        "expected_cosine": 1 / math.sqrt(1 + variance),
        "bias": math.sqrt(max(0.0, off - variance / len(draws))),
    }


def measure(name, show=False):
    """Yield a row for each setting. Assert that no gradient is wrong."""
    model, data = build(name), batch(name)
    exact, before = gradient(model, data), fewbit.saved_bytes(model, **data[0]).total
    usual = {}
    for bits, everything in SETTINGS:
        few = compressed(model, bits, everything)
        saved = fewbit.saved_bytes(few, **data[0])
        found = compare([gradient(few, data, seed) for seed in range(DRAWS)], exact)
        row = {
            "model": name,
            "bits": bits,
            "everything": everything,
            "exact_bytes": before,
            "saved_bytes": saved.total,
            "times_less": before / saved.total,
            **found,
        }
        print(
            f"{name:17} {bits} bits{', everything' * everything:13} {row['times_less']:6.2f}x less, "
            f"error {row['error']:.4f}, cosine {row['cosine']:.5f}, expected {row['expected_cosine']:.5f}, "
            f"bias {row['bias']:.4f}",
            flush=True,
        )
        if show:
            print(saved)
        usual.setdefault(bits, row["bias"])
        most = usual[bits] + MOST_BIAS[bits]
        assert row["bias"] < most, f"{name}: bias {row['bias']} at {bits} bits"
        assert bits < 8 or row["error"] < 0.05, f"{name}: error {row['error']} at 8 bits"
        yield row


def times(name, rounds=5):
    """Return a row of the median times of training steps. The three models take turns."""
    model, data = build(name), batch(name)
    arms = {
        "exact": model,
        "compressed": compressed(model, 2, False),
        "everything": compressed(model, 2, True),
    }
    found = {arm: [] for arm in arms}
    for _ in range(rounds + 1):  # the first round is not timed
        for arm, each in arms.items():
            start = time.perf_counter()
            step(each, *data)
            found[arm].append(time.perf_counter() - start)
    seconds = {arm: statistics.median(each[1:]) for arm, each in found.items()}
    ratios = {f"{arm}_ratio": seconds[arm] / seconds["exact"] for arm in arms if arm != "exact"}
    print(f"{name:17} exact {seconds['exact']:.3f} s, {ratios}", flush=True)
    return {"model": name, **seconds, **ratios}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[[], *OWN, *TRANSFORMERS], metavar="MODEL")
    parser.add_argument("--times", action="store_true", help="measure times of training steps")
    arguments = parser.parse_args()
    about = harness.machine("torch", "transformers") | {"fewbit": fewbit.__version__}
    print(about)
    names = arguments.models or [*OWN, *TRANSFORMERS]
    if arguments.times:
        rows = [times(name) for name in names]
        if not arguments.models:
            harness.save("everything_times", about, rows)
        return
    rows = [row for name in names for row in measure(name, bool(arguments.models))]
    if not arguments.models:
        harness.save("everything", about, rows)


if __name__ == "__main__":
    main()
