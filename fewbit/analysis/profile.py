"""The result of `fewbit.variance_profile`: a table, a heat map and a document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from fewbit.errors import InputError
from fewbit.render import figures
from fewbit.render.formats import exponential, module_name
from fewbit.render.saved_results import Document
from fewbit.render.terminal import shortened
from fewbit.render.view import Column, View
from fewbit.schema import VARIANCE_PROFILE
from fewbit.sizes import counted

MOST_LABEL = 34
"""The most characters of a path in the picture."""
MOST_FAR = 3
"""The most pairs (context, other module) that a note names."""
DECADES = 8
"""The most powers of ten that the colors of the picture span."""


@dataclass(frozen=True, repr=False, eq=False)
class VarianceProfile(Document):
    """The variance that rounding each of C contexts adds to the gradients of each of P modules.

    A *context* is all tensors that one module saves of its inputs. A variance is summed over all elements of the
    module's parameters, in units of the gradient squared. Each array, float64, has an array of standard errors with a
    name that ends in `_error`, NaN if there was only one measurement.

    Attributes:
        contexts: The paths of the C modules whose saved tensors are rounded, in the order of the forward; "" for the
            model itself.
        parameters: The paths of the P modules that own trained parameters, in the order of the forward.
        terms: (C, P), the variance that rounding a context adds to a module's gradient (ActNN, Theorem 3).
        sampling: (P,), the variance of the exact gradient between minibatches.
        direct: (P,), the variance that rounding all contexts at once adds, to compare with the sum of `terms`.
        bias: (P,), an estimate of the squared norm of the mean compressed gradient minus the exact gradient, which may be
            below 0.
        bits: The bits per element of quantized tensors.
        draws: The number of pairs of draws for each context and batch.
        batches: The number of batches.
        sampled: A text that says from which minibatches `sampling` was measured.
    """

    _schema = VARIANCE_PROFILE

    model: str
    contexts: tuple[str, ...]
    parameters: tuple[str, ...]
    terms: np.ndarray
    terms_error: np.ndarray
    sampling: np.ndarray
    sampling_error: np.ndarray
    direct: np.ndarray
    direct_error: np.ndarray
    bias: np.ndarray
    bias_error: np.ndarray
    bits: int
    draws: int
    batches: int
    sampled: str

    @property
    def quantization(self) -> np.ndarray:
        """The variance that rounding adds to each module's gradient, (P,): `terms` summed over contexts."""
        return self.terms.sum(0)

    @property
    def quantization_error(self) -> np.ndarray:
        """The standard error of `quantization`, (P,), with independent errors of the terms."""
        return np.sqrt(np.square(self.terms_error).sum(0))

    def total(self) -> np.ndarray:
        """Return the variance of each module's compressed gradient, (P,): `sampling` + `quantization`."""
        return self.sampling + self.quantization

    @property
    def agreement(self) -> np.ndarray:
        """`quantization` - `direct`, (P,), divided by the standard error of this difference, or 0 if that is 0."""
        error = np.hypot(self.quantization_error, self.direct_error)
        difference = self.quantization - self.direct
        return np.divide(difference, error, out=np.zeros_like(error), where=error > 0)

    @property
    def sampling_ratio(self) -> float:
        """The variance between minibatches divided by the variance that rounding adds."""
        return _ratio(self.sampling.sum(), self.quantization.sum())

    @property
    def own(self) -> np.ndarray:
        """The variance that rounding a module's context adds to its own gradient, (P,); 0 without context."""
        rows = {context: row for row, context in enumerate(self.contexts)}
        return np.array(
            [
                self.terms[rows[name], column] if name in rows else 0.0
                for column, name in enumerate(self.parameters)
            ]
        )

    @property
    def own_share(self) -> float:
        """The fraction of `quantization` that comes from modules' own contexts, 0 to 1."""
        return _ratio(self.own.sum(), self.quantization.sum())

    def to_dict(self) -> dict:
        """Return plain values. Unknown standard errors become None."""
        values = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {"schema": VARIANCE_PROFILE} | values

    @classmethod
    def _of_document(cls, document: dict) -> VarianceProfile:
        values = {field.name: document[field.name] for field in fields(cls)}
        shape = len(values["contexts"]), len(values["parameters"])
        for name in ARRAYS:
            values[name] = _array(name, values[name], shape if name in MATRICES else shape[1:])
        for name in ("contexts", "parameters"):
            values[name] = tuple(values[name])
        for name in ("bits", "draws", "batches"):
            values[name] = int(values[name])  # a schema's integer may be written as 2.0
        return cls(**values)

    def records(self) -> list[dict]:
        """Return a dict for each module that owns parameters, in forward order."""
        columns = {name: getattr(self, name) for name in RECORDED}
        return [
            {"parameters": name} | {key: float(values[i]) for key, values in columns.items()}
            for i, name in enumerate(self.parameters)
        ]

    @property
    def title(self) -> str:
        return (
            f"{self._name_and_bits}: sampling variance is {self.sampling_ratio:.3g} times quantization "
            f"variance, {100 * self.own_share:.0f}% of which comes from modules' own contexts"
        )

    @property
    def _name_and_bits(self) -> str:
        return f"{self.model}, {counted(self.bits, 'bit')}"

    def view(self) -> View:
        columns = (
            Column("module", lambda row: module_name(row["parameters"]), "name", least=24),
            _variances("sampling"),
            _errors("sampling", drop=3),
            _variances("quantization", "rounding"),
            _errors("quantization", drop=2),
            _variances("direct", drop=5),
            _errors("direct", drop=1),
            Column("own", lambda row: _share(row["own"], row["quantization"]), drop=4),
        )
        records = self.records()
        rows = [records[i] for i in np.argsort(-self.quantization, kind="stable")]
        return View(
            self.title, columns, rows, self._notes(), _sum("all", rows), _sum, figure=self.plot
        )

    def _notes(self) -> list[str]:
        worst = int(np.abs(np.nan_to_num(self.agreement)).argmax())
        bias = max(float(self.bias.sum()), 0.0)
        draws = f"{counted(self.draws, 'pair')} of draws of each of {counted(len(self.contexts), 'context')}"
        far = self._far()
        return [
            "variances of gradients, summed over a module's parameters, largest rounding first; ±: standard errors",
            "rounding: the sum of the terms of ActNN's Theorem 3; own: the share of the module's own context",
            "direct: all contexts drawn at once",
            *([f"most from other contexts: {far}"] if far else []),
            f"rounding and direct differ by {abs(self.agreement[worst]):.1f} standard errors at most "
            f"(of {module_name(self.parameters[worst])}); the squared bias is "
            f"{_share(bias, self.quantization.sum())} of rounding",
            f"sampling from {self.sampled}; {draws}" + ", for each batch" * (self.batches > 1),
        ]

    def _far(self) -> str:
        far = self.terms.copy()
        for row, context in enumerate(self.contexts):
            far[row, [name == context for name in self.parameters]] = 0.0
        largest = np.argsort(-far, axis=None, kind="stable")[:MOST_FAR]
        named = []
        for row, column in zip(*np.unravel_index(largest, far.shape), strict=True):
            if far[row, column] > 0:
                share = _share(far[row, column], self.quantization[column])
                source, target = self.contexts[row], self.parameters[column]
                named.append(f"{module_name(source)} to {module_name(target)} ({share})")
        return ", ".join(named)

    def _draw(self, figure) -> None:
        _draw_heat_map(figure, self)


