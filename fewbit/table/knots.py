"""The pieces of a step function q, and the stand-in of an unbiased table: the piecewise linear function that replaces f'.

M is the number of pieces, K that of levels and n that of knots, the corners of the stand-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fewbit.table.checks import (
    FLOAT32_MAX,
    MOST_PIECES,
    check_ascending,
    check_length,
    checked_numbers,
    checked_sides,
    set_fields,
    wrong,
)


def locate(x, breaks, closed: Sequence[str] | None = None) -> np.ndarray:
    """Return the index of the piece that contains x, int64 in [0, M-1] of x's shape.

    NaN is in the last piece. Breaks are float64 (M-1,), ascending; `closed` None means "right" for all.
    """
    limits = np.asarray(breaks, np.float64)
    if closed is not None and "left" in closed:
        # For float64 x, x >= b is the same as x > (the float64 just below b).
        with np.errstate(over="ignore"):  # the float below the smallest one is minus infinity
            below = np.nextafter(limits, -np.inf)
        limits = np.where(_is_left(closed), below, limits)
    return np.searchsorted(limits, np.asarray(x, np.float64), side="left")


def round_breaks(breaks, closed: Sequence[str]) -> np.ndarray:
    """Round breaks (M-1,) to float32, "right" ones down and "left" ones up, so that no float32 x changes its piece."""
    breaks = np.asarray(breaks, np.float64)
    nearest = to_float32(breaks)
    with np.errstate(
        over="ignore"
    ):  # numbers beyond the largest float32 become infinite, which is correct
        below = np.nextafter(nearest, np.float32(-np.inf))
        above = np.nextafter(nearest, np.float32(np.inf))
    down = np.where(nearest > breaks, below, nearest)
    up = np.where(nearest < breaks, above, nearest)
    return np.where(_is_left(closed), up, down)


class Rounded(NamedTuple):
    """The numbers of a table in float32, with which backends compute.

    Attributes:
        breaks: (M-1,), rounded by `round_breaks`.
        levels: (K,).
        points: The x of the knots (n,), rounded like breaks; None, as all below, without knots.
        values: The values of the stand-in at the knots (n,).
        slopes: The slopes of the stand-in between knots (n-1,).
        inverse_gaps: 1 / (levels[k+1] - levels[k]), (K-1,).
    """

    breaks: np.ndarray
    levels: np.ndarray
    points: np.ndarray | None
    values: np.ndarray | None
    slopes: np.ndarray | None
    inverse_gaps: np.ndarray | None


def _is_left(closed: Sequence[str]) -> np.ndarray:
    return np.array([side == "left" for side in closed], bool)


def to_float32(x) -> np.ndarray:
    """Round to float32. Numbers that are too large become infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float32)


def interpolate(x, segment, points, values, slopes) -> np.ndarray:
    """Return values[i] + (x - points[i]) * slopes[i], i = segment - 1, and constants outside the points. `segment` is from `locate`."""
    i = np.clip(segment - 1, 0, len(slopes) - 1)
    with np.errstate(
        invalid="ignore", over="ignore"
    ):  # for an infinite x, whose result is not used
        inside = values[i] + (x - points[i]) * slopes[i]
    return np.where(segment == 0, values[0], np.where(segment == len(points), values[-1], inside))


