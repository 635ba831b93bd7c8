"""Fine-tuning of pretrained networks with few bits: held-out losses over several seeds, memory and time.

    python benchmarks/finetuning.py                    # everything; many hours on one core. Runs that are stored are not repeated
    python benchmarks/finetuning.py --tasks lora --seeds 1 --arms exact "2 bits"
    python benchmarks/finetuning.py --costs            # only memory and times of a step: about 20 minutes
    python benchmarks/finetuning.py --costs --tasks digits --rounds 20   # of steps that are short
    python benchmarks/finetuning.py --summary          # only the summary and the pictures, from what is stored
    python benchmarks/finetuning.py --quick            # a few steps, to check that it works

networks/pretrained_networks.py says how the weights are installed. The tasks:

- lora, full: SmolLM2-135M learns the source code of Python's standard library, by adapters of rank 8 at all linear layers of the
  blocks, or by all parameters.
- sentences: all-MiniLM-L6-v2 learns which of 8 passages of Python's help texts follows a passage (a contrastive loss).
- digits: EfficientNet-lite0 learns scikit-learn's images of digits, 64 by 64 pixels, with a new last layer.

Runs with the same seed have the same batches and the same new parameters, so they are compared in pairs. The held-out loss, in
nats per token, passage or image, is the mean over data that no run trains on. "checkpointing" is torch's. Its gradients are
exact, so it is not trained. In "checkpoint_, 8 bits" each block is a checkpointed region whose input has 8 bits.

Steps of all arms take turns, and "time" is the ratio of the median to the median of exact training, in processor time of one
thread. "mib" is what a forward pass saves for the backward pass, and "peak_mib" the most that a forward and a backward pass
allocate, with gradients.

Writes results/finetuning.json (rows of runs, which have a seed, and of costs), results/finetuning_summary.json and
docs/images/finetuning_*.png. "detectable" is the difference that a two-sided test of 5 % notices with a power of 80 %,
if its standard error is that of the row.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import harness
import torch
from networks import pretrained_networks
from rivals.step_bytes import step_bytes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fewbit

SEEDS = 3
EVERY = 25
"""The held-out loss is measured after so many steps."""
SAMPLES, TOKENS, HELD_OUT, RANK = 2, 128, 12, 8
ROUNDS = 4
MIB = 2**20


class FineTuning(NamedTuple):
    """A model to fine-tune, and its data.

    Attributes:
        model: in training mode.
        loss: a function of the model and a batch. It returns the loss, a scalar.
        batches: batches without end.
        held_out: batches on which no run trains.
        rate: the learning rate of AdamW.
        steps: the number of training steps.
        blocks: the last part of the path of the list of the model's blocks.
        decays: whether the learning rate falls to zero, linearly.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Tensor], Tensor]
    batches: Iterator
    held_out: list
    rate: float
    steps: int
    blocks: str
    decays: bool = False

    def optimizer(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.rate, weight_decay=0.0)

    def evaluate(self) -> float:
        """Return the mean loss on the held-out batches."""
        self.model.eval()
        with torch.no_grad():
            found = [self.loss(self.model, batch).item() for batch in self.held_out]
        self.model.train()
        return round(statistics.fmean(found), 5)


# -- SmolLM2 ----------------------------------------------------------------------------------------


