"""The arms (ways to train) that `error_bound.py` compares, and the measurement of saved bytes and gradients."""

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
"""The options of `fewbit.ErrorBound` in each arm with an error bound."""
EXACT = "exact"
DRAWS = 8


def fixed(bits: int) -> str:
    """Return the name of the arm with fixed bits."""
    return f"{bits} bit{'s' * (bits > 1)}"


FIXED = {fixed(bits): bits for bits in GRID}
ARMS = (EXACT, *FIXED, *BOUNDS)


def compress(model: nn.Module, arm: str, interval: int = INTERVAL):
    """Convert a model in place as an arm requires. Return the controller, or None for the exact arm.

    Fixed bits are those of `compress_` at level L2, since a user's grid search would try these: few-bit activations
    save 3 bits, or as many as the inputs from 5 bits on (1 if that is exact), and attention at least 4. With the error
    bound, all bits follow from e^2.

    Args:
        model: The model.
        arm: One of ARMS.
        interval: The number of steps between two observed steps of the error bound.
    """
    if arm == EXACT:
        return None
    if arm in FIXED:
        return fewbit.compress_(model, bits=FIXED[arm], verbose=False)
    return fewbit.compress_(
        model, fewbit.ErrorBound(interval=interval, **BOUNDS[arm]), verbose=False
    )


def saved_bytes(model: nn.Module, loss, batch) -> int:
    """Return the bytes that a forward and its loss save for backward.

    The batch is copied to storages of its own, because `fewbit.saved_bytes` counts whole storages.
    """
    return fewbit.saved_bytes(partial(loss, model), tree_map(alone, batch)).total


class Ratio(NamedTuple):
    """The gradient g^ of the compressed model compared with the exact gradient g of the same batch.

    A gradient is that of all parameters. Means are over draws of the random rounding.

    Attributes:
        ratio: The mean of |g^|^2 / |g|^2.
        ratio_error: The standard error of `ratio`.
        error: The mean of |g^ - g|^2 / |g|^2.
    """

    ratio: float
    ratio_error: float
    error: float


def gradient_ratio(model: nn.Module, loss, batch, draws: int = DRAWS) -> Ratio:
    """Compare a compressed model's gradient with the exact one. The model and torch's random state do not change."""
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
    """Assert that the gradient of an arm with many bits is close to the exact one, but not equal to it."""
    model = task.build(0)
    compress(model, arm)
    batch = next(task.batches(torch.Generator().manual_seed(0)))
    found = gradient_ratio(model, task.loss, batch, draws=2)
    assert 1e-9 < found.error < 0.01, (
        f"{task.title}, {arm}: wrong backward pass ({found.error:.3g})"
    )
