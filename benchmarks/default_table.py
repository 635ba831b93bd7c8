"""Which table should a layer use by default? Gradient errors, then final losses, on three small networks.

    python benchmarks/default_table.py              # everything, about 40 minutes on 2 cores
    python benchmarks/default_table.py --quick      # one seed, a few steps, to check that it works
    python benchmarks/default_table.py --pretrained # MiniLM with its pretrained weights; see pretrained_networks.py

The networks are the demo's transformer with GELU, and a ResNet for 8 by 8 digits with GELU and with SiLU. First,
gradients of whole models with each table are compared with exact gradients, before and after training. Then models are
trained with the tables in CONTENDERS. Runs with the same seed have the same initial parameters and batches, so they
are compared in pairs. Measurements whose results are stored are not repeated. docs/decisions/0005 draws the
conclusion.

Writes results/default_table_gradients.json, default_table_training.* and default_table_pretrained.*. The last one has the errors of
MiniLM's gradient if the GELUs alone are few-bit functions (`pretrained.py` explains the numbers); tables are fitted to each layer's
pre-activations in two other batches. The pre-activations to which tables are fitted
are stored in build/default_table/.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from pathlib import Path

import digits_resnet
import harness
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fewbit
from fewbit.demo import text, training

NETWORKS = {"transformer_gelu": "gelu", "resnet_gelu": "gelu", "resnet_silu": "silu"}
SEEDS = {"transformer_gelu": 5, "resnet_gelu": 10, "resnet_silu": 10}
EXACT = {"gelu": nn.GELU, "silu": nn.SiLU}
FEWBIT = {"gelu": fewbit.GELU, "silu": fewbit.SiLU}

WEIGHTS, TAILS, OBJECTIVES, BITS = (
    ("uniform", "normal", "scales", "fitted"),
    ("free", "pinned"),
    ("mse", "unbiased"),
    (1, 2, 3, 4),
)
CONTENDERS = (
    ("uniform", "free", "mse"),
    ("normal", "free", "mse"),
    ("scales", "free", "mse"),
    ("fitted", "free", "mse"),
    ("uniform", "pinned", "mse"),
    ("uniform", "free", "unbiased"),
)
TRAINED_BITS = (1, 2, 3)
BATCHES, DRAWS = 8, 8
SAMPLES = 200_000


# ---------------------------------------------------------------------------------------------------------
# The networks


@cache
def corpus():
    return text.python_topics()


def settings(quick):
    return training.Settings(steps=20) if quick else training.Settings()


def build(network, activation, seed, quick):
    if network.startswith("resnet"):
        return digits_resnet.build(activation, seed)
    return training.build(corpus(), settings(quick), activation, seed)


def train(network, model, seed, quick):
    if network.startswith("resnet"):
        return digits_resnet.train(model, seed)
    run = training.train(model, corpus(), settings(quick), seed)
    return {"final": run.final, "train": float(np.mean(run.train[-20:]))}


def batches(network, count, quick):
    """Yield (inputs, a function from the model's output to the loss) for `count` batches that no training run uses."""
    generator = torch.Generator().manual_seed(1_000_003)
    if network.startswith("resnet"):
        for _, (images, labels) in zip(
            range(count), digits_resnet.batches(generator), strict=False
        ):
            yield images, partial(cross_entropy, target=labels)
        return
    s = settings(quick)
    for _ in range(count):
        characters, following = corpus().batch(s.batch, s.context, generator)
        yield characters, lambda y, t=following: cross_entropy(y.flatten(0, 1), t.flatten())


def activations(network, model):
    """Return the model's activation modules."""
    kinds = (EXACT[NETWORKS[network]], FEWBIT[NETWORKS[network]])
    return [module for module in model.modules() if isinstance(module, kinds)]


def pre_activations(network, model, quick):
    """Return a random sample of the inputs of all activations, (SAMPLES,) float32."""
    seen = []
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
        for module in activations(network, model)
    ]
    with torch.no_grad():
        for inputs, _ in batches(network, 4, quick):
            model(inputs)
    for hook in hooks:
        hook.remove()
    values = torch.cat([each.flatten() for each in seen])
    chosen = torch.randint(len(values), (SAMPLES,), generator=torch.Generator().manual_seed(0))
    return values[chosen].numpy()


# ---------------------------------------------------------------------------------------------------------
# Tables