@dataclass(frozen=True, eq=False)
class Knots:
    """The stand-in of an unbiased table, given by its corners.

    Attributes:
        points: The x of the knots, float64 (n,), n >= 2, ascending, read-only. Two equal neighbors are a jump.
        values: The value at each knot, float64 (n,), read-only.
        closed: n strings, by default all "right". At a jump the stand-in has the value of the first knot with "right", and of
            the second with "left"; both knots must have the same string.

    Raises:
        TableError: An invariant does not hold. The message names the field.
    """

    points: np.ndarray
    values: np.ndarray
    closed: tuple[str, ...] | None = None

    def __post_init__(self):
        points = checked_numbers("points", self.points, limit=FLOAT32_MAX, most=MOST_PIECES)
        values = checked_numbers("values", self.values, limit=FLOAT32_MAX, most=MOST_PIECES)
        if len(points) < 2:
            raise wrong("points", "at least 2 numbers", len(points))
        check_length("values", values, len(points), "points")
        closed = checked_sides("closed", self.closed, len(points), "points")
        set_fields(self, points=points, values=values, closed=closed)
        _check_knots(self)

    def __call__(self, x) -> np.ndarray:
        """Return the stand-in, float64 of x's shape; constant outside its knots."""
        x = np.asarray(x, np.float64)
        return interpolate(
            x, locate(x, self.points, self.closed), self.points, self.values, self.slopes
        )[()]

    def __eq__(self, other) -> bool:
        return self.document() == other.document() if isinstance(other, Knots) else NotImplemented

    def __hash__(self) -> int:
        return hash((tuple(self.points.tolist()), tuple(self.values.tolist())))

    def __reduce__(self):
        return Knots, (self.points, self.values, self.closed)

    @property
    def slopes(self) -> np.ndarray:
        """The slopes between knots, float64 (n-1,); 0 at a jump."""
        width = np.diff(self.points)
        with np.errstate(over="ignore"):  # an overflow is reported by _check_knots
            return np.divide(np.diff(self.values), width, out=np.zeros_like(width), where=width > 0)

    def document(self) -> dict:
        """Return the `knots` of a table document, without `error`."""
        document = {"points": self.points.tolist(), "values": self.values.tolist()}
        if "left" in self.closed:
            document["closed"] = list(self.closed)
        return document


def _check_knots(knots: Knots) -> None:
    points, closed = knots.points, knots.closed
    check_ascending("points", points, strict=False)
    for i in np.flatnonzero(np.diff(points) == 0).tolist():
        if closed[i] != closed[i + 1]:
            raise wrong(
                f"closed[{i + 1}]",
                f'"{closed[i]}" as for the other knot of the jump',
                closed[i + 1],
            )
        if i + 2 < len(points) and points[i] == points[i + 2]:
            raise wrong(f"points[{i + 2}]", "at most two equal points", points[i + 2])
    steep = np.flatnonzero(~(np.abs(knots.slopes) <= FLOAT32_MAX))
    if steep.size:
        raise wrong(
            f"points[{steep[0] + 1}]",
            "a segment whose slope is finite in float32",
            points[steep[0] + 1],
        )


def lower_pieces(levels, knots: Knots) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return `breaks` float64 (M-1,), `codes` int64 (M,) and `closed` of an unbiased table with levels (K,).

    A piece's code is that of the level below the stand-in, which crosses or jumps across an inner level at every break.
    """
    levels = np.asarray(levels, np.float64)
    candidates = {
        **dict(zip(knots.points.tolist(), knots.closed, strict=False)),
        **_crossings(levels[1:-1], knots),
    }
    points = np.array(sorted(candidates))
    inside = 0.5 * (points[1:] + points[:-1])
    codes = lower_level(
        knots(np.concatenate([[points[0] - 1.0], inside, [points[-1] + 1.0]])), levels
    )
    changes = np.flatnonzero(np.diff(codes))
    breaks = points[changes]
    return (
        breaks,
        codes[np.append(changes, len(codes) - 1)],
        tuple(candidates[x] for x in breaks.tolist()),
    )


def _crossings(levels: np.ndarray, knots: Knots) -> dict[float, str]:
    """Return {x: "right" or "left"} of the points between knots at which the stand-in crosses a level."""
    crossings = {}
    for x0, x1, v0, v1, slope in zip(
        knots.points, knots.points[1:], knots.values, knots.values[1:], knots.slopes, strict=False
    ):
        for level in levels[(levels > min(v0, v1)) & (levels < max(v0, v1))] if slope else ():
            # The stand-in equals the level at this point, so the point belongs to the part above the level.
            x = float(np.clip(x0 + (level - v0) / slope, x0, x1))
            if x0 < x < x1:
                crossings[x] = "left" if slope > 0 else "right"
    return crossings


def lower_level(mean, levels: np.ndarray) -> np.ndarray:
    """Return the index of the level below every value in `mean`, clipped to [0, K-2]: a draw takes this level or the next."""
    return np.clip(np.searchsorted(levels, mean, side="right") - 1, 0, len(levels) - 2)
