"""The pictures of the results of `error_bound.py`. Tasks are given as {name: Task}, in arguments called `of`."""

from __future__ import annotations

import matplotlib
from matplotlib.figure import Figure
from studies.parts import error_bound_arms as arms

from fewbit.render import figures as style

COLORS = {arms.BOUND: "#440154", arms.TIGHT: "#2a788e", arms.ZEROS: "#5ec962"}
MARKERS = {arms.BOUND: "o", arms.TIGHT: "D", arms.ZEROS: "^"}
NAMES = {
    arms.BOUND: "error bound, e² = 0.5",
    arms.TIGHT: "e² = 0.1",
    arms.ZEROS: "e² = 0.5, zeros left out",
}
PICTURED = arms.BOUND, arms.TIGHT
"""The arms whose gradients are drawn, each with a line at its limit 1 + e^2."""
GRID = "#6e7781"


def plot(records, ratios, of, folder, name):
    """Draw <name>_ratio.png and <name>_scores.png into a folder.

    Args:
        records: The rows of the summary, one for each task and arm.
        ratios: The rows with ratios of gradients, one for each point of a training run.
        of: The tasks by name.
        folder: The folder.
        name: The beginning of the file names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(style.STYLE):
        for part, figure in (
            ("ratio", ratio(records, ratios, of)),
            ("scores", scores(records, of)),
        ):
            figure.savefig(folder / f"{name}_{part}.png", dpi=130)


def panels(of):
    """Return a figure with a panel for each task, in two columns, and the axes by task."""
    rows = -(-len(of) // 2)
    figure = Figure(figsize=(9.2, 3.2 * rows + 0.4), layout="constrained", facecolor="white")
    grid = figure.subplots(rows, 2, squeeze=False).ravel()
    found = dict(zip(of, grid, strict=False))
    for name, axes in found.items():
        axes.set_title(of[name].title, loc="left", fontweight="bold", fontsize=10)
    return figure, found


def legend(figure, found):
    """Add one legend below all panels, in which each label of any panel occurs once."""
    named = {}
    for axes in found.values():
        for curve, text in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(text, curve)
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=4)


def ratio(records, ratios, of):
    """Draw E|g^|^2 / |g|^2 over the steps of training, with a curve for each seed and lines at 1 + e^2.

    g is the exact gradient, and g^ that of the error bound or of the fixed bits that grid search takes.
    """
    figure, found = panels(of)
    for name, axes in found.items():
        for arm in PICTURED:
            limit = 1 + arms.BOUNDS[arm]["e2"]
            axes.axhline(
                limit, color=COLORS[arm], linestyle="--", linewidth=1.2, label=f"1 + e² = {limit}"
            )
        axes.axhline(1, color=style.INK, linewidth=0.8)
        taken = {r["arm"] for r in records if r["task"] == name and r["is_grid"]}
        drawn = dict.fromkeys(taken, (GRID, "s", "fixed bits of the grid search"))
        drawn |= {arm: (COLORS[arm], MARKERS[arm], NAMES[arm]) for arm in PICTURED}
        for arm, (color, marker, text) in drawn.items():
            runs = {}
            for row in ratios:
                if (row["task"], row["arm"]) == (name, arm):
                    runs.setdefault(row["seed"], []).append(row)
            for points in runs.values():
                points = sorted(points, key=lambda row: row["step"])
                axes.errorbar(
                    [row["step"] for row in points],
                    [row["ratio"] for row in points],
                    [row["ratio_error"] for row in points],
                    color=color,
                    marker=marker,
                    markersize=3.5,
                    linewidth=1.2,
                    elinewidth=0.8,
                    label=text,
                )
        axes.set_xlabel("step")
        axes.set_ylabel("E|ĝ|² / |g|²")
    legend(figure, found)
    return figure


def scores(records, of):
    """Draw the change of the score over the compression, fixed bits as a curve, error bounds as points. Up is good."""
    figure, found = panels(of)
    for name, axes in found.items():
        task = of[name]
        own = [r for r in records if r["task"] == name and r["score"] is not None]
        exact = next(r for r in own if r["arm"] == arms.EXACT)
        spread = exact["score_std"] or 0
        axes.axhspan(-spread, spread, color=style.GRID, label="spread of exact runs", zorder=0)
        axes.axhline(0, color=style.INK, linewidth=0.8)
        fixed = [r for r in own if r["arm"] in arms.FIXED]
        _points(axes, task, fixed, GRID, "s", "fixed bits", linewidth=1.2)
        for record in fixed:
            axes.annotate(
                record["arm"].removesuffix(" bits"),
                (record["compression"], record["score_change"]),
                xytext=(4, 5),
                textcoords="offset points",
                color=style.MUTED,
                fontsize=8,
            )
        for record in fixed:
            if record["is_grid"]:
                axes.plot(
                    record["compression"],
                    record["score_change"],
                    "o",
                    markersize=12,
                    markerfacecolor="none",
                    markeredgecolor=style.INK,
                    linestyle="none",
                    label="taken by grid search",
                )
        for arm in arms.BOUNDS:
            record = [r for r in own if r["arm"] == arm]
            _points(axes, task, record, COLORS[arm], MARKERS[arm], NAMES[arm], markersize=7)
        if max(abs(r["score_change"]) for r in own) > 8 * spread > 0:
            axes.set_yscale("symlog", linthresh=2 * spread)
        if task.sign < 0:
            axes.invert_yaxis()
        axes.set_xlabel("compression")
        axes.set_ylabel(f"change of {LABELS[task.score]}, {task.unit}")
    legend(figure, found)
    return figure


LABELS = {"accuracy": "accuracy", "final": "held-out loss", "psnr": "PSNR"}


def _points(axes, task, records, color, marker, text, linewidth=0.0, markersize=4.5):
    """Draw mean changes of the score. The bars show the standard errors of the changes, in pairs of equal seeds."""
    if records:
        axes.errorbar(
            [r["compression"] for r in records],
            [r["score_change"] for r in records],
            [(r["score_change_std"] or 0) / r["seeds"] ** 0.5 for r in records],
            color=color,
            marker=marker,
            markersize=markersize,
            linewidth=linewidth,
            elinewidth=1,
            capsize=2,
            label=text,
        )
