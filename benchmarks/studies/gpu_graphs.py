"""Training steps of GPT-2-small and ResNet-50 with and without a CUDA graph, exact and with 2 bits, for two batches each.

    python benchmarks/study.py gpu_graphs   # a CUDA device, about two minutes

Models, data and steps are those of gpu_training.py. With the smaller batch, the GPU waits for Python unless the step is in a graph.

Writes results/gpu_graphs.json after each arm.
"""

from __future__ import annotations

import sys

import gpu_training
import harness
import torch

BATCHES = {"gpt2": (8, 24), "resnet50": (64, 256)}
ARMS = "exact", "L2 2 bits", *gpu_training.CAPTURED
SECONDS = 60  # for one arm


def main():
    if not torch.cuda.is_available():
        sys.exit("expected a CUDA device, found none")
    options = {
        "device": "cuda",
        "memory": torch.cuda.get_device_properties(0).total_memory,
        "steps": 10,
        "search": False,
    }
    rows = []
    for case, batches in BATCHES.items():
        for batch in batches:
            settings, exact = gpu_training.CASES[case] | {"batch": batch}, None
            for arm in ARMS:
                arguments = case, settings, options | {"arm": arm}
                row = gpu_training.in_process(gpu_training.measure, *arguments, limit=SECONDS)
                if arm == "exact" and "error" not in row:
                    exact = row
                print(case, batch, arm, gpu_training.describe(row, exact), flush=True)
                rows.append({"case": case, "arm": arm, **settings, **row})
                harness.save("gpu_graphs", gpu_training.about("cuda"), rows)
