"""LoRA with few bits: the bytes that a training step saves, and final losses compared with plain PEFT over several seeds.

    python benchmarks/study.py lora            # about 15 minutes on one core; --networks gpt2 llama bert selects networks
    python benchmarks/study.py lora --quick    # one seed, a few steps, to check that it works

A small GPT-2, Llama and BERT of transformers are trained on the source code of Python's standard library, without
adapters. PEFT then adds LoRA adapters to all linear layers, and only these are trained, on English help texts
(pydoc_data/topics.py): GPT-2 and Llama predict the next character, BERT predicts masked characters. `fewbit.compress_`
compresses the model with 4 or 2 bits. Runs with the same seed have the same adapters, batches and dropout, so they are
compared in pairs. The exception is "other dropout", plain PEFT that draws other random numbers for dropout: it shows how
much a final loss depends on chance. Runs whose results are stored are not repeated.

Writes results/lora.json (a row for each run), results/lora_summary.json and results/lora_variants.json (bytes for other
settings of PEFT).
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
from functools import cache
from pathlib import Path

import harness
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import fewbit
from fewbit.demo.text import python_topics

NETWORKS = ("gpt2", "llama", "bert")
PLAIN, OTHER_DROPOUT = "plain PEFT", "other dropout"
ARMS = (PLAIN, OTHER_DROPOUT, 4, 2)
"""Names of arms without fewbit, and numbers of bits."""
SEEDS = 3
CHARACTERS, MASK, OTHER = 128, 0, 127
WIDTH, DEPTH, HEADS, CONTEXT, BATCH = 128, 2, 4, 64, 8
BASE_STEPS, STEPS, BASE_RATE, RATE = 200, 80, 2e-3, 4e-3
MASKED = 0.15
TEST_BATCHES = 8
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": "all-linear"}
VARIANTS = {
    "LoRA": {},
    "LoRA without dropout": {"lora_dropout": 0.0},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
}
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "unittest", "xml")


def network(name: str) -> nn.Module:
    """Return a model of transformers with random weights."""
    sizes = {"vocab_size": CHARACTERS, "pad_token_id": None}
    tokens = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                **sizes, **tokens, n_positions=CONTEXT, n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS
            )
        )
    sizes |= {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
    if name == "llama":
        return LlamaForCausalLM(
            LlamaConfig(**sizes, **tokens, intermediate_size=344, num_key_value_heads=2)
        )
    return BertForMaskedLM(BertConfig(**sizes, intermediate_size=4 * WIDTH))


def _numbers(text: str) -> torch.Tensor:
    return torch.tensor([min(ord(character), OTHER) for character in text])


@cache
def source_code() -> torch.Tensor:
    """Return the source code of packages of the standard library, as numbers of characters."""
    texts = []
    for package in PACKAGES:
        (folder,) = importlib.util.find_spec(package).submodule_search_locations
        paths = sorted(Path(folder).rglob("*.py"))
        texts += [path.read_text(encoding="utf-8") for path in paths if "test" not in path.parts]
    return _numbers("".join(texts))


@cache
def help_texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parts of the help texts for training and for the test, as numbers of characters."""
    corpus = python_topics()
    parts = corpus.train, corpus.held_out
    return tuple(_numbers("".join(corpus.alphabet[i] for i in part.tolist())) for part in parts)