ARRAYS = tuple(field.name for field in fields(VarianceProfile) if field.type == "np.ndarray")
MATRICES = "terms", "terms_error"
RECORDED = (
    *("sampling", "sampling_error", "quantization", "quantization_error", "direct", "direct_error"),
    *("agreement", "bias", "bias_error", "own"),
)


def _sum(name: str, rows: Sequence[dict]) -> dict:
    unknown = {key: math.nan for key in rows[0]}
    names = "sampling", "quantization", "direct", "own"
    return unknown | {key: sum(row[key] for row in rows) for key in names} | {"parameters": name}


def _variances(name: str, title: str = "", drop: int = 0) -> Column:
    return Column(title or name, lambda row: _variance(row[name]), drop=drop)


def _errors(name: str, drop: int) -> Column:
    def cell(row: dict) -> str:
        value, error = row[name], row[f"{name}_error"]
        if not value or not math.isfinite(value) or not math.isfinite(error):
            return ""
        percent = 100 * error / abs(value)
        return f"{percent:.0f}%" if percent >= 0.5 or not percent else "<1%"

    return Column("±", cell, drop=drop)


def _variance(value: float) -> str:
    return exponential(value) if value and math.isfinite(value) else f"{value:.3g}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else ""


def _draw_heat_map(figure, profile: VarianceProfile) -> None:
    """Draw a heat map like figure 8 of ActNN."""
    from matplotlib.colors import LogNorm

    rows, columns = len(profile.contexts) + 2, len(profile.parameters)
    width, height = (max(0.14, min(0.3, 9 / count)) for count in (columns, rows))
    figure.set_size_inches(3.4 + width * columns, 2.4 + height * rows)
    room = 72 * min(width, height)  # points between the labels of two rows or columns
    axes = figure.subplots()
    gap = np.full((1, len(profile.parameters)), np.nan)
    values = np.concatenate([profile.terms, gap, profile.sampling[None]])
    values = np.where(values > 0, values, np.nan)
    top = np.nanmax(values) if np.isfinite(values).any() else 1.0
    bottom = max(np.nanmin(values), top / 10**DECADES) if np.isfinite(values).any() else 0.1
    norm = LogNorm(min(bottom, top / 10), top, clip=True)
    image = axes.imshow(values, norm=norm, cmap="viridis", aspect="auto", interpolation="nearest")
    style = {"fontsize": min(8.5, 0.72 * room), "color": figures.INK}
    axes.set_xticks(
        range(len(profile.parameters)), _labels(profile.parameters), rotation=90, **style
    )
    names = [*_labels(profile.contexts), "", "sampling"]
    axes.set_yticks(range(len(names)), names, **style)
    axes.tick_params(length=0)
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("gradient of the parameters of")
    axes.set_ylabel("noise from the context of")
    bar = figure.colorbar(image, ax=axes, label="variance (white: none)", fraction=0.05, pad=0.02)
    bar.outline.set_visible(False)
    figures.title(axes, profile._name_and_bits)


def _labels(paths: Sequence[str]) -> list[str]:
    return [figures.literal(shortened(module_name(path), MOST_LABEL)) for path in paths]


def _ratio(a: float, b: float) -> float:
    return float(a / b) if b else float("nan") if not a else float("inf")


def _array(name: str, value: list, shape: tuple[int, ...]) -> np.ndarray:
    try:
        array = np.array(value, dtype=np.float64)
    except ValueError:
        raise InputError(f"{name}: expected shape {shape}, got rows of different lengths") from None
    if array.shape != shape:
        raise InputError(f"{name}: expected shape {shape}, got {array.shape}")
    return array


def _plain(value):
    if isinstance(value, np.ndarray):
        return np.where(np.isnan(value), None, value.astype(object)).tolist()
    return list(value) if isinstance(value, tuple) else value
