"""Levels of compression at equal average bits: gradient variance, final losses, and few-bit activations with ActNN.

    python benchmarks/adaptive_bits.py            # about 35 minutes on 2 cores
    python benchmarks/adaptive_bits.py --quick    # one seed, few bits and steps, to check that it works
    python benchmarks/adaptive_bits.py --plot     # the pictures from stored results

This is ActNN's figure 5, on the demo's transformer and a ResNet for 8 by 8 digits. The methods are one range per
tensor, and levels L2, L2.5 and L3, with the same average bits for attention and other layers. Activations have 3 bits,
or for ReLU 1, which is exact. On digits, levels L2.5 and L3 are also measured with numbered samples. In addition, this
is appendix E of the few-bit paper, on the transformer and the ResNet with GELU: GELU uses a few-bit table, or saves
its input quantized, while the other layers are at level L3 with the same bits. `adaptive_arms.py` explains the
methods.

Runs with the same seed have the same initial parameters and batches, so losses are compared in pairs. Gradients are
those of one batch, at the weights that exact training has after a quarter of its steps and at its end. L3 adapts its
bits on other batches before, while the weights are fixed. Runs whose results are stored are not repeated, except for
methods named after --again.

Writes results/adaptive_bits.* (a row for each training run), adaptive_bits_gradients.* (a row for each network, seed,
point of the training, method and number of bits), a summary of each (*_summary.*), and docs/images/adaptive_bits_*.png
(`adaptive_plots.py`).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from itertools import islice

import adaptive_arms as arms
import adaptive_plots
import compressed_training
import digits_resnet
import harness
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fewbit
from fewbit.demo import text, training
from fewbit.runtime.saved.context import measuring

NETWORKS = {
    "transformer": arms.LEVELS | {arms.TABLES: arms.WHOLE, arms.QUANTIZED: arms.WHOLE},
    "resnet": arms.LEVELS | arms.NUMBERED,
    "gelu resnet": arms.ACTIVATIONS,
}
SAMPLING = "sampling", 0  # stands for (method, bits) in rows of the variance between batches
POINTS = ("a quarter", "the end")
SEEDS = 3
STEPS = 300  # of the transformer
PAIRS = 16  # pairs of gradients from which a variance is estimated
ADAPTATION_STEPS = 40
NUMBERED_STEPS = 70  # three epochs of digits. The next observed step, 128, comes after all PAIRS.


def settings_of(quick):
    return training.Settings(steps=20 if quick else STEPS)


def build(network, seed, settings):
    if network == "gelu resnet":
        return digits_resnet.build(nn.GELU, seed)
    return compressed_training.build(network, seed, settings)


def batches(network, settings, seed):
    """Yield batches (inputs, labels) of training steps without end."""
    generator = torch.Generator().manual_seed(seed)
    while network == "transformer":
        yield text.python_topics().batch(settings.batch, settings.context, generator)
    while True:
        yield from digits_resnet.batches(generator)


def train(network, model, seed, settings, progress=lambda step: None):
    kind = "transformer" if network == "transformer" else "resnet"
    result = compressed_training.train(kind, model, seed, settings, progress)
    result.pop("tenths", None)  # of the run, not needed here
    return result


def run(network, method, bits, seed, quick):
    """Train a network in this process, with one thread. Return the row of the run; its saved_bytes are those of a step at the end."""
    torch.set_num_threads(1)
    settings = settings_of(quick)
    model = build(network, seed, settings)
    arms.compress(model, method, bits)
    result = train(network, model, seed, settings)
    inputs, labels = next(batches(network, settings, 0))
    classes = model(inputs).shape[-1]
    kept = fewbit.saved_bytes(model, inputs).total
    finite = {name: value if math.isfinite(value) else None for name, value in result.items()}
    return {
        "network": network,
        "method": method,
        "bits": bits,
        "seed": seed,
        "saved_bytes": kept,
        "diverged": finite["final"] is None or finite["final"] >= math.log(classes),
        **finite,
    }


# -- Gradients -----------------------------------------------------------------------------------------------


def gradient(model, inputs, labels):
    """Return the gradient of all parameters as one float64 vector."""
    model.zero_grad()
    cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()]).double()


def spread_of(draw, exact, pairs):
    """Estimate the variance of random gradients, and their mean squared error, both divided by |exact gradient|^2.

    Args:
        draw: A function that returns a random gradient, a vector.
        exact: The exact gradient, a vector.
        pairs: The number of pairs of gradients from which the variance is estimated.

    Returns:
        {"variance", "variance_error", "error", "error_error"}: the two means over pairs, with their standard errors.
    """
    size = exact.square().sum()
    variances, errors = [], []
    for _ in range(pairs):
        a, b = draw(), draw()
        variances.append(((a - b).square().sum() / 2 / size).item())
        off = (a - exact).square().sum() + (b - exact).square().sum()
        errors.append((off / 2 / size).item())
    row = {}
    for name, values in (("variance", variances), ("error", errors)):
        row[name] = statistics.fmean(values)
        row[name + "_error"] = statistics.stdev(values) / math.sqrt(pairs)
    return row


def gradients(network, seed, quick, known):
    """Return a row for each (method, bits) that is not in `known`, at the weights of one exact training run."""
    torch.set_num_threads(1)
    settings = settings_of(quick)
    exact, states = build(network, seed, settings), []
    quarter = settings.steps // 4
    if network != "transformer":
        quarter = (
            digits_resnet.EPOCHS * (len(digits_resnet.digits()[1]) // digits_resnet.BATCH) // 4
        )

    def progress(step):
        if step == quarter:
            states.append(copy.deepcopy(exact.state_dict()))

    train(network, exact, seed, settings, progress)
    states.append(exact.state_dict())
    rows = []
    for point, state in zip(POINTS, states, strict=True):
        for row in at_point(network, seed, settings, state, quick, known):
            rows.append({"network": network, "point": point, **row, "seed": seed})
    return rows


def at_point(network, seed, settings, state, quick, known):
    pairs = 2 if quick else PAIRS

    def at(method, bits):
        model = build(network, seed, settings)
        model.load_state_dict(state)
        arms.compress(model, method, bits)
        return model

    inputs, labels = next(batches(network, settings, 1000 + seed))
    model = at("exact", 0)
    exact = gradient(model, inputs, labels)
    if SAMPLING not in known:
        others = batches(network, settings, 2000 + seed)
        sampled = spread_of(lambda: gradient(model, *next(others)), exact, pairs)
        method, bits = SAMPLING
        yield {"method": method, "bits": bits, **sampled}

    for method, bits in methods(network, quick):
        if (method, bits) in known:
            continue
        model = at(method, bits)
        torch.manual_seed(seed)
        for batch in islice(batches(network, settings, 3000 + seed), adaptation_steps(method)):
            gradient(model, *batch)
        # Numbered samples' gradient magnitudes take effect only in training steps, so no measurement is announced.
        with nullcontext() if method in arms.NUMBERED else measuring():
            found = spread_of(lambda model=model: gradient(model, inputs, labels), exact, pairs)
        yield {"method": method, "bits": bits, **found}


def adaptation_steps(method):
    if method in arms.NUMBERED:
        return NUMBERED_STEPS
    return 0 if method in ("L2", "L2.5") else ADAPTATION_STEPS


def check():
    """Assert that every method is close to the exact gradient at 8 bits."""
    for network, methods_of in NETWORKS.items():
        settings = training.Settings()
        batch = next(batches(network, settings, 0))
        exact = gradient(build(network, 0, settings), *batch)
        for method in methods_of:
            model = build(network, 0, settings)
            arms.compress(model, method, 8)
            error = (gradient(model, *batch) - exact).norm() / exact.norm()
            assert 1e-6 < error < 0.1, f"{network}, {method}: wrong backward pass ({error:.3g})"


# -- All of them ---------------------------------------------------------------------------------------------


def methods(network, quick):
    """Yield the (method, bits) of a network, only a few if `quick` is true."""
    for method, bits in NETWORKS[network].items():
        for each in bits:
            if not quick or each in (1.5, 2):
                yield method, each


def summary(rows):
    """Yield a row for each network, method and number of bits: bytes, final losses, and their differences from exact.

    Differences are taken in pairs of runs with the same seed.
    """
    exact = {(row["network"], row["seed"]): row for row in rows if row["method"] == "exact"}
    grouped = {}
    for row in rows:
        if (row["network"], row["seed"]) in exact:
            grouped.setdefault((row["network"], row["method"], row["bits"]), []).append(row)
    for (network, method, bits), own in sorted(grouped.items()):
        record = {
            "network": network,
            "method": method,
            "bits": bits,
            "seeds": len(own),
            "diverged": sum(row["diverged"] for row in own),
            "saved_bytes": own[0]["saved_bytes"],
        }
        for name in ("final", "train", "accuracy"):
            if own[0].get(name) is None or any(row[name] is None for row in own):
                continue
            values = [row[name] for row in own]
            off = [row[name] - exact[network, row["seed"]][name] for row in own]
            record[name] = statistics.fmean(values)
            record[name + "_difference"] = statistics.fmean(off)
            if len(own) > 1:
                record[name + "_difference_std"] = statistics.stdev(off)
        yield record


def gradients_summary(measured):
    """Yield a row for each network, point, method and number of bits, with means and extremes over seeds."""
    grouped = {}
    for row in measured:
        key = row["network"], row["point"], row["method"], row["bits"]
        grouped.setdefault(key, []).append(row)
    for (network, point, method, bits), own in sorted(grouped.items()):
        record = {"network": network, "point": point, "method": method, "bits": bits}
        record["seeds"] = len(own)
        for name in ("variance", "error"):
            values = [row[name] for row in own]
            record[name] = statistics.fmean(values)
            record[name + "_least"], record[name + "_greatest"] = min(values), max(values)
        yield record


def show(records, measured):
    for r in records:
        print(
            f"{r['network']:12} {r['method']:22} {r['bits']:5} bits, {r['seeds']} seeds, "
            f"{r['saved_bytes'] or 0:9} bytes: final {r.get('final', math.nan):.4f}, minus exact "
            f"{r.get('final_difference', math.nan):+.4f} ± {r.get('final_difference_std', 0):.4f}"
            + f", {r['diverged']} diverged"
            * bool(r["diverged"])
        )
    for r in measured:
        print(
            f"{r['network']:12} {r['point']:10} {r['method']:22} {r['bits']:5} bits: variance "
            f"{r['variance']:.4g} ({r['variance_least']:.4g} .. {r['variance_greatest']:.4g}), "
            f"error {r['error']:.4g}"
        )


def load(name):
    path = harness.RESULTS / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plot", action="store_true", help="run nothing")
    parser.add_argument(
        "--again", nargs="+", default=(), metavar="METHOD", help="forget results of these"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    arguments = parser.parse_args()
    quick = arguments.quick
    name = "adaptive_bits" + "_quick" * quick
    rows, measured = (
        [row for row in load(each) if row["method"] not in arguments.again]
        for each in (name, name + "_gradients")
    )
    about = harness.machine("torch", "scikit-learn") | {"fewbit": fewbit.__version__}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    if not arguments.plot:
        check()
        work(name, about, rows, measured, quick, arguments.jobs)
    summaries = list(summary(rows)), list(gradients_summary(measured))
    if not arguments.plot:
        for suffix, records in zip(("_summary", "_gradients_summary"), summaries, strict=True):
            harness.save(name + suffix, about, records)
    show(*summaries)
    images = harness.RESULTS if quick else harness.IMAGES
    adaptive_plots.plot(rows, measured, images, name)


def work(name, about, rows, measured, quick, jobs):
    """Run the trainings and measurements whose results are not stored, seed after seed, and store their results."""
    done = {(row["network"], row["method"], row["bits"], row["seed"]) for row in rows}
    known = {}
    for row in measured:
        of_network = known.setdefault((row["network"], row["seed"]), set())
        of_network.add((row["method"], row["bits"]))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        running = {}
        for seed in range(1 if quick else SEEDS):
            for network in NETWORKS:
                each_method = list(methods(network, quick))
                there = known.get((network, seed), set())
                if not there >= {SAMPLING, *each_method}:
                    running[pool.submit(gradients, network, seed, quick, there)] = measured
                for each in (("exact", 0), *each_method):
                    if (network, *each, seed) not in done:
                        running[pool.submit(run, network, *each, seed, quick)] = rows
        for number, future in enumerate(as_completed(running), 1):
            found = future.result()
            if running[future] is rows:
                rows.append(found)
                print(f"{number}/{len(running)}", found, flush=True)
                harness.save(name, about, rows)
            else:
                measured += found
                print(f"{number}/{len(running)} gradients of {found[0]['network']}", flush=True)
                harness.save(name + "_gradients", about, measured)


if __name__ == "__main__":
    main()
