"""How a variance profile shows itself: a table, HTML with the heat map, a picture. No torch here."""

from __future__ import annotations

import math
import os

import numpy as np

from fewbit.catalog.report import shortened
from fewbit.render.documents import PicturedReport
from fewbit.sizes import counted
from fewbit.table import plot

MOST_ROWS = 20
MOST_LABEL = 34  # characters of a path in the picture
MOST_FAR = 3  # contexts that are named because they add most to other modules' gradients
DECADES = 8  # that the colors of the picture span at most
SAMPLING = "sampling"


class VarianceProfileReport(PicturedReport):
    """The ways to show a result with the attributes of VarianceProfile."""

    _header = ("module", "sampling", "±", "rounding", "±", "direct", "±", "own")
    _spare = (6, 4, 2, 7, 5)

    @property
    def title(self) -> str:
        return (
            f"{self._name_and_bits}: sampling variance is {self.sampling_ratio:.3g} times quantization "
            f"variance, {100 * self.own_share:.0f}% of which comes from modules' own contexts"
        )

    @property
    def _name_and_bits(self) -> str:
        return f"{self.model}, {counted(self.bits, 'bit')}"

    def records(self) -> list[dict]:
        """A row for each module with parameters, in the order of the forward."""
        columns = {
            "sampling": self.sampling,
            "sampling_error": self.sampling_error,
            "quantization": self.quantization,
            "quantization_error": self.quantization_error,
            "direct": self.direct,
            "direct_error": self.direct_error,
            "agreement": self.agreement,
            "bias": self.bias,
            "bias_error": self.bias_error,
            "own": self.own,
        }
        return [
            {"parameters": name} | {key: float(each[i]) for key, each in columns.items()}
            for i, name in enumerate(self.parameters)
        ]

    def _cells(self):
        """Modules by their quantization variance, largest first, and all of them together."""
        order = np.argsort(-self.quantization, kind="stable")
        shown = order if len(order) <= MOST_ROWS + 1 else order[:MOST_ROWS]
        measured = [
            (self.sampling, self.sampling_error),
            (self.quantization, self.quantization_error),
            (self.direct, self.direct_error),
        ]
        rows = [
            (
                _name(self.parameters[i]),
                *(cell for value, error in measured for cell in _pair(value[i], error[i])),
                _share(self.own[i], self.quantization[i]),
            )
            for i in shown
        ]
        if len(shown) < len(order):
            rest = order[len(shown) :]
            rows.append((f"… {len(rest)} more", *self._sums(rest)))
        return [*rows, ("all", *self._sums(order))]

    def _sums(self, which) -> tuple[str, ...]:
        sampling, rounding, direct, own = (
            each[which].sum() for each in (self.sampling, self.quantization, self.direct, self.own)
        )
        shown = (cell for each in (sampling, rounding, direct) for cell in (_variance(each), ""))
        return *shown, _share(own, rounding)

    def _far(self) -> str:
        """The contexts that add most to other modules' gradients."""
        far = self.terms.copy()
        for row, context in enumerate(self.contexts):
            far[row, [name == context for name in self.parameters]] = 0.0
        largest = np.argsort(-far, axis=None, kind="stable")[:MOST_FAR]
        named = []
        for row, column in zip(*np.unravel_index(largest, far.shape), strict=True):
            if far[row, column] > 0:
                share = _share(far[row, column], self.quantization[column])
                source, target = self.contexts[row], self.parameters[column]
                named.append(f"{_name(source)} to {_name(target)} ({share})")
        return ", ".join(named)

    def _notes(self):
        worst = int(np.abs(np.nan_to_num(self.agreement)).argmax())
        bias = max(float(self.bias.sum()), 0.0)
        draws = f"{counted(self.draws, 'pair')} of draws of each of {counted(len(self.contexts), 'context')}"
        far = self._far()
        return [
            "variances of gradients, summed over a module's parameters, largest rounding first. rounding: the sum of the terms of "
            "ActNN's Theorem 3; direct: all contexts drawn at once; ±: standard errors; own: the share of "
            "rounding from the module's own context",
            *([f"most from other contexts: {far}"] if far else []),
            f"rounding and direct differ by {abs(self.agreement[worst]):.1f} standard errors at most "
            f"(of {_name(self.parameters[worst])}); the squared bias is "
            f"{_share(bias, self.quantization.sum())} of rounding",
            f"sampling from {self.sampled}; {draws}" + ", for each batch" * (self.batches > 1),
        ]

    def plot(self, path: str | os.PathLike | None = None, force: bool = False):
        """The heat map of ActNN's figure 8: a row for each source of noise, a column for each module's gradient.

        Both are in the order of the forward. The last row is the sampling variance; colors are logarithmic, white is
        none. Returns the
        matplotlib Figure. path: also save as .png or .svg (OutputExistsError if it exists, unless
        `force`). Raises FewbitError for another suffix, or if matplotlib is not installed.
        """
        plot._check_suffix(path)
        with plot._style():
            rows, columns = len(self.contexts) + 2, len(self.parameters)
            cells = [max(0.14, min(0.3, 9 / count)) for count in (columns, rows)]
            figure = plot._new_figure(3.4 + cells[0] * columns, 2.4 + cells[1] * rows)
            _draw(figure, figure.subplots(), self, 72 * min(cells))
        return plot._finish(figure, path, force)


def _draw(figure, axes, profile, room: float) -> None:
    """room: points between the labels of two rows or columns."""
    from matplotlib.colors import LogNorm

    gap = np.full((1, len(profile.parameters)), np.nan)
    values = np.concatenate([profile.terms, gap, profile.sampling[None]])
    values = np.where(values > 0, values, np.nan)
    top = np.nanmax(values) if np.isfinite(values).any() else 1.0
    bottom = max(np.nanmin(values), top / 10**DECADES) if np.isfinite(values).any() else 0.1
    norm = LogNorm(min(bottom, top / 10), top, clip=True)
    image = axes.imshow(values, norm=norm, cmap="viridis", aspect="auto", interpolation="nearest")
    size = min(8.5, 0.72 * room)
    names = [plot.literal(shortened(_name(each), MOST_LABEL)) for each in profile.parameters]
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=size, color=plot.INK)
    names = [plot.literal(shortened(_name(each), MOST_LABEL)) for each in profile.contexts]
    names += ["", SAMPLING]
    axes.set_yticks(range(len(names)), names, fontsize=size, color=plot.INK)
    axes.tick_params(length=0)
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("gradient of the parameters of")
    axes.set_ylabel("noise from the context of")
    bar = figure.colorbar(image, ax=axes, label="variance (white: none)", fraction=0.05, pad=0.02)
    bar.outline.set_visible(False)
    axes.set_title(
        plot.literal(profile._name_and_bits), loc="left", color=plot.INK, fontweight="bold"
    )


def _name(path: str) -> str:
    return path or "(model)"


def _pair(value: float, error: float) -> tuple[str, str]:
    """A value, and its standard error as a share of it."""
    if not value or not math.isfinite(value) or not math.isfinite(error):
        return _variance(value), ""
    percent = 100 * error / abs(value)
    return _variance(value), f"{percent:.0f}%" if percent >= 0.5 or not percent else "<1%"


def _variance(value: float) -> str:
    """In one form for all, as those of a model differ by many powers of ten: 1.2e-4."""
    if not value or not math.isfinite(value):
        return f"{value:.3g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else ""
