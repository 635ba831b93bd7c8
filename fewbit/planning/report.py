"""How a plan shows itself: a table, HTML with the picture, the picture. No torch here."""

from __future__ import annotations

import html
import math
import os

from fewbit.analysis.meter_report import amount, unit_of
from fewbit.catalog.report import short, shortened
from fewbit.render.documents import PicturedReport
from fewbit.render.labels import add_labels
from fewbit.sizes import counted
from fewbit.table import plot

UNSURE = 0.2  # a standard error, of an error, from which on the notes say so
MOST_LABEL = 18  # characters in the picture
DECADES = 8  # of errors that the picture spans at most
TICKS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), tuple(i / 10 for i in range(10, 100)))
LEAST_TICKS = 4
MARGIN = 1.05  # at least, beside the points
DARKER = 0.7  # text than its curve
# Safe for color-blind readers.
COLORS = ("#4477aa", "#228833", "#aa3377", "#ccbb44", "#ee6677", "#66ccee")
MARKERS = "osD^vP"


class TrainingPlanReport(PicturedReport):
    """The ways to show a result with the attributes of TrainingPlan."""

    _names = (0, 1)
    _spare = (9, 6, 5, 3, 8)  # passes, random, ±, less, time

    @property
    def title(self) -> str:
        chosen, best = self.recommended, self.closest
        if chosen is None and best.saved_bytes >= self.exact_bytes:
            return f"{self.model}: no setting keeps less than the {amount(self.exact_bytes)} of the exact model"
        if chosen is None:
            share = _percent(best.error, self.sampling)
            how = f"{share} of it" if share else f"an error of {_short(best.error)}"
            return (
                f"{self.model}: no setting keeps its error within {_short(100 * self.share)}% of the variance between "
                f"minibatches; {_name(best)} comes closest, with {how}"
            )
        less = self.exact_bytes / chosen.saved_bytes if chosen.saved_bytes else math.inf
        return (
            f"{self.model}: {_name(chosen)} keeps {amount(chosen.saved_bytes)} in place of "
            f"{amount(self.exact_bytes)}, {less:.3g} times less; its error is {_percent(chosen.error, self.sampling) or 0} "
            f"of the variance between minibatches, its passes take {self._time(chosen):.2f} times as long ({self._range(chosen.seconds_least, chosen.seconds_most)})"
        )

    @property
    def _unit(self) -> tuple[str, int]:
        return unit_of(self.exact_bytes)

    def _time(self, row) -> float:
        return row.seconds / self.exact_seconds

    def _range(self, least: float, most: float) -> str:
        """Of seconds, over the median of exact passes."""
        return f"{least / self.exact_seconds:.3g} to {most / self.exact_seconds:.3g}"

    def records(self) -> list[dict]:
        """A flat dict for each candidate, in the order in which they came."""
        return [
            {
                "policy": each.policy,
                "setting": each.label,
                "saved_bytes": each.saved_bytes,
                "bytes_ratio": self.exact_bytes / each.saved_bytes if each.saved_bytes else None,
                "error": each.error,
                "error_error": each.error_error,
                "variance": each.variance,
                "variance_error": each.variance_error,
                "bias": each.bias,
                "relative_error": each.error / self.gradient,
                "error_of_sampling": each.error / self.sampling if self.sampling else None,
                "variance_of_sampling": each.variance / self.sampling if self.sampling else None,
                "seconds": each.seconds,
                "time_ratio": self._time(each),
                "time_least": each.seconds_least / self.exact_seconds,
                "time_most": each.seconds_most / self.exact_seconds,
                "recommended": each is self.recommended,
            }
            for each in self.rows
        ]

    @property
    def _header(self):
        unit = self._unit[0]
        return (
            "policy",
            "setting",
            unit,
            "less",
            "error",
            "±",
            "random",
            "noise",
            "time",
            "passes",
        )

    def _cells(self):
        chosen = self.recommended
        empty = ("",) * 5
        exact = self._range(self.exact_seconds_least, self.exact_seconds_most)
        rows = [("exact", "", amount(self.exact_bytes, self._unit), *empty, "1.00", exact)]
        for each in self.rows:
            mark = "*" if each is chosen else ""
            rows.append(
                (
                    each.policy,
                    each.label + mark,
                    amount(each.saved_bytes, self._unit),
                    _times(self.exact_bytes, each.saved_bytes),
                    _short(each.error),
                    _percent(min(each.error_error, 9.99 * each.error), each.error),
                    _percent(min(max(each.variance, 0.0), each.error), each.error),
                    _percent(each.error, self.sampling),
                    f"{self._time(each):.4g}"
                    if self._time(each) >= 100
                    else f"{self._time(each):.2f}",
                    self._range(each.seconds_least, each.seconds_most),
                )
            )
        return rows

    def _notes(self):
        batches = f"{counted(self.batches, 'batch')} of {self.batch_size}"
        spread = "between batches" if self.batches > 1 else "of draws alone, as there is one batch"
        noise = f"{_short(self.sampling)} ± {_percent(self.sampling_error, self.sampling) or '?'}"
        unsure = any(each.error_error > UNSURE * each.error for each in self.rows)
        by_chance = "; by chance it came out above the error, and is shown as 100%"
        is_above = any(each.variance > 1.005 * each.error for each in self.rows)
        chosen = "*: " if self.recommended is not None else "to be recommended: "
        return [
            f"{self._unit[0]}: kept for the backward pass, metered. error: squared distance from the exact gradient, "
            f"bias included (the squared gradient is {_short(self.gradient)}); ±: its standard error, {spread}; "
            f"random: the part of it by which draws differ, an estimate{by_chance * is_above}. Of {batches}, "
            f"{self.draws} draws each",
            f"noise: the error over the variance between minibatches, which is {noise}, from {self.sampled}",
            f"{chosen}the fewest bytes with an error of at most {_short(100 * self.share)}% of that variance",
            *(["errors differ much between these batches: give more of them"] if unsure else []),
            f"time: median of {counted(self.batches * (self.draws - 1), 'pass')}, forward and backward, over that of exact ones, "
            f"{_seconds(self.exact_seconds)}, here ({self.device}); passes: the shortest to the longest. "
            "Bits that adapt take longer in the few steps that observe",
        ]

    def to_html(self) -> str:
        """A whole document, with the table and the picture in it."""
        title = html.escape(f"Plan for {self.model}")
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n'
            f'<body style="font-family:system-ui,sans-serif;max-width:60em">{self._repr_html_()}</body></html>\n'
        )

    def plot(self, path: str | os.PathLike | None = None, force: bool = False):
        """Memory against gradient error, a curve for each policy, both logarithmic. Returns the matplotlib Figure.

        Lines mark the variance between minibatches and the share of it that is allowed, a ring what is recommended. An error of 0, or
        below the picture, lies on its lower edge. path: also save as .png or .svg (OutputExistsError if it
        exists, unless `force`). Raises FewbitError for another suffix, or if matplotlib is not installed.
        """
        plot._check_suffix(path)
        with plot._style():
            figure = plot._new_figure(7.2, 5.2)
            _draw(figure, self)
        return plot._finish(figure, path, force)