def batch(name: str, text: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return random windows of a text, and the labels that the model has to predict."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
    ids = text[starts[:, None] + torch.arange(CONTEXT)]
    if name != "bert":
        return {"input_ids": ids, "labels": ids}
    is_masked = torch.rand(ids.shape, generator=generator) < MASKED
    labels = torch.where(is_masked, ids, -100)
    return {"input_ids": torch.where(is_masked, MASK, ids), "labels": labels}


def train(name, model, text, steps, rate, seed, dropout_seed) -> None:
    """Train the parameters that need a gradient. Every step seeds torch, so that runs draw the same dropout."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for step in range(steps):
        torch.manual_seed(10**6 * dropout_seed + step)
        optimizer.zero_grad()
        model(**batch(name, text, generator)).loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def test(name, model) -> float:
    """Return the mean loss of the same held-out batches for every model."""
    generator = torch.Generator().manual_seed(0)
    model.eval()
    losses = [
        model(**batch(name, help_texts()[1], generator)).loss.item() for _ in range(TEST_BATCHES)
    ]
    model.train()
    return statistics.fmean(losses)


def base(name: str, folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """Return the state of a network that was trained on source code, and store it in a folder."""
    path = folder / f"{name}.pt"
    if path.exists():
        return torch.load(path)
    torch.manual_seed(0)
    model = network(name)
    train(name, model, source_code(), steps, BASE_RATE, 0, 0)
    torch.save(model.state_dict(), path)
    return model.state_dict()


def adapted(name, state, seed, **changes) -> nn.Module:
    """Return the trained network with new LoRA adapters."""
    model = network(name)
    model.load_state_dict(state)
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(**LORA | changes)).train()


def saved(name, model) -> int:
    """Return the bytes that a forward of one batch saves for the backward pass, without parameters and buffers."""
    given = batch(name, help_texts()[0], torch.Generator().manual_seed(0))
    return fewbit.saved_bytes(model, **given).total


def run(name, arm, seed, folder, steps) -> dict:
    """Train adapters in this process, with one thread."""
    torch.set_num_threads(1)
    state = torch.load(Path(folder) / f"{name}.pt")
    model = adapted(name, state, seed)
    before = test(name, model)
    if arm not in (PLAIN, OTHER_DROPOUT):
        fewbit.compress_(model, bits=arm, verbose=False)
    size = saved(name, model)
    dropout_seed = seed + 1000 * (arm == OTHER_DROPOUT)
    train(name, model, help_texts()[0], steps, RATE, seed, dropout_seed)
    found = {
        "saved_bytes": size,
        "saved_after": saved(name, model),
        "before": before,
        "final": test(name, model),
    }
    check_frozen(model, state)
    return found


def check_frozen(model, state) -> None:
    """Raise AssertionError if a weight of the base network has changed."""
    fewbit.restore_(model)
    for key, value in model.unload().state_dict().items():
        assert torch.equal(value, state[key]), f"{key} of the frozen network has changed"


def check_gradients(name, state) -> None:
    """Raise AssertionError if the gradients of 8 bits are not those of the exact model, up to small errors."""
    gradients = []
    for bits in (None, 8):
        model = adapted(name, state, 0, lora_dropout=0.0)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            # Adapters start as zero, and so do most gradients.
            if isinstance(module, nn.Linear) and not module.weight.any():
                nn.init.normal_(module.weight, std=0.02)
        if bits is not None:
            fewbit.compress_(model, bits, layers={"activation_bits": 8}, verbose=False)
        model(**batch(name, help_texts()[0], torch.Generator().manual_seed(0))).loss.backward()
        parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        gradients.append(torch.cat(parts))
    cosine = torch.cosine_similarity(*gradients, dim=0).item()
    assert cosine > 0.995, f"{name}: cosine of gradients {cosine}"
    print(f"{name}: cosine of the gradients of 8 bits and of the exact model {cosine:.5f}")


def variants(name, state):
    """Yield the bytes of each variant of LoRA, without and with fewbit."""
    for variant, changes in VARIANTS.items():
        model = adapted(name, state, 0, **changes)
        plain = saved(name, model)
        for bits in (4, 2):
            fewbit.compress_(model, bits, verbose=False)
            size = saved(name, model)
            yield {
                "network": name,
                "variant": variant,
                "bits": bits,
                "plain_bytes": plain,
                "saved_bytes": size,
                "factor": plain / size,
            }


def summary(rows):
    """Yield a row for each network and arm: bytes, mean loss, and the mean difference from plain PEFT in pairs."""
    for name in NETWORKS:
        arms = {
            arm: {row["seed"]: row for row in rows if (row["network"], row["arm"]) == (name, arm)}
            for arm in ARMS
        }
        plain = arms[PLAIN]
        for arm, found in arms.items():
            if not found or not plain:
                continue
            seeds = sorted(found.keys() & plain.keys())
            differences = [found[seed]["final"] - plain[seed]["final"] for seed in seeds]
            losses = [found[seed]["final"] for seed in seeds]
            first = found[seeds[0]]
            yield {
                "network": name,
                "arm": arm,
                "seeds": len(seeds),
                "saved_bytes": first["saved_bytes"],
                "factor": plain[seeds[0]]["saved_bytes"] / first["saved_bytes"],
                "factor_after": plain[seeds[0]]["saved_after"] / first["saved_after"],
                "before": statistics.fmean(found[seed]["before"] for seed in seeds),
                "loss": statistics.fmean(losses),
                "loss_spread": _deviation(losses),
                "difference": statistics.fmean(differences),
                "difference_spread": _deviation(differences),
            }


def _deviation(values) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", nargs="+", default=NETWORKS, choices=NETWORKS)
    parser.add_argument("--jobs", type=int, default=1, help="the number of processes")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps, nothing saved")
    options = parser.parse_args()
    if options.quick:
        harness.RESULTS = Path(tempfile.mkdtemp())
    seeds, steps, base_steps = (1, 4, 4) if options.quick else (SEEDS, STEPS, BASE_STEPS)
    about = harness.machine("torch", "transformers", "peft")
    print(about)
    folder = harness.RESULTS.parent.parent / "build" / "lora"
    if options.quick:
        folder = harness.RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    measured = harness.stored("lora_variants")
    for name in options.networks:
        state = base(name, folder, base_steps)
        if not any(row["network"] == name for row in measured):
            check_gradients(name, state)
            measured += variants(name, state)
            harness.save("lora_variants", about, measured)
    tasks = [
        {"network": name, "arm": arm, "seed": seed}
        for seed in range(seeds)
        for name in options.networks
        for arm in ARMS
    ]
    rows = harness.run_missing("lora", about, run, tasks, options.jobs, folder, steps)
    found = list(summary(rows))
    harness.save("lora_summary", about, found)
    for row in found:
        print(
            f"{row['network']:6} {row['arm']!s:14} {row['factor']:6.2f}x less   loss {row['loss']:.4f}"
            f" ± {row['loss_spread']:.4f}   difference {row['difference']:+.4f} ± {row['difference_spread']:.4f}"
        )
