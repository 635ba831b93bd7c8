"""Find the kinks of a function of one number: the points at which the function or one of its derivatives jumps.

`jumps` halves intervals down to adjacent floats. `find_bends` approximates the function by polynomials on panels: none approximates a
corner, and the kink is placed where polynomials of both sides of the remaining gap meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from fewbit.functions.panels import Panels, Side, one_sided, resolve_panels

Flat = Callable[[np.ndarray], np.ndarray]

_EPS = float(np.finfo(np.float64).eps)
# Panels as narrow as this share of the domain are suspected to contain a kink: 2e-5 on [-10, 10].
_SUSPECT = 2.0**-20
# A panel as narrow as this share of the domain is not halved again until the kink in the panel is located.
_NARROW = 2.0**-30
# The widest gap between the polynomials of both sides, as a share of the intervals on which they were fitted.
_WIDEST_GAP = 2e-3
# The largest number of searches. Every search takes the kinks of the searches before as known.
_ROUNDS = 4


def segments(domain: tuple[float, float], points: Sequence[float]) -> list[tuple[float, float]]:
    """Return the intervals between points of the domain, without the points themselves."""
    low, high = domain
    inside = sorted(point for point in points if low <= point <= high)
    starts = [low, *(math.nextafter(point, math.inf) for point in inside)]
    ends = [*(math.nextafter(point, -math.inf) for point in inside), high]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


def wide_mesh(low: float, high: float) -> np.ndarray:
    """Return 1025 even points from low to high, and geometrically spaced points around zero."""
    fine = np.geomspace(1e-12, 0.1, 45)
    mesh = np.unique(np.concatenate([np.linspace(low, high, 1025), -fine, [0.0], fine]))
    return mesh[(mesh >= low) & (mesh <= high)]


# --- jumps of a function that can be evaluated -------------------------------------------------------------


def jumps(g: Flat, low: float, high: float, least: float | None = None) -> list[float]:
    """Find the points at which g jumps by more than `least` (default: 1e-7 of max |g|).

    Of the two adjacent floats around a jump, the one with the shorter decimal is returned.
    """
    mesh = wide_mesh(low, high)
    y = g(mesh)
    largest = np.max(np.abs(y), where=np.isfinite(y), initial=0.0)
    left, right, at_left, at_right = mesh[:-1], mesh[1:], y[:-1], y[1:]
    found: set[float] = set()
    while True:
        alive = np.abs(at_right - at_left) > (1e-7 * largest if least is None else least)
        adjacent = np.nextafter(left, np.inf) >= right
        for pair in zip(
            left[alive & adjacent].tolist(), right[alive & adjacent].tolist(), strict=True
        ):
            found.add(min(pair, key=lambda x: len(repr(x))) + 0.0)
        alive &= ~adjacent
        if not alive.any():
            return sorted(found)
        left, right, at_left, at_right = left[alive], right[alive], at_left[alive], at_right[alive]
        middle = halfway(left, right)
        at_middle = g(middle)
        # g may be largest between points of the mesh.
        largest = np.max(np.abs(at_middle), where=np.isfinite(at_middle), initial=largest)
        goes_left = np.abs(at_middle - at_left) >= np.abs(at_right - at_middle)
        left, at_left = np.where(goes_left, left, middle), np.where(goes_left, at_left, at_middle)
        right, at_right = (
            np.where(goes_left, middle, right),
            np.where(goes_left, at_middle, at_right),
        )


def halfway(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the float halfway between left and right in the list of all floats."""
    lowest = np.iinfo(np.int64).min
    a, b = ((np.where(i < 0, lowest - i, i)) for i in (left.view(np.int64), right.view(np.int64)))
    middle = (a >> 1) + (b >> 1) + (a & b & 1)
    return np.where(middle < 0, lowest - middle, middle).view(np.float64)


# --- jumps of derivatives -----------------------------------------------------------------------


