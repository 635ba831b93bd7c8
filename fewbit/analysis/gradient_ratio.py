"""The comparison of a compressed model's gradients g^ with exact gradients g."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

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
from fewbit.analysis.unchanged import alone, unchanged
from fewbit.convert.swap import restore_
from fewbit.errors import BoundWarning, InputError
from fewbit.extras import needed_for
from fewbit.render.formats import limit_text, module_name
from fewbit.render.result import Result
from fewbit.render.view import Column, View
from fewbit.runtime.saved.context import ForwardContext, contexts_of, measuring

MOST_NAMED = 3
"""The most modules that a warning names."""


@dataclass(frozen=True, repr=False)
class GradientRatio(Result):
    """The squared norm of a compressed model's gradient g^ relative to that of the exact gradient g.

    Attributes:
        ratio: E|g^|^2 / E|g|^2 of all parameters, each summed over batches; also the result of `float(...)`.
        error: The standard error of the ratio, from the differences between draws.
        limit: 1 + e2 of the model's `ErrorBound`, or None.
        by_module: {module's path: ratio of the module's own parameters}; NaN if their exact gradient is 0.
        draws: The number of passes over each batch with independent rounding.
        relative_error: E|g^ - g|^2 / |g|^2 of all parameters, which every bias of g^ increases.
        relative_by_module: {module's path: relative error of its own parameters}; NaN as in `by_module`.
    """

    ratio: float
    error: float
    limit: float | None
    by_module: dict[str, float]
    draws: int
    relative_error: float
    relative_by_module: dict[str, float]

    @property
    def is_exceeded(self) -> bool:
        """True if the ratio is above the limit by more than `chance`. False without a limit."""
        return self.limit is not None and self.ratio > self.limit + self.chance

    @property
    def chance(self) -> float:
        """The excess over the limit that may be due to chance: three standard errors, or more if draws are few."""
        with needed_for("the comparison of a gradient ratio with a limit"):
            from scipy import stats

        return float(stats.t.isf(stats.norm.sf(3), self.draws - 1)) * self.error

    def __float__(self) -> float:
        return self.ratio

    @property
    def title(self) -> str:
        """One line with the results."""
        text = f"E|g^|^2 / E|g|^2 = {self.ratio:.4g} +- {self.error:.2g}"
        if self.limit is not None:
            text += f", {self._verdict} {limit_text(self.limit)}"
        return f"{text}; E|g^ - g|^2 / |g|^2 = {self.relative_error:.3g}"

    @property
    def _verdict(self) -> str:
        if self.is_exceeded:
            return "more than"
        return "within" if self.ratio <= self.limit else "perhaps by chance above"

    @property
    def _is_smaller(self) -> bool:
        """Return whether the relative error is above e2 although the ratio is within the limit."""
        unbiased = 1 + self.relative_error
        return self.ratio <= self.limit < unbiased and self.ratio + self.chance < unbiased

    def records(self) -> list[dict]:
        """Return a dict for each module with parameters."""
        return [
            {"module": name, "ratio": ratio, "relative_error": self.relative_by_module[name]}
            for name, ratio in self.by_module.items()
        ]

    def view(self) -> View:
        """Return a table of `records`."""
        columns = (
            Column("module", lambda row: module_name(row["module"]), "name"),
            Column("ratio", lambda row: _number(row["ratio"], self.limit)),
            Column("relative error", lambda row: _number(row["relative_error"])),
        )
        return View(self.title, columns, self.records(), self._notes())

    def _notes(self) -> list[str]:
        notes = [
            f"of the parameters of each module, with all errors above them; {self.draws} draws of each batch",
            "ratio: E|g^|^2 / E|g|^2",
            "relative error: E|g^ - g|^2 / |g|^2, the ratio less 1 if errors have a mean of 0",
        ]
        if self.limit is None:
            return notes
        if any(ratio > self.limit for ratio in self.by_module.values()):
            notes.append(
                "!: more than 1 + e2, of this module alone; the bound is on all of them together"
            )
        if self._is_smaller:
            notes.append(
                "the squared error is above e2 all the same: errors have a bias that makes gradients smaller"
            )
        return notes


def _number(value: float, limit: float | None = None) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.4g}" + "!" * (limit is not None and value > limit)


def gradient_ratio(
    model: nn.Module,
    batch,
    loss: Callable[[nn.Module, object], torch.Tensor],
    draws: int,
    seed: int,
    limit: float | None,
) -> GradientRatio:
    """Return the result of `Controller.gradient_ratio`. `limit` is 1 + `ErrorBound.e2`, or None.

    Raises:
        InputError: an argument cannot be used, or the gradient is 0 or not finite.
    """
    if limit is not None:
        with needed_for("the comparison of a gradient ratio with a limit"):
            import scipy  # noqa: F401 - missing scipy is reported now, not after the passes
    check_count("draws", draws, 2)
    check_count("seed", seed, 0)
    check_model(model)
    check_loss(loss)
    batches = [tree_map(alone, one) for one in batches_of(batch)]
    with unchanged(dict(model.named_modules()), tensors_of(batches)):
        exact, measured = (Measured(copied(model), loss, seed) for _ in range(2))
        context = next(iter(contexts_of(measured.model)), None)
        if context is None:
            raise InputError(
                "expected a model that compress_ has converted, got one that it has not"
            )
        restore_(exact.model)
        found = []  # for each batch: |g|^2, then |g^|^2 and |g^ - g|^2 of each draw, by module
        with measuring(), explained(batch):
            for number, part in enumerate(batches):
                found.append(_of_batch(measured, exact, context, part, number, draws))
    # Shapes (P,), (draws, P) and (draws, P) for P modules. Sums over batches, whose draws are independent.
    squares, of_draws, errors = (np.sum(parts, axis=0) for parts in zip(*found, strict=True))
    total = squares.sum()
    if not 0 < total < math.inf:
        raise InputError(f"loss: expected a gradient that is finite and not 0, got |g|^2 = {total}")
    ratios = of_draws.sum(1) / total
    with np.errstate(divide="ignore", invalid="ignore"):
        by_group = [np.where(squares > 0, x.mean(0) / squares, np.nan) for x in (of_draws, errors)]
    by_module, relative = (dict(zip(measured.groups, x.tolist(), strict=True)) for x in by_group)
    ratio = GradientRatio(
        float(ratios.mean()),
        float(ratios.std(ddof=1) / math.sqrt(draws)),
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
            "A smaller e2 gives more bits",
            BoundWarning,
            stacklevel=3,  # the caller of the controller
        )
    return ratio


def _of_batch(
    measured: Measured, exact: Measured, context: ForwardContext, batch, number, draws
) -> tuple:
    """Return |g|^2, (P,), and |g^|^2 and |g^ - g|^2, both (draws, P), of P modules."""
    true = exact.gradient(batch, number)
    squares, errors = [], []
    for draw in range(draws):
        context.salt = draw.to_bytes(8)
        drawn = measured.gradient(batch, number)
        squares.append(measured.inner(drawn, drawn))
        between = difference(drawn, true)
        errors.append(measured.inner(between, between))
    return exact.inner(true, true), np.array(squares), np.array(errors)