def table(network, work, weight, tails, objective, bits):
    """Return a table. The weight "fitted" is the pre-activations of seed 0's exact network before and after training.

    `work` is the folder of the pre-activations.
    """
    if weight == "fitted":
        weight = np.concatenate([np.load(work / f"{network}_{when}.npy") for when in WHEN])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fewbit.load_table(
            NETWORKS[network], bits, weight=weight, tails=tails, objective=objective
        )


WHEN = ("start", "end")


def prepare(network, work, quick):
    """Train the exact network of seed 0. Store its parameters and pre-activations before and after the training."""
    if (work / f"{network}_end.npy").exists():
        return
    model = build(network, EXACT[NETWORKS[network]], 0, quick)
    for when in WHEN:
        if when == "end":
            train(network, model, 0, quick)
        torch.save(model.state_dict(), work / f"{network}_{when}.pt")
        np.save(work / f"{network}_{when}.npy", pre_activations(network, model, quick))


# ---------------------------------------------------------------------------------------------------------
# Gradient errors


def gradient(network, model, inputs, loss):
    """Return two flat gradients: that of the weights of layers just before activations, and that of all parameters."""
    model.zero_grad()
    loss(model(inputs)).backward()
    named = {name: each.grad.flatten().clone() for name, each in model.named_parameters()}
    below = [grad for name, grad in named.items() if is_below(network, name)]
    return torch.cat(below), torch.cat(list(named.values()))


def is_below(network, name):
    """Return whether a parameter is the weight of a linear layer or 3x3 convolution before an activation."""
    if network.startswith("resnet"):
        return name == "0.weight" or ".body." in name and name.endswith(("0.weight", "3.weight"))
    return name.endswith("mlp.0.weight")


def relative(error, exact):
    return (error.double().norm() / exact.double().norm()).item()


def gradient_errors(network, work, when, choice, bits, quick):
    """Return relative L2 errors of the gradient with a table, averaged over batches and draws.

    Keys that end in `_of_mean` have the error of the mean gradient over all batches and draws.
    """
    weight, tails, objective = choice
    try:
        chosen = table(network, work, weight, tails, objective, bits)
    except fewbit.FewbitError as error:
        return {"refused": str(error)}
    few = build(network, partial(FEWBIT[NETWORKS[network]], bits=bits, table=chosen), 0, quick)
    exact = build(network, EXACT[NETWORKS[network]], 0, quick)
    state = torch.load(work / f"{network}_{when}.pt")
    draws = DRAWS if objective == "unbiased" else 1
    errors = {part: [] for part in ("below", "model")}
    sums = {}
    torch.manual_seed(0)
    for inputs, loss in batches(network, 2 if quick else BATCHES, quick):
        exact.load_state_dict(state)
        wanted = gradient(network, exact, inputs, loss)
        for _ in range(draws):
            few.load_state_dict(state)  # restores the running means of batch norm too
            got = gradient(network, few, inputs, loss)
            for part, g, e in zip(errors, got, wanted, strict=True):
                errors[part].append(relative(g - e, e))
                mean = sums.setdefault(part, [torch.zeros_like(e), torch.zeros_like(e)])
                mean[0] += g - e
                mean[1] += e
    result = {f"{part}_error": float(np.mean(each)) for part, each in errors.items()}
    result |= {f"{part}_error_of_mean": relative(*sums[part]) for part in sums}
    return result | {"table_error": chosen.error, "levels": len(chosen.levels)}


# ---------------------------------------------------------------------------------------------------------
# Final losses


def training_run(network, work, choice, bits, seed, quick):
    activation = EXACT[NETWORKS[network]]
    if bits:
        activation = partial(
            FEWBIT[NETWORKS[network]], bits=bits, table=table(network, work, *choice, bits)
        )
    return train(network, build(network, activation, seed, quick), seed, quick)


# ---------------------------------------------------------------------------------------------------------
# The order of work


