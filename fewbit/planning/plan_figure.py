"""The picture of a plan: memory against gradient error."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fewbit.render import figures
from fewbit.render.formats import digits, plain_exponent
from fewbit.render.labels import add_labels
from fewbit.render.terminal import shortened
from fewbit.sizes import counted

if TYPE_CHECKING:
    from fewbit.planning.training_plan import TrainingPlan

MOST_LABEL = 18
"""The most characters of a label."""
DECADES = 8
"""The most powers of ten that the picture spans."""
TICKS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), tuple(i / 10 for i in range(10, 100)))
LEAST_TICKS = 4
MARGIN = 1.05
"""The least ratio of the ends of the horizontal axis to the nearest points."""
DARKER = 0.7
"""The factor by which labels are darker than their curve."""
# Safe for color-blind readers.
COLORS = ("#4477aa", "#228833", "#aa3377", "#ccbb44", "#ee6677", "#66ccee", "#bbbbbb")
MARKERS = "osD^vPX"


def draw_plan(figure, plan: TrainingPlan) -> None:
    """Draw a curve for each policy: gradient error against saved bytes, both axes logarithmic.

    A solid line marks the variance between minibatches, a dashed one `plan.limit`, and a ring the recommended candidate. Errors that are
    too small are drawn at the lower edge.
    """
    from matplotlib.colors import to_rgb

    figure.set_size_inches(7.2, 5.2)
    axes, (unit, scale) = figure.subplots(), plan.unit

    def place_of(size: int) -> float:
        return max(size, 1) / scale  # a logarithmic axis has no place for 0

    limits = {
        "variance between minibatches": (plan.sampling, "-"),
        f"{digits(100 * plan.share)}% of it": (plan.limit, "--"),
    }
    shown = [row for row in plan.rows if math.isfinite(row.error)]
    values = [value for value, _ in limits.values()] + [row.error for row in shown]
    top = max(values, default=1.0) or 1.0
    floor = min(value for value in (*values, top) if value > top / 10**DECADES) / 4
    labels = []
    for number, policy in enumerate(dict.fromkeys(row.policy for row in plan.rows)):
        rows = [row for row in shown if row.policy == policy]
        rows.sort(key=lambda row: row.saved_bytes)
        x = [place_of(row.saved_bytes) for row in rows]
        y = [max(row.error, floor) for row in rows]
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        style = {"color": color, "linewidth": 1.4, "marker": marker, "markersize": 5}
        # An empty line is clipped, because the layout would otherwise make room for it at the corner of the figure.
        axes.plot(x, y, label=figures.literal(policy), clip_on=not rows, zorder=3, **style)
        dark = tuple(DARKER * part for part in to_rgb(color))
        for row, *place in zip(rows, x, y, strict=True):
            text = figures.literal(shortened(row.label, MOST_LABEL))
            labels.append((text, place, dark, row))
    chosen = plan.recommended
    if chosen is not None:
        place = [place_of(chosen.saved_bytes)], [max(chosen.error, floor)]
        ring = {"markersize": 14, "markeredgewidth": 1.6, "markerfacecolor": "none", "zorder": 4}
        axes.plot(*place, "o", color=figures.ERROR, label="recommended", clip_on=False, **ring)
    line = {"linewidth": 1, "zorder": 1}
    for name, (value, style) in limits.items():
        if value > 0:
            axes.axhline(value, color=figures.INK, linestyle=style, label=name, **line)
    exact = place_of(plan.exact_bytes)
    axes.axvline(exact, color=figures.MUTED, linestyle=":", label="exact", **line)
    sizes = [exact, *(place_of(row.saved_bytes) for row in shown)]
    margin = max(MARGIN, (max(sizes) / min(sizes)) ** 0.08)
    axes.set_xlim(min(sizes) / margin, max(sizes) * margin)
    axes.set_ylim(floor, 3 * top)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _mark(axes.xaxis, *axes.get_xlim())
    _mark(axes.yaxis, *axes.get_ylim())
    axes.set_xlabel(f"saved for the backward pass, {unit}")
    axes.set_ylabel("squared error of the gradient")
    figures.title(axes, f"{plan.model}, {counted(plan.batches, 'batch')} of {plan.batch_size}")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, handlelength=1.8)
    labels.sort(key=lambda label: label[-1] is not chosen)  # recommended one first
    add_labels(axes, [label[:-1] for label in labels])


def _mark(axis, low: float, high: float) -> None:
    """Set ticks at round numbers, at least LEAST_TICKS if possible."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in TICKS:
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= LEAST_TICKS:
            break
    axis.set_ticks(ticks, [plain_exponent(f"{tick:.5g}") for tick in ticks])
    axis.set_ticks([], minor=True)
