"""The true ratio E|g^|^2 / E|g|^2 of a compressed model's gradients on given batches, by drawing them.

|g|^2 is that of the exact model, so that all layers' errors are in it, and what they do to the layers below.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from fewbit.analysis import meter
from fewbit.analysis.gradient_ratio_report import GradientRatio
from fewbit.analysis.gradients import (
    Measured,
    batches_of,
    check_count,
    check_loss,
    check_model,
    copied,
    difference,
    explained,
    tensors_of,
)
from fewbit.convert.swap import restore_
from fewbit.errors import BoundWarning, InputError
from fewbit.runtime.interop.interrupts import leaves_nothing
from fewbit.runtime.saved.context import ForwardContext, contexts_of, measuring

MOST_NAMED = 3
"""Largest number of layers that a warning names."""


@leaves_nothing
def gradient_ratio(
    model: nn.Module,
    batch,
    loss: Callable[[nn.Module, object], torch.Tensor],
    draws: int,
    seed: int,
    limit: float | None,
) -> GradientRatio:
    """As of `Controller.gradient_ratio`."""
    check_count("draws", draws, 2)
    check_count("seed", seed, 0)
    check_model(model)
    check_loss(loss)
    batches = [tree_map(meter.alone, each) for each in batches_of(batch)]
    with meter.unchanged(dict(model.named_modules()), tensors_of(batches)):
        exact, measured = (Measured(copied(model), loss, seed) for _ in range(2))
        context = _context_of(measured.model)
        restore_(exact.model)
        found = []  # of each batch (|g|^2, |g^|^2 of each draw, |g^ - g|^2 of each draw), by module
        with measuring(), explained(batch):
            for number, each in enumerate(batches):
                found.append(_of_batch(measured, exact, context, each, number, draws))
    # (P,), (draws, P), (draws, P): draws of different batches are independent
    squares, of_draws, errors = (np.sum(each, axis=0) for each in zip(*found, strict=True))
    total = squares.sum()
    if not 0 < total < math.inf:
        raise InputError(f"loss: expected a gradient that is finite and not 0, got |g|^2 = {total}")
    each = of_draws.sum(1) / total
    with np.errstate(divide="ignore", invalid="ignore"):
        each_of = [np.where(squares > 0, of.mean(0) / squares, np.nan) for of in (of_draws, errors)]
    by_module, relative = (dict(zip(measured.groups, of.tolist(), strict=True)) for of in each_of)
    ratio = GradientRatio(
        float(each.mean()),
        float(each.std(ddof=1) / math.sqrt(draws)),
        limit,
        by_module,
        draws,
        float(errors.mean(0).sum() / total),
        relative,
    )
    if ratio.is_exceeded:
        excess = of_draws.mean(0) - limit * squares
        most = [list(by_module)[place] for place in np.argsort(-excess)[:MOST_NAMED]]
        named = ", ".join(f"{name or 'the model'} ({by_module[name]:.3g})" for name in most)
        warnings.warn(
            f"gradients are larger than their bound, 1 + e2, allows: {ratio.title}; most in {named}. "
            "A smaller e2 keeps more bits",
            BoundWarning,
            stacklevel=4,  # the caller of the controller, beyond the wrapper of leaves_nothing
        )
    return ratio


def _of_batch(
    measured: Measured, exact: Measured, context: ForwardContext, batch, number, draws
) -> tuple:
    """(P,) |g|^2, (draws, P) |g^|^2, (draws, P) |g^ - g|^2: of the parameters of each module."""
    true = exact.gradient(batch, number)
    squares, errors = [], []
    for draw in range(draws):
        context.salt = draw.to_bytes(8)
        drawn = measured.gradient(batch, number)
        squares.append(measured.inner(drawn, drawn))
        between = difference(drawn, true)
        errors.append(measured.inner(between, between))
    return exact.inner(true, true), np.array(squares), np.array(errors)


def _context_of(model: nn.Module) -> ForwardContext:
    """That of a converted model."""
    for context in contexts_of(model):
        return context
    raise InputError("expected a model that compress_ has converted, got one that it has not")
