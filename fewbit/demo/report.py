"""What `fewbit demo` shows: its table for the terminal and the picture of its losses."""

from __future__ import annotations

import statistics

from fewbit.analysis.meter_report import amount
from fewbit.catalog.report import new_grid
from fewbit.demo.experiment import Arm, Demo
from fewbit.sizes import counted
from fewbit.table import plot

VERDICT = "within 1 std"


class DemoReport:
    """A Demo that rich shows: saved bytes and final losses side by side, and what the verdict rests on."""

    def __init__(self, demo: Demo):
        self.demo = demo

    def __rich__(self):
        from rich.console import Group
        from rich.text import Text

        demo = self.demo
        grid = new_grid()
        for i, name in enumerate(self._header()):
            grid.add_column(name, justify="right" if i else "left", no_wrap=True)
        for arm in demo.arms:
            grid.add_row(*map(Text, self._cells(arm)))
        title = (
            f"A character transformer, exact, with few-bit GELU and compressed, "
            f"{counted(demo.settings.steps, 'step')} each"
        )
        notes = [Text(note, style="dim") for note in self.notes()]
        return Group(Text(title, style="bold"), "", grid, "", *notes)

    def _header(self):
        head = ("GELU", "its bytes", "model's", "final loss", "difference", VERDICT)
        # Eighty columns hold either GELU's bytes or the standard deviations.
        return head if self.demo.seeds == 1 else (head[0], *head[2:])

    def _cells(self, arm: Arm):
        demo, kept = self.demo, amount(arm.activation_bytes)
        if arm is demo.exact:
            difference = verdict = ""
        else:
            difference = _with_spread(arm.differences(demo.exact), "+.4f")
            verdict = self._verdict(arm)
        losses = _with_spread(arm.finals, ".4f")
        rest = (amount(arm.model_bytes), losses, difference, verdict)
        return (arm.name, kept, *rest) if demo.seeds == 1 else (arm.name, *rest)

    def _verdict(self, arm: Arm) -> str:
        distance = self.demo.distance(arm)
        if distance is None:
            return "unknown"
        return f"{'yes' if abs(distance) <= 1 else 'no'} ({distance:+.1f})"

    def notes(self) -> list[str]:
        """How to read the table, as lines of text."""
        demo, settings = self.demo, self.demo.settings
        lines = [
            "bytes: what one step keeps for the backward pass "
            f"({settings.batch} x {settings.context} characters).",
            "loss: nats per character of held-out text; equal seeds start and draw alike.",
        ]
        if any(arm.everything is not None for arm in demo.arms):
            lines.append(
                "all: every layer's input quantized to those bits, attention's to 4, GELU at 3 (compress_)."
            )
        if any(arm.level == "L3" for arm in demo.arms):
            lines.append(
                "L3: the same bytes, of all but attention shared between samples and layers."
            )
        if demo.seeds > 1:
            lines.append(f"means of {demo.seeds} seeds ± standard deviation; differences in pairs.")
        yardstick = demo.yardstick
        if yardstick is None:
            lines.append(f"{VERDICT}: unknown from one seed; --seeds 5 measures it.")
        else:
            lines.append(
                f"{VERDICT}: of exact's loss over seeds; in brackets the difference in stds."
            )
            source = "these runs"
            if yardstick.stored:
                source = f"{yardstick.seeds} seeds in benchmarks/results/demo.json"
            lines.append(f"std: {yardstick.std:.4f}, from {source}.")
            lines += self._stored_verdict() if yardstick.stored else []
        lines.append(
            f"{demo.seconds:.0f} s of training, each on one thread, backend {demo.backend}."
        )
        return lines

    def _stored_verdict(self):
        """The stored runs' own means: a single seed's difference is mostly chance."""
        stored = self.demo.stored
        yield f"mean differences of those {stored['seeds']} seeds:"
        shown = {arm.name for arm in self.demo.arms}
        arms = [arm for arm in stored["arms"][1:] if arm["name"] in shown]
        width = max(len(arm["name"]) for arm in arms)
        for arm in arms:
            verdict = "within" if arm["within_one_std"] else "not within"
            yield f"  {arm['name']:{width}} {arm['difference']:+.4f}, {verdict} one std"


def _with_spread(values: list[float], form: str) -> str:
    """The mean, and the standard deviation if there is one."""
    mean = format(statistics.fmean(values), form)
    return f"{mean} ± {statistics.stdev(values):.4f}" if len(values) > 1 else mean


def picture(demo: Demo):
    """Training curves, and how far each final loss is from exact's. Returns the matplotlib Figure."""
    with plot._style():
        figure = plot._new_figure(9.2, 3.9)
        left, right = figure.subplots(1, 2, width_ratios=[1.7, 1])
        colors = _colors(demo)
        _draw_curves(left, demo, colors)
        _draw_differences(right, demo, colors)
    return figure


def _colors(demo: Demo) -> list:
    few = plot._matplotlib().colormaps["viridis"]
    count = max(1, len(demo.arms) - 2)
    return [plot.INK, *(few(0.86 - 0.86 * i / count) for i in range(len(demo.arms) - 1))]


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
    axes.set_title(f"Training in fewer bytes{seeds}", loc="left", fontweight="bold")
    axes.legend(title="GELU, bytes the model keeps", alignment="left")


def _draw_differences(axes, demo: Demo, colors) -> None:
    if demo.yardstick is not None:
        std = demo.yardstick.std
        source = "stored seeds" if demo.yardstick.stored else "seeds"
        axes.axhspan(-std, std, color=plot.GRID, zorder=0)
        axes.set_xlabel(f"shaded: ± 1 std of exact over {demo.yardstick.seeds} {source}")
    axes.axhline(0, color=plot.INK, linewidth=1)
    for i, (arm, color) in enumerate(zip(demo.arms[1:], colors[1:], strict=True)):
        differences = arm.differences(demo.exact)
        axes.plot([i] * len(differences), differences, "o", color=color, markersize=4, alpha=0.5)
        axes.plot(i, statistics.fmean(differences), "D", color=color, markersize=7)
    axes.set_xticks(
        range(len(demo.arms) - 1), [arm.name.replace(" ", "\n", 1) for arm in demo.arms[1:]]
    )
    axes.set_xlim(-0.6, max(1, len(demo.arms) - 1) - 0.4)
    axes.set_ylabel("held-out loss minus exact's")
    axes.set_title("Final loss", loc="left", fontweight="bold")
