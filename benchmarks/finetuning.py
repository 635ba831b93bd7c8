"""Fine-tuning of a pretrained language model with few bits: losses compared with exact training over several seeds.

    python benchmarks/finetuning.py                    # everything; hours on two cores. Runs that are stored are not repeated
    python benchmarks/finetuning.py --ways lora --seeds 1 --arms exact "2 bits"
    python benchmarks/finetuning.py --quick            # a few steps, to check that it works
    python benchmarks/finetuning.py --plot             # only the summary and the pictures, from the stored runs

SmolLM2-135M with its pretrained weights (pretrained_networks.py says how they are installed) learns the source code of Python's
standard library. LoRA trains adapters of rank 8 at all linear layers of the blocks; full fine-tuning trains all parameters. Runs
with the same seed have the same batches and the same adapters, so they are compared in pairs. The held-out loss is the mean over
texts that no run trains on, in nats per token.

Writes results/finetuning.json (a row for each run, with its losses), results/finetuning_summary.json and docs/images/finetuning_*.png.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
from functools import cache
from pathlib import Path

import harness
import pretrained_networks
import torch

import fewbit

WAYS = {"lora": 5e-4, "full": 2e-5}
"""{the way to train: the learning rate of AdamW}."""
ARMS = {"exact": None, "4 bits": 4, "2 bits": 2}
"""{name of an arm: the bits of `compress_`}."""
SEEDS, STEPS, SAMPLES, TOKENS = 3, 200, 2, 128
EVERY = 25
"""The held-out loss is measured after so many steps."""
HELD_OUT = 12
RANK = 8
PICTURES = harness.RESULTS.parents[1] / "docs" / "images"


@cache
def text(tokenizer) -> torch.Tensor:
    """Return the tokens of the standard library's modules, in an order that depends on nothing but their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = "\n".join(path.read_text("utf-8", "ignore") for path in sorted(folder.glob("*.py")))
    return tokenizer(source[:3_000_000], return_tensors="pt", verbose=False).input_ids[0]


def batches(tokens: torch.Tensor, seed: int):
    """Yield (SAMPLES, TOKENS) without end, from the first nine tenths of the text."""
    generator = torch.Generator().manual_seed(seed)
    last = len(tokens) * 9 // 10 - TOKENS
    while True:
        starts = torch.randint(last, (SAMPLES,), generator=generator)
        yield torch.stack([tokens[start : start + TOKENS] for start in starts])


def held_out(tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return HELD_OUT batches (2, TOKENS) from the last tenth of the text."""
    first = len(tokens) * 9 // 10
    starts = torch.linspace(first, len(tokens) - TOKENS, 2 * HELD_OUT).long()
    rows = torch.stack([tokens[start : start + TOKENS] for start in starts])
    return list(rows.split(2))


def prepared(way: str, seed: int) -> tuple:
    """Return SmolLM2 in training mode, with adapters if it is trained by LoRA, and the tokens of the text."""
    model, tokenizer = pretrained_networks.language_model()
    tokens = text(tokenizer)
    torch.manual_seed(seed)
    if way == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
        model = get_peft_model(model, config)
    return model.train(), tokens


def optimizer_of(model, way: str) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that are trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=WAYS[way], weight_decay=0.0)


def run(way: str, arm: str, seed: int, steps: int) -> dict:
    """Train, and return the losses."""
    model, tokens = prepared(way, seed)
    if ARMS[arm] is not None:
        fewbit.compress_(model, ARMS[arm], verbose=False)
    optimizer = optimizer_of(model, way)
    first = next(batches(tokens, seed))
    saved = fewbit.saved_bytes(lambda: (model, model(input_ids=first, labels=first).loss)[1])
    losses, held = [], {0: evaluated(model, tokens)}
    for step, batch in zip(range(1, steps + 1), batches(tokens, seed), strict=False):
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 5))
        if step % EVERY == 0 or step == steps:
            held[step] = evaluated(model, tokens)
    return {
        "mib": round(saved.total / 2**20, 2),
        "final": held[steps],
        "losses": losses,
        "held_out": held,
    }


def evaluated(model, tokens) -> float:
    """Return the mean loss on the held-out batches."""
    model.eval()
    with torch.no_grad():
        found = [model(input_ids=x, labels=x).loss.item() for x in held_out(tokens)]
    model.train()
    return round(statistics.fmean(found), 5)


def summary(rows) -> list[dict]:
    """Return a row for each way and arm: the differences from exact training with the same seed."""
    found = []
    exact = {(row["way"], row["seed"]): row for row in rows if row["arm"] == "exact"}
    for way in WAYS:
        for arm in ARMS:
            runs = [row for row in rows if (row["way"], row["arm"]) == (way, arm)]
            runs = [row for row in runs if (way, row["seed"]) in exact]
            if not runs:
                continue
            differences = [row["final"] - exact[way, row["seed"]]["final"] for row in runs]
            gains = [exact[way, row["seed"]]["held_out"] for row in runs]
            gain = statistics.fmean(held["0"] - list(held.values())[-1] for held in gains)
            error = statistics.stdev(differences) / len(runs) ** 0.5 if len(runs) > 1 else None
            found.append(
                {
                    "way": way,
                    "arm": arm,
                    "seeds": len(runs),
                    "mib": runs[0]["mib"],
                    "final": round(statistics.fmean(row["final"] for row in runs), 4),
                    "difference": round(statistics.fmean(differences), 5),
                    "standard_error": None if error is None else round(error, 5),
                    "gain_of_exact": round(gain, 4),
                }
            )
            print(found[-1], flush=True)
    return found


def plot(rows) -> None:
    """Draw the held-out losses of each way to train, as means over seeds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    for way in WAYS:
        figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        for arm in ARMS:
            runs = [row["held_out"] for row in rows if (row["way"], row["arm"]) == (way, arm)]
            if runs:
                steps = list(runs[0])
                means = [statistics.fmean(held[step] for held in runs) for step in steps]
                axes.plot(list(map(int, steps)), means, label=f"{arm} ({len(runs)} seeds)")
        if not axes.lines:
            pyplot.close(figure)
            continue
        axes.set(xlabel="steps", ylabel="held-out loss, nats per token")
        axes.legend(frameon=False)
        figure.savefig(PICTURES / f"finetuning_{way}.png", dpi=150)
        pyplot.close(figure)


def main(arguments=None):
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plot", action="store_true")
    options = parser.parse_args(arguments)
    steps = 3 if options.quick else STEPS
    name = "finetuning_quick" if options.quick else "finetuning"
    about = harness.machine("torch", "transformers", "peft")
    rows = harness.stored(name)
    done = {(row["way"], row["arm"], row["seed"]) for row in rows}
    for seed in range(0 if options.plot else 1 if options.quick else options.seeds):
        for way in options.ways:
            for arm in options.arms:
                if (way, arm, seed) in done:
                    continue
                found = run(way, arm, seed, steps)
                # Keys of JSON are texts.
                found["held_out"] = {str(step): loss for step, loss in found["held_out"].items()}
                rows.append({"way": way, "arm": arm, "seed": seed} | found)
                print(way, arm, seed, found["mib"], found["final"], flush=True)
                harness.save(name, about, rows)
    harness.save(f"{name}_summary", about, summary(rows))
    if not options.quick:
        plot(rows)


if __name__ == "__main__":
    main()
