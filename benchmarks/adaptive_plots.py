"""The pictures of the results of `adaptive_bits.py`. A point is a moment of the training, "a quarter" or "the end"."""

from __future__ import annotations

import statistics

import adaptive_arms as arms
import matplotlib
from matplotlib.figure import Figure

from fewbit.render import figures as style

COLORS = {
    "L2": "#6e7781",
    "L2.5": "#2a788e",
    "L3": "#440154",
    "L2.5, numbered": "#5ec962",
    "L3, numbered": "#c2a5cf",
    arms.TABLES: "#440154",
    arms.QUANTIZED: style.ERROR,
    arms.SHARED: "#2a788e",
}
MARKERS = dict(zip(COLORS, "ovD^dDsv", strict=True))
LEVELS = (*arms.LEVELS, *arms.NUMBERED)
TITLES = {"resnet": "ResNet, ReLU", "gelu resnet": "ResNet, GELU", "transformer": "Transformer"}
POINTS = {"a quarter": "after a quarter of training", "the end": "after training"}


def plot(rows, measured, folder, name):
    """Draw <name>_variance.png, _loss.png and _activations.png into a folder.

    Args:
        rows: The rows of the training runs.
        measured: The rows of the gradients.
        folder: The folder.
        name: The beginning of the file names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(style.STYLE):
        pictures = {
            "variance": variance(measured),
            "loss": loss(rows),
            "activations": activations(rows, measured),
        }
        for part, figure in pictures.items():
            figure.savefig(folder / f"{name}_{part}.png", dpi=130)


def grouped(measured, value):
    """Return {(network, point, method, bits): (mean over seeds, values)} of the number `value` of gradient rows."""
    values = {}
    for row in measured:
        key = row["network"], row["point"], row["method"], row["bits"]
        values.setdefault(key, []).append(row[value])
    return {key: (statistics.fmean(each), each) for key, each in values.items()}


def differences(rows):
    """Return {(network, method, bits): list of final losses minus the exact loss of the same seed}.

    The list has None for a run that diverged.
    """
    exact = {(r["network"], r["seed"]): r["final"] for r in rows if r["method"] == "exact"}
    found = {}
    for row in rows:
        base = exact.get((row["network"], row["seed"]))
        if row["method"] != "exact" and base is not None:
            off = None if row["final"] is None else row["final"] - base
            found.setdefault((row["network"], row["method"], row["bits"]), []).append(off)
    return found


def panels(width, height, rows, columns, **shared):
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def curve(axes, method, points):
    """Draw the means of `points`, {bits: values over seeds}, with bars from the least value to the greatest."""
    is_below = method == "L2"  # drawn larger, behind L2.5, which has the same values at whole bits
    bits = sorted(points)
    means = [statistics.fmean(points[each]) for each in bits]
    below = [mean - min(points[each]) for mean, each in zip(means, bits, strict=True)]
    above = [max(points[each]) - mean for mean, each in zip(means, bits, strict=True)]
    axes.errorbar(
        bits,
        means,
        (below, above),
        color=COLORS[method],
        marker=MARKERS[method],
        markersize=8 if is_below else 4.5,
        markerfacecolor="white" if is_below else None,
        linewidth=1.4,
        elinewidth=1,
        capsize=2,
        label=method,
    )


def legend(figure, axes, **options):
    """Add a legend of the curves of `axes` below all panels."""
    curves, names = axes.get_legend_handles_labels()
    figure.legend(curves, names, loc="outside lower center", ncols=len(names), **options)


def label(axes, title, y, first):
    axes.set_title(title, loc="left", fontweight="bold", fontsize=10)
    axes.set_xlabel("bits an element")
    if first:
        axes.set_ylabel(y)


def variance(measured):
    """Draw gradient variances, with a row of panels for each point of the training and a column for each network."""
    networks, found = ("transformer", "resnet"), grouped(measured, "variance")
    figure, grid = panels(9.2, 6.6, len(POINTS), len(networks), sharex=True, sharey="col")
    for (point, when), row in zip(POINTS.items(), grid, strict=True):
        for axes, network in zip(row, networks, strict=True):
            for method in LEVELS:
                points = {
                    bits: values
                    for (*place, bits), (_, values) in found.items()
                    if place == [network, point, method]
                }
                if points:
                    curve(axes, method, points)
            sampling = found.get((network, point, "sampling", 0))
            if sampling:
                axes.axhline(
                    sampling[0], color=style.INK, linestyle=":", label="sampling of batches"
                )
            axes.set_yscale("log")
            label(
                axes,
                f"{TITLES[network]}, {when}",
                "gradient variance / |exact gradient|²",
                network == networks[0],
            )
    legend(figure, grid[0][-1])
    return figure


def loss(rows):
    networks, found = ("transformer", "resnet"), differences(rows)
    figure, grid = panels(9.2, 3.9, 1, len(networks))
    for axes, network in zip(grid[0], networks, strict=True):
        draw_losses(axes, network, LEVELS, found)
        label(axes, TITLES[network], "final held-out loss minus exact's", network == networks[0])
    legend(figure, grid[0][-1])
    return figure


def draw_losses(axes, network, methods, found):
    """Draw loss differences on a scale that is linear from -0.01 to 0.01 and logarithmic beyond."""
    axes.axhline(0, color=style.INK, linewidth=1)
    for method in methods:
        points = {
            bits: values
            for (*place, bits), values in found.items()
            if place == [network, method] and None not in values
        }
        if points:
            curve(axes, method, points)
    axes.set_yscale("symlog", linthresh=0.01)


def activations(rows, measured):
    """Draw final losses (first row) and gradient errors (second row) of the ways to save inputs of activations."""
    networks, found = ("transformer", "gelu resnet"), differences(rows)
    errors = grouped(measured, "error")
    figure, grid = panels(9.2, 6.6, 2, len(networks), sharex=True)
    for column, network in enumerate(networks):
        above, below = grid[0][column], grid[1][column]
        draw_losses(above, network, arms.ACTIVATIONS, found)
        for method in arms.ACTIVATIONS:
            points = {
                bits: values
                for (*place, bits), (_, values) in errors.items()
                if place == [network, "the end", method]
            }
            if points:
                curve(below, method, points)
        below.set_yscale("log")
        title = TITLES[network] + ", GELU" * (network == "transformer")
        label(above, title, "final held-out loss minus exact's", column == 0)
        label(
            below,
            f"{title}, after training",
            "squared gradient error / |exact gradient|²",
            column == 0,
        )
    legend(figure, grid[0][-1])
    return figure