def find_bends(
    g: Flat, known: Sequence[float], domain: tuple[float, float], accuracy: float, *, order: int
) -> tuple[dict[float, int], Panels]:
    """Find the points at which a derivative of g jumps, besides the known points, between which g is continuous.

    `accuracy` is the largest error of the polynomials relative to the largest |g| (order 0), or of their derivatives
    relative to the largest derivative (order 1). If these cannot be so accurate, order 1 raises Unresolved.

    Returns:
        ({point: order of the lowest derivative that jumps there, 1 to 3, or 1 if g itself jumps}, the polynomials).
    """
    found: dict[float, int] = {}
    extent = domain[1] - domain[0]
    for _ in range(_ROUNDS):
        pieces = segments(domain, [*known, *found])
        panels = resolve_panels(g, pieces, accuracy, order=order, narrowest=_NARROW)
        gaps = panels.gaps(_SUSPECT * extent)
        new = {}
        for i, (low, high) in enumerate(gaps):
            piece = next(piece for piece in pieces if piece[0] <= low and high <= piece[1])
            start = max([piece[0], *(gap[1] for gap in gaps[:i])])
            end = min([piece[1], *(gap[0] for gap in gaps[i + 1 :])])
            if start < low and high < end:
                place, first = _meeting(g, (start, low), (high, end), panels.allowed, order, extent)
                if first:
                    new[place] = first
        found |= new
        if not new:
            break
    if order and panels.unresolved.any():
        panels = resolve_panels(g, pieces, accuracy, order=order)
    return found, panels


def _meeting(
    g: Flat,
    before: tuple[float, float],
    after: tuple[float, float],
    allowed: float,
    order: int,
    extent: float,
) -> tuple[float, int]:
    """Return (the point at which polynomials of both sides of a gap meet, the order of the derivative that jumps), or (nan, 0)."""
    low, high = before[1], after[0]
    left = one_sided(g, low, before[0], allowed, order)
    right = one_sided(g, high, after[1], allowed, order)
    if left is None or right is None:
        return math.nan, 0
    if high - low > _WIDEST_GAP * min(left.half, right.half):
        return math.nan, 0
    middle = 0.5 * (low + high)
    apart = abs(right.slope(middle, 0) - left.slope(middle, 0))
    if order == 0 and apart > 8.0 * (left.noise(0) + right.noise(0)):
        places = jumps(g, low, high, 0.5 * apart)
        if len(places) == 1:
            return places[0], 1
    for first in (1, 2, 3):
        jump = right.slope(middle, first) - left.slope(middle, first)
        if abs(jump) <= 8.0 * (left.noise(first) + right.noise(first)):
            continue
        # At the kink, all lower derivatives of the two polynomials agree. The difference of the highest of these
        # derivatives is nearly linear around the kink, so Newton's method finds its zero.
        shift = 0.0
        for _ in range(8):
            jump = right.slope(middle + shift, first) - left.slope(middle + shift, first)
            apart = right.slope(middle + shift, first - 1) - left.slope(middle + shift, first - 1)
            shift -= apart / jump if jump else math.inf
            if not abs(shift) <= high - low:
                break
        if not abs(shift) <= high - low or _vanishes(
            jump, first, left, right, middle + shift, high - low
        ):
            continue
        place = middle + shift
        spread = (left.noise(first - 1) + right.noise(first - 1)) / abs(jump)
        if spread > high - low:
            return math.nan, 0
        return _decimal(place, spread + 4.0 * _EPS * abs(place), extent), first
    return math.nan, 0


def _vanishes(jump: float, order: int, left: Side, right: Side, place: float, gap: float) -> bool:
    """Return whether a derivative may be continuous although both polynomials differ by `jump` at `place`."""
    if order == 3:
        return False
    after = right.slope(place, order + 1) - left.slope(place, order + 1)
    significant = abs(after) > 8.0 * (left.noise(order + 1) + right.noise(order + 1))
    return significant and abs(jump) <= 2.0 * abs(after) * gap


def _decimal(place: float, spread: float, extent: float) -> float:
    """Return a short decimal within `spread` of `place`, or `place`."""
    first = 1 - math.floor(math.log10(extent))
    for digits in range(first, first + 7):
        near = abs(round(place, digits) - place) <= 4.0 * spread
        if near and spread < 0.002 * 10.0**-digits:  # else a match is chance
            return round(place, digits) + 0.0
    return place