@cache
def source_code(tokenizer) -> Tensor:
    """Return the tokens of the standard library's modules, in an order that depends on nothing but their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = "\n".join(path.read_text("utf-8", "ignore") for path in sorted(folder.glob("*.py")))
    return tokenizer(source[:3_000_000], return_tensors="pt", verbose=False).input_ids[0]


def language(adapters: bool, rate: float, seed: int) -> FineTuning:
    model, tokenizer = pretrained_networks.language_model()
    tokens = source_code(tokenizer)
    torch.manual_seed(seed)
    if adapters:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
        model = get_peft_model(model, config)
    first = len(tokens) * 9 // 10
    starts = torch.linspace(first, len(tokens) - TOKENS, 2 * HELD_OUT).long()

    def passages(starts):
        return torch.stack([tokens[start : start + TOKENS] for start in starts])

    def batches():
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield passages(torch.randint(first - TOKENS, (SAMPLES,), generator=generator))

    def loss(model, ids):
        return model(input_ids=ids, labels=ids).loss

    held_out = list(passages(starts).split(2))
    return FineTuning(model.train(), loss, batches(), held_out, rate, 200, ".layers")


# -- MiniLM and EfficientNet ------------------------------------------------------------------------


def sentences(seed: int) -> FineTuning:
    network = pretrained_networks.minilm(samples=8, tokens=32)
    first = network.batches * 9 // 10

    def batches():
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield network.batch(int(torch.randint(first, (), generator=generator)))

    held_out = [network.batch(number) for number in range(first, network.batches)]
    loss = pretrained_networks.contrastive_loss
    return FineTuning(network.model, loss, batches(), held_out, 2e-5, 50, "encoder.layer")


@cache
def images() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits as (1797, 3, 64, 64) images with values from -1 to 1, in random order, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.from_numpy(data.images).float().unsqueeze(1) / 8 - 1
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x = F.interpolate(x[order], size=64, mode="bilinear").expand(-1, 3, -1, -1)
    return x, torch.from_numpy(data.target)[order]


def digits(seed: int) -> FineTuning:
    model = pretrained_networks.image_model()
    torch.manual_seed(seed)
    model._fc = nn.Linear(model._fc.in_features, 10)
    # With 0.01, the momentum of the pretrained network, the running statistics would lag behind so few steps.
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    x, y = images()
    first = len(x) * 3 // 4

    def batches():
        generator = torch.Generator().manual_seed(seed)
        while True:
            chosen = torch.randint(first, (16,), generator=generator)
            yield x[chosen].contiguous(), y[chosen]

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    held_out = list(zip(x[first:].split(64), y[first:].split(64), strict=True))
    return FineTuning(model.train(), loss, batches(), held_out, 5e-4, 150, "_blocks", decays=True)


TASKS = {
    "lora": partial(language, True, 5e-4),
    "full": partial(language, False, 2e-5),
    "sentences": sentences,
    "digits": digits,
}
"""{name: a function of a seed. It returns a `FineTuning`}."""


# -- The arms ---------------------------------------------------------------------------------------


def compress(bits, model, blocks):
    fewbit.compress_(model, bits, verbose=False)


def checkpoint_blocks(model, blocks):
    (found,) = (module for path, module in model.named_modules() if path.endswith(blocks))
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


ARMS = {
    "exact": lambda model, blocks: None,
    "4 bits": partial(compress, 4),
    "3 bits": partial(compress, 3),
    "2 bits": partial(compress, 2),
    "AdaptiveBits(3)": partial(compress, fewbit.AdaptiveBits(3)),
    "checkpointing": checkpoint_blocks,
    "checkpoint_, 8 bits": lambda model, blocks: fewbit.checkpoint_(
        model, 8, include=f"*{blocks}.*"
    ),
}
"""{name: a function of a model and of `FineTuning.blocks`, which changes the model}."""
NOT_TRAINED = {"checkpointing"}


def run(task: str, arm: str, seed: int, steps: int | None) -> dict:
    """Train, and return the losses."""
    training = TASKS[task](seed)
    ARMS[arm](training.model, training.blocks)
    optimizer, steps = training.optimizer(), steps or training.steps
    last = 0.0 if training.decays else 1.0
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, last, training.steps)
    losses, held_out = [], {"0": training.evaluate()}
    for step, batch in zip(range(1, steps + 1), training.batches, strict=False):
        optimizer.zero_grad()
        loss = training.loss(training.model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(round(loss.item(), 5))
        if step % EVERY == 0 or step == steps:
            held_out[str(step)] = training.evaluate()
    return {"losses": losses, "held_out": held_out}


def costs(task: str, rounds: int) -> list[dict]:
    """Return a row for each arm: the bytes of a step, and its time relative to that of an exact step."""
    training = TASKS[task](0)
    batch = next(training.batches)
    # Copies share the parameters.
    shared = {id(p): p for p in (*training.model.parameters(), *training.model.buffers())}
    models = {arm: copy.deepcopy(training.model, dict(shared)) for arm in ARMS}
    times, rows = {arm: [] for arm in ARMS}, []
    for arm, model in models.items():
        ARMS[arm](model, training.blocks)

    def step(model):
        training.loss(model, batch).backward()

    for arm, model in models.items():
        for _ in range(4 if "Adaptive" in arm else 1):  # it measures in the steps 1, 2 and 4
            step(model)
    for _ in range(rounds):
        for arm, model in models.items():
            model.zero_grad(set_to_none=True)
            start = time.thread_time()
            step(model)
            times[arm].append(time.thread_time() - start)
    exact = statistics.median(times["exact"])
    for arm, model in models.items():
        saved, peak = step_bytes(model, partial(training.loss, model), (batch,))
        low, middle, high = statistics.quantiles(times[arm])
        rows.append(
            {
                "task": task,
                "arm": arm,
                "mib": round(saved / MIB, 2),
                "peak_mib": round(peak / MIB, 1),
                "time": round(middle / exact, 3),
                "quartiles": [round(low / exact, 3), round(high / exact, 3)],
            }
        )
        print(rows[-1], flush=True)
    return rows


def summary(rows) -> list[dict]:
    """Return a row for each task and arm: the costs, and the differences from exact training with the same seed.

    Runs may have different numbers of steps. They are compared after the steps that all of them have made.
    """
    from scipy import stats

    runs = {(row["task"], row["arm"], row["seed"]): row for row in rows if "seed" in row}
    found = []
    for row in rows:
        if "seed" in row:
            continue
        own = [
            (seed, run)
            for (*names, seed), run in runs.items()
            if names == [row["task"], row["arm"]]
        ]
        pairs = [(run, runs[row["task"], "exact", seed]) for seed, run in own]
        found.append({key: value for key, value in row.items() if key != "quartiles"})
        if not pairs:
            continue
        shortest = min((run["held_out"] for pair in pairs for run in pair), key=len)
        step = list(shortest)[-1]
        differences = [run["held_out"][step] - exact["held_out"][step] for run, exact in pairs]
        gains = [exact["held_out"]["0"] - exact["held_out"][step] for _, exact in pairs]
        found[-1] |= {
            "seeds": len(pairs),
            "steps": int(step),
            "final": round(statistics.fmean(run["held_out"][step] for run, _ in pairs), 4),
            "difference": round(statistics.fmean(differences), 5),
            "gain_of_exact": round(statistics.fmean(gains), 4),
        }
        if len(pairs) > 1 and row["arm"] != "exact":
            error = statistics.stdev(differences) / len(pairs) ** 0.5
            quantiles = stats.t.ppf([0.975, 0.8], len(pairs) - 1)
            found[-1] |= {
                "standard_error": round(error, 5),
                "detectable": round(error * float(quantiles.sum()), 4),
            }
    return found


def plot(rows) -> None:
    """Draw the held-out losses of SmolLM2, as means over seeds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    for task in ("lora", "full"):
        figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        for arm in ARMS:
            found = [
                row["held_out"]
                for row in rows
                if "seed" in row and (row["task"], row["arm"]) == (task, arm)
            ]
            if found:
                steps = list(min(found, key=len))
                means = [statistics.fmean(held[step] for held in found) for step in steps]
                label = f"{arm} ({len(found)} seeds)"
                axes.plot([int(step) for step in steps], means, label=label)
        axes.set(xlabel="steps", ylabel="held-out loss, nats")
        axes.legend(frameon=False)
        if axes.lines:
            figure.savefig(harness.IMAGES / f"finetuning_{task}.png", dpi=150)
        pyplot.close(figure)


