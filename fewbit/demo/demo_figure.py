"""The picture of the demo: training curves, and the final losses minus those of the exact model."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from fewbit.render import figures
from fewbit.render.formats import amount

if TYPE_CHECKING:
    from fewbit.demo.demo_result import Demo


def draw_demo(figure, demo: Demo) -> None:
    """Draw the training curves and the differences of the final losses."""
    figure.set_size_inches(9.2, 3.9)
    left, right = figure.subplots(1, 2, width_ratios=[1.7, 1])
    colors = _colors(len(demo.arms))
    _draw_curves(left, demo, colors)
    _draw_differences(right, demo, colors)


def _colors(arms: int) -> list:
    few = figures.matplotlib().colormaps["viridis"]
    return [figures.INK, *(few(0.86 - 0.86 * i / max(1, arms - 2)) for i in range(arms - 1))]


def _draw_curves(axes, demo: Demo, colors) -> None:
    for arm, color in zip(demo.arms, colors, strict=True):
        exact = arm is demo.exact
        axes.plot(
            *arm.curve(),
            color=color,
            linewidth=2.4 if exact else 1.3,
            label=f"{arm.name}, {amount(arm.model_bytes)}",
            zorder=2 if exact else 3,
            alpha=0.45 if exact else 1,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats per character")
    seeds = f", mean of {demo.seeds} seeds" if demo.seeds > 1 else ""
    figures.title(axes, f"Training in fewer bytes{seeds}")
    axes.legend(title="GELU, bytes the model saves", alignment="left")


def _draw_differences(axes, demo: Demo, colors) -> None:
    if demo.yardstick is not None:
        std = demo.yardstick.std
        source = "stored seeds" if demo.yardstick.stored else "seeds"
        axes.axhspan(-std, std, color=figures.GRID, zorder=0)
        axes.set_xlabel(f"shaded: ± 1 std of exact over {demo.yardstick.seeds} {source}")
    axes.axhline(0, color=figures.INK, linewidth=1)
    arms = demo.arms[1:]
    for i, (arm, color) in enumerate(zip(arms, colors[1:], strict=True)):
        differences = arm.differences(demo.exact)
        axes.plot([i] * len(differences), differences, "o", color=color, markersize=4, alpha=0.5)
        axes.plot(i, statistics.fmean(differences), "D", color=color, markersize=7)
    axes.set_xticks(range(len(arms)), [arm.name.replace(" ", "\n", 1) for arm in arms])
    axes.set_xlim(-0.6, max(1, len(arms)) - 0.4)
    axes.set_ylabel("held-out loss minus exact's")
    figures.title(axes, "Final loss")