def jobs(quick):
    """Yield (results file, key, function) for each measurement, seed after seed, so that pairs end early."""
    networks = list(NETWORKS)
    for network in networks:
        for when in WHEN:
            for objective in OBJECTIVES:
                for tails in TAILS:
                    for weight in WEIGHTS:
                        for bits in BITS:
                            key = dict(
                                network=network,
                                when=when,
                                weight=weight,
                                tails=tails,
                                objective=objective,
                                bits=bits,
                            )
                            yield "gradients", key, gradient_errors
    for seed in range(1 if quick else max(SEEDS.values())):
        for network in networks:
            if seed >= SEEDS[network]:
                continue
            for choice, bits in [(("exact",) * 3, 0)] + [
                (choice, bits) for bits in TRAINED_BITS for choice in CONTENDERS
            ]:
                weight, tails, objective = choice
                key = dict(
                    network=network,
                    weight=weight,
                    tails=tails,
                    objective=objective,
                    bits=bits,
                    seed=seed,
                )
                yield "training", key, training_run


PRETRAINED = (
    ("uniform", "free"),
    ("normal", "free"),
    ("scales", "free"),
    ("fitted", "free"),
    ("uniform", "pinned"),
    ("scales", "pinned"),
)


def pretrained_errors():
    """Return rows with the error, scale and bias of MiniLM's gradient for tables of GELU."""
    import pretrained
    import pretrained_networks
    from transformers.activations import GELUActivation

    network = pretrained_networks.minilm()
    batch = network.batch(0)
    exact = pretrained.gradient(network, batch)
    places = [
        (module, name)
        for module in network.model.modules()
        for name, child in module.named_children()
        if isinstance(child, GELUActivation)
    ]
    assert len(places) == network.depth
    samples = _inputs_of(places, lambda: [network.loss(network.batch(other)) for other in (1, 2)])
    rows = []
    for bits in BITS:
        for weight, tails in PRETRAINED:
            for (module, name), own in zip(places, samples, strict=True):
                given = own if weight == "fitted" else weight
                chosen = fewbit.load_table("gelu", bits, weight=given, tails=tails)
                setattr(module, name, fewbit.GELU(bits=bits, table=chosen))
            found = pretrained.measured(network, batch, exact, 1)
            rows.append({"bits": bits, "weight": weight, "tails": tails} | found)
            print(rows[-1], flush=True)
    return rows


def _inputs_of(places, run) -> list[np.ndarray]:
    """Return the inputs that modules, given as (parent, name), get while a function runs."""
    seen = [[] for _ in places]
    hooks = [
        getattr(parent, name).register_forward_pre_hook(
            lambda _, inputs, own=own: own.append(inputs[0].detach().flatten().numpy().copy())
        )
        for (parent, name), own in zip(places, seen, strict=True)
    ]
    run()
    for hook in hooks:
        hook.remove()
    return [np.concatenate(own) for own in seen]


def work_on(key, call, work, quick):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    choice = key["weight"], key["tails"], key["objective"]
    if call is gradient_errors:
        return call(key["network"], work, key["when"], choice, key["bits"], quick)
    return call(key["network"], work, choice, key["bits"], key["seed"], quick)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--only", choices=["gradients", "training"])
    arguments = parser.parse_args()
    if arguments.pretrained:
        about = harness.machine("torch", "transformers") | {"fewbit": fewbit.__version__}
        harness.save("default_table_pretrained", about, pretrained_errors())
        return
    quick = arguments.quick
    work = Path("build") / ("default_table_quick" if quick else "default_table")
    work.mkdir(parents=True, exist_ok=True)
    if quick:
        harness.RESULTS = work
    torch.set_num_threads(1)
    for network in NETWORKS:
        prepare(network, work, quick)
    about = harness.machine("torch", "numpy", "scikit-learn") | {"fewbit": fewbit.__version__}
    rows, done = {}, set()
    for name in ("gradients", "training"):
        path = harness.RESULTS / f"default_table_{name}.json"
        rows[name] = json.loads(path.read_text())["rows"] if path.exists() else []
    todo = []
    for name, key, call in jobs(quick):
        finished = {tuple(row[field] for field in key) for row in rows[name]}
        if tuple(key.values()) not in finished and arguments.only in (None, name):
            todo.append((name, key, call))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        running = {
            pool.submit(work_on, key, call, work, quick): (name, key) for name, key, call in todo
        }
        for number, future in enumerate(as_completed(running), 1):
            name, key = running[future]
            rows[name].append(key | future.result())
            done.add(name)
            if number % 20 == 0 or number == len(todo):
                for each in done:
                    harness.save(f"default_table_{each}", about, rows[each])
                done.clear()
            print(f"{number}/{len(todo)}", name, rows[name][-1], flush=True)


if __name__ == "__main__":
    main()