def _draw(figure, plan) -> None:
    from matplotlib.colors import to_rgb

    def place_of(size: int) -> float:
        return max(size, 1) / scale  # nothing at all has no place on a logarithmic axis

    axes, (unit, scale) = figure.subplots(), plan._unit
    limits = {
        "variance between minibatches": (plan.sampling, "-"),
        f"{_short(100 * plan.share)}% of it": (plan.limit, "--"),
    }
    shown = [each for each in plan.rows if math.isfinite(each.error)]
    values = [value for value, _ in limits.values()] + [each.error for each in shown]
    top = max(values, default=1.0) or 1.0
    floor = min(each for each in (*values, top) if each > top / 10**DECADES) / 4
    policies, labels = list(dict.fromkeys(each.policy for each in plan.rows)), []
    for number, policy in enumerate(policies):
        points = [each for each in shown if each.policy == policy]
        points.sort(key=lambda each: each.saved_bytes)
        x = [place_of(each.saved_bytes) for each in points]
        y = [max(each.error, floor) for each in points]
        color = COLORS[number % len(COLORS)]
        axes.plot(
            x,
            y,
            color=color,
            marker=MARKERS[number % len(MARKERS)],
            markersize=5,
            linewidth=1.4,
            label=plot.literal(policy),
            clip_on=False,
            zorder=3,
        )
        dark = tuple(DARKER * each for each in to_rgb(color))
        for each, *place in zip(points, x, y, strict=True):
            labels.append((plot.literal(shortened(each.label, MOST_LABEL)), place, dark, each))
    chosen = plan.recommended
    if chosen is not None:
        place = [place_of(chosen.saved_bytes)], [max(chosen.error, floor)]
        ring = {"markersize": 14, "markeredgewidth": 1.6, "markerfacecolor": "none"}
        axes.plot(
            *place, "o", color=plot.ERROR, label="recommended", clip_on=False, zorder=4, **ring
        )
    for name, (value, style) in limits.items():
        if value > 0:
            axes.axhline(value, color=plot.INK, linewidth=1, linestyle=style, label=name, zorder=1)
    exact = place_of(plan.exact_bytes)
    axes.axvline(exact, color=plot.MUTED, linewidth=1, linestyle=":", label="exact", zorder=1)
    sizes = [exact, *(place_of(each.saved_bytes) for each in shown)]
    margin = max(MARGIN, (max(sizes) / min(sizes)) ** 0.08)
    axes.set_xlim(min(sizes) / margin, max(sizes) * margin)
    axes.set_ylim(floor, 3 * top)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _mark(axes.xaxis, *axes.get_xlim())
    _mark(axes.yaxis, *axes.get_ylim())
    axes.set_xlabel(f"kept for the backward pass, {unit}")
    axes.set_ylabel("squared error of the gradient")
    axes.set_title(
        plot.literal(plan.model) + f", {counted(plan.batches, 'batch')} of {plan.batch_size}",
        loc="left",
        color=plot.INK,
        fontweight="bold",
    )
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, handlelength=1.8)
    labels.sort(key=lambda label: label[-1] is not chosen)  # that one first
    add_labels(axes, [label[:-1] for label in labels])


