"""The step time and the peak memory of three compressed models, compared with the stored figures.

    make bench                                   # about 3 minutes on 2 cores; fails if a figure is worse
    python benchmarks/regression.py --update     # store the figures of this commit

Run it before and after a change to code that every step runs. Times are ratios of the processor time of one thread to that of exact training, whose steps
alternate with those of the compressed model, so that they hold on any machine of the same kind: the median, and its quartiles over the rounds. A ratio may be
10 % above the stored one. Peaks are those of a training step on fake tensors, which are the same on every machine, and may be 1 %
above. First, gradients at 8 bits are compared with exact gradients.

Writes results/regression.json with --update, else nothing.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import sys

import harness
import torch
from studies import host_time
from torch import nn
from torch.nn.functional import cross_entropy

import fewbit
from fewbit.demo.small_transformer import CharTransformer
from fewbit.models.resnet import ResNet
from fewbit.planning.fake_steps import FakeTraining

LIMITS = {"time": 1.10, "peak": 1.01}
"""The largest ratio of a figure to the stored one."""
SETTINGS = {"2 bits": 2, "4 bits": 4, "AdaptiveBits(2)": fewbit.AdaptiveBits(2, interval=10**6)}
ROUNDS = {"small steps": 300, "transformer": 12, "resnet18": 12}


def models() -> dict:
    """Return {name: (model, batch, loss)}."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*[host_time.Block(64) for _ in range(4)])
    characters = CharTransformer(96, 128, 256, 2, 8)
    tokens = torch.randint(96, (2, 16, 128))
    resnet = ResNet("resnet18", nn.ReLU, classes=10)
    images = torch.randn(8, 3, 112, 112), torch.randint(10, (8,))
    return {
        "small steps": (blocks, (torch.randn(4, 16, 64),), lambda model, x: model(x[0]).sum()),
        "transformer": (characters, (*tokens,), _tokens_loss),
        "resnet18": (resnet, images, lambda model, x: cross_entropy(model(x[0]), x[1])),
    }


def _tokens_loss(model, batch):
    return cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def compress(bits, model):
    fewbit.compress_(model, bits, verbose=False)


def times(model, step, rounds) -> dict:
    """Return {setting: [ratio to exact training in each round]}. The first quarter of the rounds is left out."""
    runs = {"exact": copy.deepcopy(model)}
    for name, bits in SETTINGS.items():
        runs[name] = copy.deepcopy(model)
        compress(bits, runs[name])
    found = host_time.in_turns(runs, step, rounds)
    exact = found.pop("exact")
    return {name: [a / b for a, b in zip(each, exact, strict=True)] for name, each in found.items()}


def peak(model, batch, loss, bits) -> int:
    """Return the bytes of a training step with SGD at its peak."""
    training = FakeTraining(
        model, functools.partial(compress, bits), loss, torch.optim.AdamW, False
    )
    return training.step(batch).peak().size


def measure(name, rounds):
    """Yield a row for each setting of a model."""
    model, batch, loss = models()[name]

    def step(own):
        loss(own, batch).backward()

    host_time.check(model, step, 0.05)
    for setting, ratios in times(model, step, rounds).items():
        low, middle, high = statistics.quantiles(ratios)
        yield {
            "model": name,
            "setting": setting,
            "time": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "peak": peak(model, batch, loss, SETTINGS[setting]),
        }


def worse(row, stored) -> list[str]:
    """Return a line for each figure of a row that is above its limit."""
    before = next(
        (old for old in stored if all(old[key] == row[key] for key in ("model", "setting"))), None
    )
    if before is None:
        return []
    return [
        f"{row['model']}, {row['setting']}: {figure} {row[figure]}, stored {before[figure]}, at most "
        f"{limit * before[figure]:.4g} is allowed"
        for figure, limit in LIMITS.items()
        if row[figure] > limit * before[figure]
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="store the figures")
    parser.add_argument("--rounds", type=int, help="the rounds of each model, at least 4")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    about = harness.machine("torch") | {"fewbit": fewbit.__version__}
    print(about)
    stored, rows, lines = harness.stored("regression"), [], []
    for name, rounds in ROUNDS.items():
        for row in measure(name, arguments.rounds or rounds):
            print(row, flush=True)
            rows.append(row)
            lines += worse(row, stored)
    if arguments.update:
        harness.save("regression", about, rows)
    elif lines:
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
