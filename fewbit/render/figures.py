"""The common style of figures. matplotlib is imported when something is drawn, pyplot never."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path

from fewbit.errors import FewbitError, MissingPackageError
from fewbit.extras import needed_for
from fewbit.files import write_atomic
from fewbit.printable import one_line

INK, MUTED, GRID, ERROR = "#1f2328", "#6e7781", "#e6e8eb", "#c2410c"
STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.edgecolor": "#c9ced4",
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "text.usetex": False,  # names come from untrusted files, and TeX would execute commands in them
    "svg.hashsalt": "fewbit",  # so that the same figure gives the same file
}


def draw(fill: Callable, path: str | os.PathLike | None = None, force: bool = False, figure=None):
    """Draw a figure in the common style, save it if a path is given, with the errors of `Result.plot`, and return it.

    Args:
        fill: Draws into the Figure, and sets the size of a new one.
        path: The file to write, .png or .svg, if any.
        force: Whether to replace the file if it exists.
        figure: The figure to draw into, by default a new one.
    """
    if path is not None and Path(path).suffix.lower() not in (".png", ".svg"):
        raise FewbitError(f"{path}: expected a file name that ends in .png or .svg")
    with style():
        figure = new_figure() if figure is None else figure
        fill(figure)
    if path is not None:
        write_atomic(path, render(figure, Path(path).suffix.lower()[1:]), force=force)
    return figure


def new_figure():
    """Make an empty figure, which a notebook shows although pyplot has not made it."""
    matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", facecolor="white")
    figure._repr_png_ = partial(render, figure, dpi=80)
    return figure


def style():
    """Return a context manager in which matplotlib draws in the common style."""
    return matplotlib().rc_context(STYLE)


def render(figure, format: str = "png", dpi: int = 160) -> bytes:
    """Return a figure as PNG or SVG bytes. `dpi` is the resolution of a PNG, in pixels per inch."""
    buffer = BytesIO()
    with style(), warnings.catch_warnings():
        # A name may contain characters that no installed font has.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(
            buffer, format=format, dpi=dpi, metadata={"Date": None} if format == "svg" else None
        )
    return buffer.getvalue()


def literal(text: str) -> str:
    """Escape dollar signs, between which matplotlib would parse a formula."""
    return text.replace("$", r"\$")


def title(axes, text: str) -> None:
    """Write the title of a figure above the left end of its axes."""
    axes.set_title(literal(text), loc="left", color=INK, fontweight="bold")


def matplotlib(feature: str = "plotting"):
    """Import and return matplotlib for a `feature`, or raise FewbitError."""
    try:
        with needed_for(feature):
            import matplotlib
    except MissingPackageError:
        raise
    except Exception as error:  # such as ValueError for MPLBACKEND
        raise FewbitError(f"matplotlib cannot be used: {one_line(error)}") from None
    return matplotlib
