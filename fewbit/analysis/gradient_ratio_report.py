"""The true ratio of a compressed model's gradients to the exact ones', as a table and HTML. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fewbit.catalog.report import _Report


@dataclass(frozen=True, repr=False)
class GradientRatio(_Report):
    """E|g^|^2 / E|g|^2, sums over batches and all parameters; float(...) is `ratio`.

    error: the standard error of the ratio, from the differences between draws. limit: 1 + e2; None where the model has no
    such bound. by_module: of the parameters of each module alone; NaN where the exact gradient is 0. draws: of each batch.
    relative_error: E|g^ - g|^2 / |g|^2, which a bias adds to even where it makes gradients smaller; relative_by_module: of
    the parameters of each module alone.
    """

    ratio: float
    error: float
    limit: float | None
    by_module: dict[str, float]
    draws: int
    relative_error: float
    relative_by_module: dict[str, float]

    _header = ("module", "ratio", "relative error")

    @property
    def is_exceeded(self) -> bool:
        """Whether the ratio is above the limit, by more than `chance`."""
        return self.limit is not None and self.ratio > self.limit + self.chance

    @property
    def chance(self) -> float:
        """What it may be off by chance: three standard errors, of many draws; more of few, whose spread says less."""
        from scipy import stats

        return float(stats.t.isf(stats.norm.sf(3), self.draws - 1)) * self.error

    def __float__(self) -> float:
        return self.ratio

    @property
    def title(self) -> str:
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
        """Whether the relative error is above e2 though the ratio is not above the limit, beyond chance."""
        unbiased = 1 + self.relative_error
        return self.ratio <= self.limit < unbiased and self.ratio + self.chance < unbiased

    def records(self) -> list[dict]:
        """A dictionary for each module with parameters."""
        return [
            {"module": name, "ratio": ratio, "relative_error": self.relative_by_module[name]}
            for name, ratio in self.by_module.items()
        ]

    def _cells(self):
        return [
            (
                row["module"] or "(the model)",
                _number(row["ratio"], self.limit),
                _number(row["relative_error"]),
            )
            for row in self.records()
        ]

    def _notes(self):
        notes = [
            f"of the parameters of each module, with all errors above them; {self.draws} draws of each batch. ratio: "
            "E|g^|^2 / E|g|^2; relative error: E|g^ - g|^2 / |g|^2, the ratio less 1 where errors have a mean of 0"
        ]
        if self.limit is not None and any(each > self.limit for each in self.by_module.values()):
            notes.append(
                "!: more than 1 + e2, of this module alone; the bound is on all of them together"
            )
        if self.limit is not None and self._is_smaller:
            notes.append(
                "the squared error is above e2 all the same: errors have a bias that makes gradients smaller"
            )
        return notes


def limit_text(limit: float) -> str:
    """1 + e2, so that a small e2 does not vanish in it."""
    return f"{limit:.4g}" if limit >= 1.001 else f"1 + {limit - 1:.3g}"


def _number(value: float, limit: float | None = None) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.4g}" + "!" * (limit is not None and value > limit)
