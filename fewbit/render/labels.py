"""Labels beside the points of a figure. They cover neither points nor each other."""

from __future__ import annotations

from itertools import product

import numpy as np

SIZE = 7.5  # the font size, in points
# Directions (x, y) from a point to its label, the preferred ones first, and directions between them.
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
BETWEEN = tuple(side for h in (0.5, -0.5) for side in ((1, h), (-1, h), (h, 1), (h, -1)))
# The horizontal and the vertical alignment of a label, by the component of its direction along x or y.
ALIGNED = {1: ("left", "bottom"), -1: ("right", "top")}
DISTANCES = (3, 6, 9)  # of a label from its point's marker, in points
STEP = 2.0  # pixels: the least distance of two labels, and of the sampled positions along a line


def add_labels(axes, labels) -> None:
    """Write each label (text, (x, y) in data coordinates, color) beside its point so that it covers no other label and no point.

    Lines of the figure are avoided if possible. The most important label comes first; one without a place is left out.
    """
    from matplotlib.patheffects import withStroke

    axes.figure.draw_without_rendering()  # lays the figure out
    pixels = axes.figure.dpi / 72  # per point, the unit of font sizes
    lines, markers = _lines(axes, pixels)
    taken, inside = [], axes.get_window_extent()
    for text, point, color in labels:
        note = axes.annotate(
            text, point, (0, 0), textcoords="offset points", fontsize=SIZE, color=color
        )
        note.set_path_effects([withStroke(linewidth=2, foreground="white")])  # for labels on lines
        extent, place = note.get_window_extent(), axes.transData.transform(point)
        radius = max((r for at, r in markers if np.abs(at - place).sum() < 1), default=0.0)
        free = [
            (box, side, gap)
            for box, side, gap in _boxes(place, extent.size, radius, pixels)
            if _is_within(box, inside)
            and not any(_overlap(box, other) for other in taken)
            and not any(_covered(box, at[None], r) for at, r in markers)
        ]
        if not free:
            note.remove()
            continue
        box, side, gap = min(free, key=lambda found: _hidden(found, place, radius, lines, pixels))
        (ha, x), (va, y) = (
            _aligned(step, gap, length / pixels, axis)
            for axis, (step, length) in enumerate(zip(side, extent.size, strict=True))
        )
        note.set(ha=ha, va=va, position=(x, y))
        taken.append(box)


def _aligned(where: float, gap: float, length: float, axis: int) -> tuple[str, float]:
    """Return a label's alignment along an axis (0 or 1), in the direction `where` of -1 to 1, and its offset in points."""
    if where in ALIGNED:
        return ALIGNED[where][axis], where * gap
    return "center", where * (gap + length / 2)


def _boxes(place, size, radius: float, pixels: float):
    """Yield (box (x0, y0, x1, y1) in pixels, side, gap in points) for a label around a marker, the preferred first."""
    for distance, side in product(DISTANCES, SIDES + BETWEEN):
        gap, where = radius + distance * pixels, np.array(side)
        low = place + where * gap + (where - 1) / 2 * size
        yield (*low, *(low + size)), side, gap / pixels


def _hidden(found, place, radius: float, lines, pixels: float) -> tuple[bool, bool, int]:
    """Return a sort key: whether a line lies between label and marker, whether the label covers one, and how much."""
    box, side, gap = found
    between = [place + np.array(side) * step for step in np.linspace(radius, gap * pixels, 5)]
    is_apart = any(_covered((*point, *point), lines, STEP) for point in between)
    covered = _covered(box, lines, 1.0)
    return is_apart, covered > 0, covered


def _lines(axes, pixels):
    along, markers = [np.empty((0, 2))], []
    for line in axes.lines:
        corners = line.get_transform().transform(np.column_stack(line.get_data()))
        if line.get_linestyle() != "None":
            for start, end in zip(corners, corners[1:], strict=False):
                count = 2 + int(np.hypot(*(end - start)) / STEP)
                along.append(np.linspace(start, end, count))
        if line.get_marker() != "None":
            markers += [(corner, line.get_markersize() / 2 * pixels) for corner in corners]
    return np.concatenate(along), markers


def _is_within(box, extent) -> bool:
    x0, y0, x1, y1 = box
    return x0 >= extent.x0 and y0 >= extent.y0 and x1 <= extent.x1 and y1 <= extent.y1


def _overlap(a, b) -> bool:
    """Return whether boxes overlap or nearly do, since labels' sizes depend on the resolution."""
    near_x = a[0] < b[2] + STEP and b[0] < a[2] + STEP
    return near_x and a[1] < b[3] + STEP and b[1] < a[3] + STEP


def _covered(box, places, margin: float) -> int:
    x0, y0, x1, y1 = box
    x, y = places.T
    near = (x > x0 - margin) & (x < x1 + margin) & (y > y0 - margin) & (y < y1 + margin)
    return int(near.sum())
