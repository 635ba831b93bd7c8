"""The true ratio E|g^|^2 / E|g|^2 of a compressed model's gradients on given batches, by drawing them.

|g|^2 is that of the exact model, so that all layers' errors are in it, and what they do to the layers below.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from fewbit.compress import meter
from fewbit.compress.convert import restore_
from fewbit.compress.gradients import (
    Measured,
    batches_of,
    check_count,
    check_loss,
    check_model,
    copied,
    explained,
    tensors_of,
)
from fewbit.errors import InputError
from fewbit.runtime.sharing import Session, measuring


@dataclass(frozen=True)
class GradientRatio:
    """E|g^|^2 / E|g|^2, sums over batches and all parameters; float(...) is `ratio`.

    error: the standard error of the ratio, from the differences between draws. limit: 1 + e2; None where the model has no
    such bound. by_module: of the parameters of each module alone; NaN where the exact gradient is 0. draws: of each batch.
    """

    ratio: float
    error: float
    limit: float | None
    by_module: dict[str, float]
    draws: int

    def __float__(self) -> float:
        return self.ratio

    def __str__(self) -> str:
        text = f"E|g^|^2 / E|g|^2 = {self.ratio:.4g} +- {self.error:.2g}"
        return text if self.limit is None else f"{text}, to stay within {self.limit:.4g}"


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
        measured = Measured(copied(model), loss, seed)
        session = _session_of(measured.model)
        drawn = []  # (draws, P) of each batch
        with measuring(), explained(batch):
            for number, each in enumerate(batches):
                drawn.append([])
                for draw in range(draws):
                    session.salt = draw.to_bytes(8)
                    drawn[-1].append(_squares(measured, each, number))
        restore_(measured.model)
        exact = sum(_squares(measured, each, number) for number, each in enumerate(batches))
    if not 0 < exact.sum() < math.inf:
        raise InputError(
            f"loss: expected a gradient that is finite and not 0, got |g|^2 = {exact.sum()}"
        )
    of_draws = np.array(drawn).sum(0)  # (draws, P): draws of different batches are independent
    each = of_draws.sum(1) / exact.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        by_module = np.where(exact > 0, of_draws.mean(0) / exact, np.nan)
    return GradientRatio(
        float(each.mean()),
        float(each.std(ddof=1) / math.sqrt(draws)),
        limit,
        dict(zip(measured.groups, by_module.tolist(), strict=True)),
        draws,
    )


def _squares(measured: Measured, batch, number: int) -> np.ndarray:
    """(P,): |g|^2 of the parameters of each module."""
    gradient = measured.gradient(batch, number)
    return measured.inner(gradient, gradient)


def _session_of(model: nn.Module) -> Session:
    """That of a converted model."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            session = getattr(hook, "__self__", None)
            if isinstance(session, Session) and not session.is_private:
                return session
    raise InputError("expected a model that compress_ has converted, got one that it has not")