def _mark(axis, low: float, high: float) -> None:
    """Ticks at plain numbers, as few to a decade as there are enough of."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in TICKS:
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [each for each in ticks if low <= each <= high]
        if len(ticks) >= LEAST_TICKS:
            break
    axis.set_ticks(ticks, [_plain_number(each) for each in ticks])
    axis.set_ticks([], minor=True)


def _plain_number(value: float) -> str:
    mantissa, _, exponent = f"{value:.5g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def _name(row) -> str:
    return f"{row.policy} at {row.label}"


def _short(value: float) -> str:
    """A number in 3 digits, or 2 with an exponent."""
    if not math.isfinite(value):
        return "-"
    text = f"{value:.3g}"
    return text if len(text) <= 6 and "e" not in text else short(float(f"{value:.1e}"))


def _times(whole: int, part: int) -> str:
    if not part:
        return ""
    ratio = whole / part
    if ratio >= 1000:
        return ">999x"
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.3g}x" if ratio >= 0.01 else "<.01x"


def _percent(part: float, whole: float) -> str:
    if not (math.isfinite(part) and math.isfinite(whole) and whole > 0):
        return ""
    percent = 100 * part / whole
    if percent >= 10:
        return f"{percent:.0f}%" if percent < 1e5 else f"{percent:.0e}%"
    return f"{percent:.2g}%" if percent >= 1e-2 or not percent else "<.01%"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
