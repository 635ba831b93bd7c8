"""Functions of one number as piecewise polynomials, checked against samples that made none of them.

`resolve_panels` cuts the domain into panels. On each of them f is interpolated twice, at two sets of
Chebyshev points that share no point, on an interval that reaches beyond the panel as far as f is smooth.
A panel is kept if the two interpolants (or their derivatives) agree, and if the second one meets every
sample of an even mesh that lies in the panel; else it is halved. The distance between two interpolants
that know different samples bounds neither by a proof, but it shows both causes of error: a polynomial of
too low a degree, and rounding in f, which no smaller panel can mend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["RESOLUTION", "Panels", "Unresolved", "resolve_panels", "slope_within"]

RESOLUTION = 2**17
# The two interpolants' numbers of points. Cosines of odd multiples of pi/40 and pi/56 are never equal.
_FEWER, _MORE = 20, 28
# How far an interpolant reaches beyond its panel: derivatives are noisiest at the ends of the reach.
_OVERLAP = 0.25
_CAUTION = 4.0
_MOST_PANELS = 8192
_EPS = float(np.finfo(np.float64).eps)


class Unresolved(Exception):
    """A place where f cannot be resolved, the least error that was reached there, and the error allowed."""

    def __init__(self, place: float, error: float, allowed: float):
        super().__init__(place, error, allowed)
        self.place, self.error, self.allowed = place, error, allowed


@dataclass(frozen=True)
class Panels:
    """Polynomials on adjacent intervals of the domain.

    Attributes:
        left: The panels' lower ends, ascending, shape (n,). Where one panel ends and the next one starts,
            the point belongs to the next; between two that have a gap, to the one before.
        right: The panels' upper ends.
        center: The middle of the interval in which a panel's polynomial is a Chebyshev series.
        half: Half of that interval's length.
        coefficients: The Chebyshev series, shape (terms, n).
        error: The largest distance seen between two interpolants, times a factor of caution; in the derivative
            if that was asked for.
    """

    left: np.ndarray
    right: np.ndarray
    center: np.ndarray
    half: np.ndarray
    coefficients: np.ndarray
    error: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Evaluate the polynomials at x (m,); outside the panels the outermost ones continue."""
        at = self._at(x)
        return _chebyshev(self.coefficients[:, at], (x - self.center[at]) / self.half[at])

    def derivative(self) -> Panels:
        """Return the derivative of the polynomials."""
        slopes = _differentiated(self.coefficients) / self.half
        return Panels(self.left, self.right, self.center, self.half, slopes, self.error)

    @property
    def edges(self) -> tuple[float, ...]:
        """The ends of all panels, ascending."""
        return tuple(np.union1d(self.left, self.right).tolist())

    def largest(self) -> float:
        """Return the largest |value| at 33 points of every panel."""
        x = self.points(32)
        return float(np.abs(self(x)).max())

    def contain(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Tell which intervals (m,) lie in one panel each."""
        at = self._at(left)
        return (self.left[at] <= left) & (right <= self.right[at])

    def integrals(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the integrals over intervals (m,) that lie in one panel each."""
        at = self._at(left)
        series = _integrated(self.coefficients)[:, at]
        ends = ((x - self.center[at]) / self.half[at] for x in (right, left))
        upper, lower = (_chebyshev(series, t) for t in ends)
        return (upper - lower) * self.half[at]

    def _at(self, x: np.ndarray) -> np.ndarray:
        return np.clip(np.searchsorted(self.left, x, side="right") - 1, 0, len(self.left) - 1)

    def points(self, per_panel: int = 16) -> np.ndarray:
        """Return points that follow every turn of the polynomials, ends of panels among them."""
        steps = 0.5 - 0.5 * np.cos(np.linspace(0.0, np.pi, per_panel + 1))
        return np.unique(self.left + (self.right - self.left) * steps[:, None])


def resolve_panels(
    f: Callable[[np.ndarray], np.ndarray],
    segments: Sequence[tuple[float, float]],
    tolerance: float,
    *,
    order: int,
    narrowest: float = 0.0,
) -> Panels:
    """Interpolate f by polynomials on panels that are as wide as the tolerance allows.

    Args:
        f: Maps float64 (m,) to float64 (m,), finite on every segment.
        segments: The closed intervals on which f is smooth, ascending.
        tolerance: The largest error, as a share of the largest |f| (order 0) or |f'| (order 1).
        order: Whether values (0) or derivatives (1) have to be that accurate.
        narrowest: Panels of less than this share of the whole are kept as they are, for functions
            that have a point in which no polynomial is like them.

    Raises:
        Unresolved: If panels as narrow as floats allow, or more of them than can be afforded, do not suffice.
    """
    samples, values, spacing = _sampled(f, segments)
    scale = _scale(samples, values, segments, order)
    allowed = tolerance * scale
    extent = segments[-1][1] - segments[0][0]
    left, right = (np.array(ends) for ends in zip(*segments, strict=True))
    low, high = left, right
    least = np.full(len(left), np.inf)
    kept: list[tuple[np.ndarray, ...]] = []
    count = 0
    while len(left):
        fits = _Fits(f, left, right, low, high)
        error = fits.errors[order]
        close = _CAUTION * error <= allowed
        missed = np.zeros(len(left))
        missed[close] = fits.missed(samples, values, np.flatnonzero(close))
        size = fits.size + np.maximum(np.abs(left), np.abs(right)) * scale * order
        tolerated = 4.0 * fits.errors[0] + np.maximum(
            allowed * (spacing if order else 1.0), 32.0 * _EPS * size
        )
        good = close & (missed <= tolerated)
        # A sample that is missed is worth the slope from its neighbor.
        error = np.where(close & ~good, missed / (spacing if order else 1.0), error)
        least = np.fmin(least, error)
        width = right - left
        tiny = width <= 64.0 * _EPS * np.maximum(np.abs(left), np.abs(right))
        hopeless = ~good & (tiny | (width <= 1e-290))
        if narrowest:
            good |= width <= narrowest * extent
        elif hopeless.any():
            raise _unresolved(left, np.where(hopeless, least, -1.0), allowed)
        kept.append((left[good], right[good], *fits.series(good), error[good]))
        count += int(good.sum())
        left, right, low, high, least = (ends[~good] for ends in (left, right, low, high, least))
        if count + 2 * len(left) > _MOST_PANELS:
            raise _unresolved(left, least, allowed)
        middle = left + 0.5 * (right - left)
        left, right = np.concatenate([left, middle]), np.concatenate([middle, right])
        low, high, least = np.tile(low, 2), np.tile(high, 2), np.tile(least, 2)
    left, right, center, half, coefficients, error = (
        np.concatenate(parts, axis=-1) for parts in zip(*kept, strict=True)
    )
    order_of = np.argsort(left)
    return Panels(
        left[order_of],
        right[order_of],
        center[order_of],
        half[order_of],
        coefficients[:, order_of],
        _CAUTION * float(error.max()),
    )


def _unresolved(left, least, allowed):
    worst = int(np.argmax(least))
    return Unresolved(float(left[worst]), _CAUTION * float(least[worst]), allowed)


def slope_within(f, start: np.ndarray, end: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the slopes at x (m,) of polynomials that interpolate f on intervals (m,) around x."""
    center, half = start + 0.5 * (end - start), 0.5 * (end - start)
    nodes = center + half * _NODES[_FEWER][:, None]
    y = f(nodes.ravel()).reshape(nodes.shape)
    series = _differentiated(_interpolated(y, np.zeros_like(y)))
    return _chebyshev(series, (x - center) / half) / half


class _Fits:
    """Two interpolants of f on every panel, and how far they are apart."""

    def __init__(self, f, left, right, low, high):
        reach = _OVERLAP * (right - left)
        start, end = np.maximum(low, left - reach), np.minimum(high, right + reach)
        self.left, self.right = left, right
        self.center, self.half = start + 0.5 * (end - start), 0.5 * (end - start)
        nodes = np.concatenate([_NODES[_FEWER], _NODES[_MORE]])
        x = np.clip(self.center + self.half * nodes[:, None], start, end)
        y = f(x.ravel()).reshape(x.shape)
        # x is rounded, and f was asked there. What that changes is as large as f' and known well enough.
        shift = nodes[:, None] - (x - self.center) / self.half
        self.fewer = _interpolated(y[:_FEWER], shift[:_FEWER])
        self.more = _interpolated(y[_FEWER:], shift[_FEWER:])
        self.size = np.abs(y).max(axis=0)
        share = np.linspace(0.0, 1.0, 25)[:, None]
        t = (left + (right - left) * share - self.center) / self.half
        apart = self.more.copy()
        apart[:_FEWER] -= self.fewer
        self.errors = (
            np.abs(_chebyshev(apart[:, None, :], t)).max(axis=0),
            np.abs(_chebyshev(_differentiated(apart)[:, None, :], t)).max(axis=0) / self.half,
        )

    def missed(self, samples, values, panels):
        """Return the largest distance of a sample from the panels' polynomial, for the given panels."""
        starts = np.searchsorted(samples, self.left[panels], side="right")
        stops = np.searchsorted(samples, self.right[panels], side="right")
        lengths = stops - starts
        out = np.zeros(len(panels))
        if not lengths.sum():
            return out
        of = np.repeat(np.arange(len(panels)), lengths)
        first = np.cumsum(lengths) - lengths
        at = np.arange(lengths.sum()) - np.repeat(first - starts, lengths)
        series = panels[of]
        t = (samples[at] - self.center[series]) / self.half[series]
        apart = np.abs(_chebyshev(self.more[:, series], t) - values[at])
        np.maximum.at(out, of, apart)
        return out

    def series(self, which):
        return self.center[which], self.half[which], self.more[:, which]


def _sampled(f, segments):
    """Even samples of every segment, closer ones next to 0, and the distance between the even ones."""
    spacing = (segments[-1][1] - segments[0][0]) / RESOLUTION
    near = np.geomspace(1e-12, 0.1, 45)
    parts = []
    for low, high in segments:
        inner = np.linspace(low, high, max(17, int((high - low) / spacing)))
        close = np.concatenate([-near, near])
        parts.append(np.concatenate([inner, close[(close > low) & (close < high)]]))
    samples = np.unique(np.concatenate(parts))
    return samples, f(samples), spacing


def _scale(samples, values, segments, order):
    """A lower bound of the largest |f|, or of the largest |f'| by the mean value theorem."""
    if order == 0:
        return float(np.abs(values).max())
    largest = 0.0
    for low, high in segments:
        inside = (samples >= low) & (samples <= high)
        x, y = samples[inside][::4], values[inside][::4]
        largest = max(largest, float(np.max(np.abs(np.diff(y) / np.diff(x)), initial=0.0)))
    return largest


def _interpolated(y, shift):
    """The Chebyshev series through y at the nodes, after y is moved by what `shift` of a node changes."""
    series = _SERIES[len(y)] @ y
    slope = _SLOPES[len(y)] @ series
    return _SERIES[len(y)] @ (y + slope * shift)


def _chebyshev(coefficients, t):
    """The sum of a series (terms, ...) at t by Clenshaw's recurrence."""
    two = 2.0 * t
    ahead = behind = np.zeros_like(t)
    for coefficient in coefficients[:0:-1]:
        behind, ahead = ahead, coefficient + two * ahead - behind
    return coefficients[0] + t * ahead - behind


def _differentiated(series):
    """The series of the derivative by its argument, as long as before."""
    out = np.zeros_like(series)
    terms = len(series)
    for k in range(terms - 1, 0, -1):
        out[k - 1] = (out[k + 1] if k + 1 < terms else 0.0) + 2.0 * k * series[k]
    out[0] *= 0.5
    return out


def _integrated(series):
    """The series of an antiderivative by its argument, longer by one term."""
    out = np.zeros((len(series) + 1, *series.shape[1:]))
    twice = series.copy()
    twice[0] *= 2.0
    for k in range(1, len(series) + 1):
        after = twice[k + 1] if k + 1 < len(series) else 0.0
        out[k] = (twice[k - 1] - after) / (2.0 * k)
    return out


def _constants(count):
    angles = np.pi * (np.arange(count) + 0.5) / count
    series = 2.0 / count * np.cos(np.arange(count)[:, None] * angles)
    series[0] *= 0.5
    nodes = np.cos(angles)
    slopes = np.polynomial.chebyshev.chebvander(nodes, count - 1) @ _differentiated(np.eye(count))
    return nodes, series, slopes


_NODES, _SERIES, _SLOPES = (
    dict(zip((_FEWER, _MORE), parts, strict=True))
    for parts in zip(*(_constants(count) for count in (_FEWER, _MORE)), strict=True)
)