def main(arguments=None):
    """Run the benchmark."""
    trained = [arm for arm in ARMS if arm not in NOT_TRAINED]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--arms", nargs="+", choices=trained, default=trained)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, help="fewer steps than by default")
    parser.add_argument("--costs", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="the steps that are timed")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    steps, rounds = (3, 2) if options.quick else (options.steps, options.rounds)
    name = "finetuning_quick" if options.quick else "finetuning"
    about = harness.machine("torch", "transformers", "peft")
    rows = harness.stored(name)

    def is_missing(**labels):
        return not any(labels.items() <= row.items() for row in rows)

    for seed in range(0 if options.summary or options.costs else options.seeds):
        for task in options.tasks:
            for arm in options.arms:
                if is_missing(task=task, arm=arm, seed=seed):
                    found = run(task, arm, seed, steps)
                    rows.append({"task": task, "arm": arm, "seed": seed} | found)
                    print(task, arm, seed, found["held_out"], flush=True)
                    harness.save(name, about, rows)
    for task in () if options.summary else options.tasks:
        if options.costs or not any(row["task"] == task and "time" in row for row in rows):
            rows = [row for row in rows if row["task"] != task or "seed" in row]
            rows += costs(task, rounds)
            harness.save(name, about, rows)
    harness.save(f"{name}_summary", about, summary(rows))
    if not options.quick:
        plot(rows)


if __name__ == "__main__":
    main()
