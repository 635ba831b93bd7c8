"""Levels of compression at equal average bits: gradient variance, final losses, and few-bit activations with ActNN.

    python benchmarks/adaptive_bits.py            # about 35 minutes on 2 cores
    python benchmarks/adaptive_bits.py --quick    # one seed, few bits and steps, to see that it works
    python benchmarks/adaptive_bits.py --plot     # the pictures again, from the results

ActNN's figure 5 on the demo's transformer and a ResNet on 8 by 8 digits: quantized inputs with one range a tensor, at
levels L2, L2.5 and L3, the same average of bits for attention and the rest; activations keep 3 bits in all (1, which is
exact, for ReLU). On digits also levels L2.5 and L3 that are told which digits a batch has. And appendix E of the few-bit paper, on the transformer and the ResNet with GELU: GELU with few-bit
tables, or with its input quantized as layers' inputs are, the rest at level L3 with as many bits.
`adaptive_arms.py` has the details.

Losses are compared in pairs: the same seed gives the same parameters and batches. Gradients are those of one batch at
the weights that exact training has after a quarter of its steps and at its end; L3 adapts on other batches there, at
fixed weights. What is in the results already is not run again, but for methods named after --again.

Writes results/adaptive_bits.* (a row a training run), adaptive_bits_gradients.* (a row for each network, seed, point and
arm), a summary of each, *_summary.*, and docs/images/adaptive_bits_*.png (`adaptive_plots.py`).
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
SAMPLING = "sampling", 0  # of batches, in the place of a method and bits
POINTS = ("a quarter", "the end")
SEEDS = 3
STEPS = 300  # of the transformer
PAIRS = 16  # of gradients, for a variance
ADAPTATION_STEPS = 40
NUMBERED_STEPS = 70  # three epochs of digits; the next observation is in step 128, after all PAIRS


def settings_of(quick):
    return training.Settings(steps=20 if quick else STEPS)


def build(network, seed, settings):
    if network == "gelu resnet":
        return digits_resnet.build(nn.GELU, seed)
    return compressed_training.build(network, seed, settings)


def batches(network, settings, seed):
    """(inputs, labels) of training steps, without end."""
    generator = torch.Generator().manual_seed(seed)
    while network == "transformer":
        yield text.python_topics().batch(settings.batch, settings.context, generator)
    while True:
        yield from digits_resnet.batches(generator)


def train(network, model, seed, settings, progress=lambda step: None):
    kind = "transformer" if network == "transformer" else "resnet"
    return compressed_training.train(kind, model, seed, settings, progress)


def run(network, method, bits, seed, quick):
    """The row of one training run, in a process of its own thread.

    saved_bytes: of a step at the end; None where they would not be those of a real implementation.
    """
    torch.set_num_threads(1)
    settings = settings_of(quick)
    model = build(network, seed, settings)
    arms.compress(model, method, bits)
    result = train(network, model, seed, settings)
    inputs, labels = next(batches(network, settings, 0))
    classes = model(inputs).shape[-1]
    kept = None if method == "per tensor" else fewbit.saved_bytes(model, inputs).total
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
    """float64, of all parameters."""
    model.zero_grad()
    cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()]).double()


def spread_of(draw, exact, pairs):
    """Variance of the gradients that `draw` makes, and their squared distance to the exact one, over its square.

    Means over pairs of draws, with their standard errors.
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
    """Rows of all arms but `known` ones, (method, bits), at the weights of one exact training run."""
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
        # What is remembered of numbered samples counts in steps of training alone.
        with nullcontext() if method in arms.NUMBERED else measuring():
            found = spread_of(lambda model=model: gradient(model, inputs, labels), exact, pairs)
        yield {"method": method, "bits": bits, **found}


def adaptation_steps(method):
    if method in arms.NUMBERED:
        return NUMBERED_STEPS
    return 0 if method in ("per tensor", "L2", "L2.5") else ADAPTATION_STEPS


def check():
    """Every way of keeping tensors comes close to the exact gradient at 8 bits."""
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
    """(method, bits), few of them if quick."""
    for method, bits in NETWORKS[network].items():
        for each in bits:
            if not quick or each in (1.5, 2):
                yield method, each


def summary(rows):
    """Per network, method and bits: bytes, final losses, and their paired differences to exact."""
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
    """Per network, point, method and bits: means over seeds, with the least and the greatest."""
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
    """Runs what is not in the results, seed after seed, and adds it."""
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
