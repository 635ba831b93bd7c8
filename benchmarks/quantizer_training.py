"""Train the ten networks of quantizer_choice.py for a short time, with several numbers of bits and kinds of copies.

    python benchmarks/quantizer_training.py            # two hours on 2 cores
    python benchmarks/quantizer_training.py --seeds 2 --arms exact "2 bits" --networks Llama
    python benchmarks/quantizer_training.py --quick    # a few steps of each arm, to check that it works

An arm is one setting. All arms of a seed have the same initial parameters and the same batches, with one exception: the
arm "other batches" is exact training with other batches, and shows how much a final loss depends on chance. The final
loss is the loss on held-out data. Activations have 3 bits (ReLU 1). Runs whose results are stored are not repeated.

Writes results/quantizer_training.* (a row for each run) and quantizer_training_summary.* (a row for each network and
arm: the mean final loss minus that of exact training with the same seed).
"""

from __future__ import annotations

import argparse
import math
import statistics

import digits_resnet
import harness
import quantizer_choice
import super_resolution
import text_classifier
import torch

import fewbit

STEPS, SEEDS = 400, 2
OTHER_BATCHES = 10**5
"""The difference between the numbers of batches of the arm "other batches" and those of all other arms."""
ARMS = {
    "exact": None,
    "other batches": None,
    "4 bits": {"bits": 4},
    "2 bits": {"bits": 2},
    "1 bit": {"bits": 1},
    "2 bits, uniform": {"bits": 2, "layers": {"quantizer": "uniform"}},
    "1 bit, uniform": {"bits": 1, "layers": {"quantizer": "uniform"}},
    "adaptive, 2 bits": {"bits": fewbit.AdaptiveBits(2)},
}
"""The arguments of `compress_` for each arm; None for exact training."""


def held_out(name):
    """Return a list of (inputs, targets) that are not among the training data of a network."""
    if name == "super-resolution":
        _, pairs = super_resolution.photographs()
        return [tuple(image[None] for image in pair) for pair in pairs]
    if name == "text classifier":
        passages, labels = text_classifier.test_passages()
        return list(zip(passages.split(256), labels.split(256), strict=True))
    if name.endswith("digits"):
        _, _, images, labels = digits_resnet.digits()
        if not name.startswith("U-Net"):
            return [(images, labels)]
        noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
        return [(images + noise, noise)]
    windows = quantizer_choice.corpus().held_out_batch(256, quantizer_choice.CONTEXT)
    return list(zip(*(part.split(32) for part in windows), strict=True))


def run(name, arm, seed, steps):
    """Train a network with one thread. Return its held-out loss "final", and the bytes that a step saves."""
    torch.set_num_threads(1)
    network = quantizer_choice.networks()[name]
    torch.manual_seed(seed)
    model = network.build().train()
    if ARMS[arm] is not None:
        fewbit.compress_(model, verbose=False, **ARMS[arm])
    first = 1000 * seed + (OTHER_BATCHES if arm == "other batches" else 0)
    optimizer = torch.optim.Adam(model.parameters(), network.rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    torch.manual_seed(seed)
    saved = fewbit.saved_bytes(model, network.batch(first)[0]).total
    for step in range(steps):
        optimizer.zero_grad()
        network.loss(model, *network.batch(first + step)).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        losses = [network.loss(model, *batch).item() for batch in held_out(name)]
    return {"final": statistics.fmean(losses), "saved_bytes": saved}


def summary(rows):
    """Yield a row for each network and arm, with the mean difference from exact runs with the same seeds."""
    finals = {(row["network"], row["arm"], row["seed"]): row["final"] for row in rows}
    for name in quantizer_choice.networks():
        for arm in ARMS:
            own = [r for r in rows if (r["network"], r["arm"]) == (name, arm)]
            pairs = [(r["final"], finals.get((name, "exact", r["seed"]))) for r in own]
            differences = [final - exact for final, exact in pairs if exact is not None]
            if differences:
                yield {
                    "network": name,
                    "arm": arm,
                    "seeds": len(differences),
                    "saved_bytes": own[0]["saved_bytes"],
                    "exact": statistics.fmean(exact for _, exact in pairs if exact is not None),
                    "final": statistics.fmean(final for final, _ in pairs),
                    "difference": statistics.fmean(differences),
                    "difference_std": statistics.stdev(differences)
                    if len(differences) > 1
                    else None,
                }


def show(records):
    form = "{:27} {:20} {:>5} {:>10} {:>8} {:>20}"
    print(form.format("network", "arm", "seeds", "bytes", "loss", "minus exact"))
    for r in records:
        spread = "" if r["difference_std"] is None else f" ± {r['difference_std']:.4f}"
        difference = f"{r['difference']:+.4f}{spread}"
        first = r["network"], r["arm"], r["seeds"], r["saved_bytes"], f"{r['final']:.4f}"
        print(form.format(*first, difference))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    names = list(quantizer_choice.networks())
    parser.add_argument("--networks", nargs="+", choices=names, default=names, metavar="NETWORK")
    arguments = parser.parse_args()
    name = "quantizer_training" + "_quick" * arguments.quick
    tasks = [
        {"network": network, "arm": arm, "seed": seed}
        for seed in range(1 if arguments.quick else arguments.seeds)
        for network in arguments.networks
        for arm in arguments.arms
    ]
    steps = 3 if arguments.quick else STEPS
    about = harness.machine("torch", "transformers") | {"fewbit": fewbit.__version__}
    rows = harness.run_missing(name, about, run, tasks, arguments.jobs, steps)
    records = list(summary(rows))
    harness.save(name + "_summary", about, records)
    show(records)


if __name__ == "__main__":
    main()
