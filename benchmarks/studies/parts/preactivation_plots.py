"""The pictures of the results of `preactivation.py`."""

from __future__ import annotations

from matplotlib import rc_context
from matplotlib.figure import Figure

from fewbit.render import figures as style

COLORS = {
    ("torch", 32): style.MUTED,
    ("one tensor", 32): style.ERROR,
    ("PreActivation", 8): "#1d4ed8",
    ("PreActivation", 4): "#0e7490",
    ("PreActivation", 2): "#15803d",
}


def memory(rows, path):
    """Draw the saved bytes by depth: dots are counted, lines are by the formula."""
    with rc_context(style.STYLE):
        figure = Figure(figsize=(8, 4.5), layout="constrained", facecolor="white")
        axes = figure.subplots()
        for (kind, bits), color in COLORS.items():
            of = [row for row in rows if (row["kind"], row["bits"]) == (kind, bits)]
            depths, counted = _column(of, "depth"), [row["of_blocks"] / 2**20 for row in of]
            axes.plot(depths, counted, "o", color=color, markersize=5)
            if kind != "torch":
                formula = [row["formula"] / 2**20 for row in of]
                axes.plot(depths, formula, color=color, linewidth=1.2)
            name = "torch's own" if kind == "torch" else f"one tensor of {bits} bits"
            end = f"  {name}: {counted[-1]:.3g}"
            axes.annotate(end, (depths[-1], counted[-1]), va="center", color=color)
        axes.set(
            xlim=(0, 1.38 * max(depths)),
            ylim=(0, None),
            xlabel="layers",
            ylabel="MiB kept by the blocks",
            title="A forward of two 32 x 32 images: dots counted, lines by formula",
        )
        axes.set_xticks(sorted({row["depth"] for row in rows}))
        figure.savefig(path, dpi=130)


def noise(rows, path):
    """Draw the squared gradient errors and the variance between batches, by layer, at the start and end of training."""
    moments = list(dict.fromkeys(_column(rows, "moment")))
    with rc_context(style.STYLE):
        figure = Figure(figsize=(10, 4.4), layout="constrained", facecolor="white")
        panels = figure.subplots(1, len(moments), sharey=True, squeeze=False)[0]
        for axes, moment in zip(panels, moments, strict=True):
            at = [row for row in rows if row["moment"] == moment]
            widths = sorted({row["bits"] for row in at})
            of = [row for row in at if row["bits"] == widths[0]]
            label = "variance between batches"
            _dots(axes, of, "variance", style.INK, label)
            for bits in widths:
                of = [row for row in at if row["bits"] == bits]
                color = COLORS["PreActivation", bits]
                _dots(axes, of, "error", color, f"squared error, {bits} bits")
            axes.set(title=f"at the {moment} of training", xlabel="convolution", yscale="log")
        panels[0].set_ylabel("of an element of the weight's gradient")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.savefig(path, dpi=130)


def _dots(axes, rows, value, color, label):
    axes.plot(_column(rows, "layer"), _column(rows, value), ".", color=color, label=label)


def _column(rows, name):
    return [row[name] for row in rows]
