"""Whole models trained with few bits: final losses compared with exact training over several seeds, and saved bytes.

    python benchmarks/study.py compressed_training            # 10 to 25 minutes on 2 cores
    python benchmarks/study.py compressed_training --quick    # one seed, a few steps, to check that it works

The demo's transformer and a ResNet for 8 by 8 digits are built in plain torch.nn. `fewbit.compress_` converts them
with 8, 4, 3, 2 and 1 bits for quantized inputs, and the transformer also with AdaptiveBits. Activations have 3 bits, and
8 if inputs have 8 (ReLU always 1). In further arms nothing is compressed, but each block of the transformer is a
checkpointed region, with inputs that are saved in full (torch.utils.checkpoint) or with 8 or 4 bits (fewbit.checkpoint).
Runs with the same seed have the same initial parameters and batches, so they are compared in pairs. The exception is
"other batches", exact training that draws other batches: it shows how much a final loss depends on chance.
Runs whose results are stored are not repeated.

Writes results/compressed_training.json (a row for each run) and compressed_training_summary.json. The field "tenths" has the
mean training loss in each tenth of the steps.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import harness
import torch
from networks import digits_resnet
from torch import nn
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.demo import text, training

BITS = (None, 8, 4, 3, 2, 1)
OTHER_BATCHES = "other batches"
ADAPTIVE = {f"adaptive, {bits} bits": {"bits": fewbit.AdaptiveBits(bits)} for bits in (3, 2.5, 2)}
"""{name of an arm: the arguments of `compress_`}."""
CHECKPOINTS = {
    "checkpoints, exact": partial(checkpoint, use_reentrant=False),
    "checkpoints, 8 bits": partial(fewbit.checkpoint, bits=8),
    "checkpoints, 4 bits": partial(fewbit.checkpoint, bits=4),
}
"""{name of an arm: the function that makes each block of the transformer a checkpointed region}."""
ARMS = {"transformer": (*BITS, *ADAPTIVE, *CHECKPOINTS, OTHER_BATCHES), "resnet": BITS}
SEEDS = {"transformer": 5, "resnet": 10}


def build(network, seed, settings):
    if network == "resnet":
        return digits_resnet.build(nn.ReLU, seed)
    return training.build(text.python_topics(), settings, nn.GELU, seed)


def sample(network, settings):
    """Return the inputs of one training step."""
    if network == "resnet":
        return digits_resnet.digits()[0][: digits_resnet.BATCH]
    return text.python_topics().held_out_batch(settings.batch, settings.context)[0]


def run(network, bits, seed, steps, **options):
    """Train a network in this process, with one thread.

    Args:
        network: A key of SEEDS.
        bits: One of ARMS. 0 and None stand for exact training.
        seed: The seed of the initial parameters and, unless `bits` is OTHER_BATCHES, of the batches.
        steps: The number of steps of the transformer.
        **options: Further arguments of `compress_`.
    """
    torch.set_num_threads(1)
    settings = training.TrainingSettings(steps=steps)
    model = build(network, seed, settings)
    if bits == OTHER_BATCHES:
        seed += 10**5
    elif bits in CHECKPOINTS:
        for block in model.blocks:
            block.forward = partial(CHECKPOINTS[bits], block.forward)
    elif bits:
        fewbit.compress_(model, **ADAPTIVE.get(bits, {"bits": bits}), verbose=False, **options)
    kept = fewbit.saved_bytes(model, sample(network, settings))
    return {"saved_bytes": kept.total, **train(network, model, seed, settings)}


def train(network, model, seed, settings, progress=lambda step: None):
    """Train a model. Return its held-out loss "final", last training loss "train", and on digits its "accuracy".

    `progress` is called after every step with the number of steps done.
    """
    if network == "resnet":
        return digits_resnet.train(model, seed, progress)
    done = training.train(model, text.python_topics(), settings, seed, progress)
    tenth = max(len(done.train) // 10, 1)
    tenths = [statistics.fmean(done.train[i : i + tenth]) for i in range(0, 10 * tenth, tenth)]
    return {"final": done.final, "train": statistics.fmean(done.train[-20:]), "tenths": tenths}


def summary(rows):
    """Yield a row for each network and number of bits: bytes, the mean final loss, and its difference from exact.

    Differences are taken in pairs of runs with the same seed.
    """
    for network in SEEDS:
        exact = {row["seed"]: row for row in rows if (row["network"], row["bits"]) == (network, 0)}
        for bits in ARMS[network]:
            own = [r for r in rows if (r["network"], r["bits"]) == (network, bits or 0)]
            own = [row for row in own if row["seed"] in exact]
            if not own:
                continue
            finals = [row["final"] for row in own]
            differences = [row["final"] - exact[row["seed"]]["final"] for row in own]
            several = len(own) > 1
            record = {
                "network": network,
                "bits": bits or "exact",
                "seeds": len(own),
                "saved_bytes": own[0]["saved_bytes"],
                "times_less": exact[own[0]["seed"]]["saved_bytes"] / own[0]["saved_bytes"],
                "final": statistics.fmean(finals),
                "final_std": statistics.stdev(finals) if several else None,
                "difference": statistics.fmean(differences),
                "difference_std": statistics.stdev(differences) if several else None,
            }
            if network == "resnet":
                record["accuracy"] = statistics.fmean(row["accuracy"] for row in own)
            yield record


def show(records):
    form = "{:12} {:>32} {:>5} {:>10} {:>6} {:>18} {:>20} {:>9}"
    head = "network", "bits", "seeds", "bytes", "less", "final loss", "minus exact", "accuracy"
    print(form.format(*head))
    for r in records:
        spread = f" ± {r['final_std']:.4f}" if r["final_std"] is not None else ""
        paired = f" ± {r['difference_std']:.4f}" if r["difference_std"] is not None else ""
        print(
            form.format(
                r["network"],
                str(r["bits"]),
                r["seeds"],
                r["saved_bytes"],
                f"{r['times_less']:.1f}x",
                f"{r['final']:.4f}{spread}",
                f"{r['difference']:+.4f}{paired}",
                f"{r['accuracy']:.4f}" if "accuracy" in r else "",
            )
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    arguments = parser.parse_args()
    name = "compressed_training" + "_quick" * arguments.quick
    steps = 20 if arguments.quick else training.TrainingSettings.steps
    tasks = [
        {"network": network, "bits": bits or 0, "seed": seed}
        for seed in range(1 if arguments.quick else max(SEEDS.values()))
        for network in SEEDS
        if seed < SEEDS[network]
        for bits in ARMS[network]
    ]
    about = harness.machine("torch", "scikit-learn") | {"fewbit": fewbit.__version__}
    rows = harness.run_missing(name, about, run, tasks, arguments.jobs, steps)
    records = list(summary(rows))
    harness.save(name + "_summary", about, records)
    show(records)
