"""What `error_bound.py` compares, and what it measures of each: bytes, and how much larger gradients are than exact ones."""

from __future__ import annotations

import copy
import statistics
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

import fewbit
from fewbit.analysis.gradients import Measured, difference
from fewbit.analysis.unchanged import alone
from fewbit.runtime.saved.context import measuring

INTERVAL = 100
GRID = (1, 2, 3, 4, 5, 6, 7, 8)
BOUND, TIGHT, ZEROS = "error bound", "error bound, e2 0.1", "error bound, zeros"
BOUNDS = {
    BOUND: {"e2": 0.5, "codec": "quant"},
    TIGHT: {"e2": 0.1, "codec": "quant"},
    ZEROS: {"e2": 0.5, "codec": "quant+zvc"},
}
"""Options of the policy."""
EXACT = "exact"
DRAWS = 8


def fixed(bits: int) -> str:
    """The name of the arm with as many bits in all steps."""
    return f"{bits} bit{'s' * (bits > 1)}"


FIXED = {fixed(bits): bits for bits in GRID}
ARMS = (EXACT, *FIXED, *BOUNDS)


def compress(model: nn.Module, arm: str, interval: int = INTERVAL):
    """Converts the model in place; returns the controller, None if exact.

    arm: one of ARMS. Fixed bits are those of `compress_` at level L2, as a user's search over them would have it: few-bit
    activations keep 3 bits (1 if that is exact), and attention at least 4. With the error bound all follows from e^2.
    """
    if arm == EXACT:
        return None
    if arm in FIXED:
        return fewbit.compress_(model, bits=FIXED[arm], verbose=False)
    return fewbit.compress_(
        model, fewbit.ErrorBound(interval=interval, **BOUNDS[arm]), verbose=False
    )


def saved_bytes(model: nn.Module, loss, batch) -> int:
    """Return the bytes that a forward and its loss save for backward. The batch is in memory of its own, as the meter counts whole storages."""
    return fewbit.saved_bytes(partial(loss, model), tree_map(alone, batch)).total


class Ratio(NamedTuple):
    """Of the gradient g^ of all parameters to the exact one g of the same batch.

    ratio: mean of |g^|^2 / |g|^2 over draws of rounding, with its standard error; error: mean of |g^ - g|^2 / |g|^2.
    """

    ratio: float
    ratio_error: float
    error: float


def gradient_ratio(model: nn.Module, loss, batch, draws: int = DRAWS) -> Ratio:
    """As the model is now; its training, and torch's random state, do not notice."""
    exact = copy.deepcopy(model)
    fewbit.restore_(exact)
    g = Measured(exact, loss, seed=0).gradient(batch, 0)
    size = sum(each.double().square().sum().item() for each in g)
    compressed = Measured(model, loss, seed=0)
    ratios, errors = [], []
    for draw in range(draws):
        with measuring():
            found = compressed.gradient(batch, 1 + draw)
        ratios.append(squared(found) / size)
        errors.append(squared(difference(found, g)) / size)
    spread = statistics.stdev(ratios) / draws**0.5
    return Ratio(statistics.fmean(ratios), spread, statistics.fmean(errors))


def squared(gradient) -> float:
    return sum(each.double().square().sum().item() for each in gradient)


def check(task, arm: str) -> None:
    """The arm's gradient is close to the exact one where it should be, and draws differ."""
    model = task.build(0)
    compress(model, arm)
    batch = next(task.batches(torch.Generator().manual_seed(0)))
    found = gradient_ratio(model, task.loss, batch, draws=2)
    assert 1e-9 < found.error < 0.01, (
        f"{task.title}, {arm}: wrong backward pass ({found.error:.3g})"
    )
