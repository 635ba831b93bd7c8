"""The peak of training steps as `fewbit.fits` computes it, and as torch's profiler measures it on the CPU.

    python benchmarks/study.py fits            # some minutes

Each row is a model with a setting. The computed peak comes from fake tensors. The measured peak comes from a real step
in a process of its own: the bytes of parameters, buffers, optimizer state and batch, and the greatest sum of the
allocations and releases that the profiler records in the second step. The figures are in results/fits.json.
"""

from __future__ import annotations

import warnings

import harness
import torch
from torch import nn

import fewbit
from fewbit.models.workload import classification_loss, workload

MODELS = ("ResNet-18", "GPT-2", "Llama", "ViT", "UNet", "MLP")
SETTINGS = ("exact", "4 bits", "2 bits")


def resnet():
    model, (batch,), loss = workload("resnet18", batch=64, size=64, batches=1)
    return model, batch, loss


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=4000, n_positions=256)
    return GPT2LMHeadModel(config), _tokens(4000, 8, 256), None


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=4000,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config), _tokens(4000, 8, 256), None


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=96,
        patch_size=8,
        num_labels=10,
    )
    batch = {"pixel_values": torch.randn(32, 3, 96, 96), "labels": torch.randint(10, (32,))}
    return ViTForImageClassification(config), batch, None


def unet():
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    batch = torch.randn(16, 3, 32, 32), torch.randint(1000, (16,)), torch.randn(16, 3, 32, 32)

    def loss(model, batch):
        noisy, steps, noise = batch
        return nn.functional.mse_loss(model(noisy, steps).sample, noise)

    return model, batch, loss


def mlp():
    layers = [nn.Linear(784, 512), nn.GELU()]
    for _ in range(4):
        layers += [nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU(), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(512, 10))
    return model, (torch.randn(4096, 784), torch.randint(10, (4096,))), classification_loss


def _tokens(words, batch, length):
    tokens = torch.randint(words, (batch, length))
    return {"input_ids": tokens, "labels": tokens.clone()}


MAKERS = dict(zip(MODELS, (resnet, gpt2, llama, vit, unet, mlp), strict=True))


def measured_peak(model, batch, loss) -> int:
    """Return the most bytes that exist at one moment of the second training step, as torch's profiler sees it."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        value = model(**batch).loss if loss is None else loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    batch_tensors = batch.values() if isinstance(batch, dict) else batch
    states = [value for state in optimizer.state.values() for value in state.values()]
    existing = [*model.parameters(), *model.buffers(), *batch_tensors, *states]
    before = sum(tensor.nbytes for tensor in existing)
    return before + harness.most_bytes(step)


def compared(name, setting):
    """Return the computed and the measured peak of a model with a setting, in MiB."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batch, loss = MAKERS[name]()
    model.train()
    bits = None if setting == "exact" else int(setting.split()[0])
    given = "exact" if bits is None else bits
    (row,) = fewbit.fits(model, batch, loss, settings=[given], progress=False).rows
    if bits is not None:
        fewbit.compress_(model, bits, verbose=False)
    measured = measured_peak(model, batch, loss)
    return {
        "computed_mib": round(row.peak / 2**20, 2),
        "measured_mib": round(measured / 2**20, 2),
        "ratio": round(row.peak / measured, 4),
        "phase": row.phase,
        **{
            f"{part}_mib": round(getattr(row, part) / 2**20, 2)
            for part in ("weights", "gradients", "optimizer", "saved", "transient")
        },
    }


def main():
    about = harness.machine("torch", "transformers", "diffusers")
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    tasks = [{"model": model, "setting": setting} for model in MODELS for setting in SETTINGS]
    rows = harness.run_missing("fits", about, compared, tasks, 1)
    order = {(task["model"], task["setting"]): number for number, task in enumerate(tasks)}
    rows.sort(key=lambda row: order[row["model"], row["setting"]])
    harness.save("fits", about, rows)
    for row in rows:
        print(
            f"{row['model']:12}{row['setting']:10}{row['computed_mib']:10.2f}{row['measured_mib']:10.2f}"
            f"{100 * (row['ratio'] - 1):+8.1f} %"
        )
