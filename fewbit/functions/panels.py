"""Approximate a function f of one number by polynomials on intervals, which are called panels.

On each panel f is interpolated at 20 and at 28 Chebyshev points, spread over the panel and a quarter of its width on both sides. A panel
is kept if the interpolants, or their derivatives, agree, and the second with f at an even mesh; else it is halved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

# The number of steps of the even mesh of samples on the domain.
RESOLUTION = 2**17
# The numbers of points of the two interpolants.
_FEWER, _MORE = 20, 28
# The reach of an interpolant beyond its panel, as a share of the panel's width. Derivatives of interpolants are least
# accurate at the ends.
_OVERLAP = 0.25
# The factor by which the distance between the two interpolants is multiplied to estimate their error.
_CAUTION = 4.0
# The largest error of the values of f, as a share of max f - min f, if derivatives have to be accurate.
_OF_VALUES = 1e-8
# The differences between polynomial and f at two neighboring samples may differ by 8 rounding errors of f, plus the
# change that the allowed error of f' causes.
_ROUNDINGS = 8.0
_MOST_PANELS = 8192
# Points that are evaluated at a time, so that their coefficients fit into the processor's cache.
_BLOCK = 4096
_EPS = float(np.finfo(np.float64).eps)


class Unresolved(Exception):
    """Raised if polynomials on panels cannot approximate f closely enough near some x."""

    def __init__(self, place: float, allowed: float):
        super().__init__(place, allowed)
        self.place, self.allowed = place, allowed


@dataclass(frozen=True)
class Panels:
    """Polynomials that approximate a function f on adjacent intervals of the domain, the panels.

    Attributes:
        left: The lower ends (n,), ascending. A point where two panels meet belongs to the right one, a point in a gap to the left one.
        right: The upper ends (n,).
        center: (n,). Every polynomial is a Chebyshev series in t = (x - center) / half.
        half: (n,). Half of the length of the interval from t = -1 to t = 1, which contains the panel.
        coefficients: The Chebyshev series, (terms, n).
        error: The estimated largest error, of derivatives if `resolve_panels` got order 1.
        allowed: The largest error that was allowed for a panel.
        unresolved: bool (n,), panels that were kept although their polynomials do not agree with f, because they are as narrow as
            allowed or rounding of f causes the error.
    """

    left: np.ndarray
    right: np.ndarray
    center: np.ndarray
    half: np.ndarray
    coefficients: np.ndarray
    error: float
    allowed: float
    unresolved: np.ndarray

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Evaluate the polynomials at x (m,). The outermost ones are extrapolated."""
        out = np.empty_like(x)
        for start in range(0, len(x), _BLOCK):
            part = x[start : start + _BLOCK]
            at = self._at(part)
            t = (part - self.center[at]) / self.half[at]
            out[start : start + _BLOCK] = _chebyshev(self.coefficients[:, at], t)
        return out

    def derivative(self) -> Panels:
        """Return the derivative of the polynomials."""
        return replace(self, coefficients=_differentiated(self.coefficients) / self.half)

    def gaps(self, narrow: float) -> list[tuple[float, float]]:
        """Return the intervals in which a kink is suspected: groups of panels at most `narrow` wide or `unresolved`."""
        found: list[tuple[float, float]] = []
        width = self.right - self.left
        odd = self.unresolved | (width <= narrow)
        touching = odd[1:] & odd[:-1] & (self.left[1:] == self.right[:-1])
        starts = np.flatnonzero(odd & ~np.append(False, touching))
        stops = np.flatnonzero(odd & ~np.append(touching, False)) + 1
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            least = np.flatnonzero(width[start:stop] <= 1.5 * width[start:stop].min()) + start
            found.append((float(self.left[least[0]]), float(self.right[least[-1]])))
        return found

    @property
    def edges(self) -> tuple[float, ...]:
        """The ends of all panels, ascending."""
        return tuple(np.union1d(self.left, self.right).tolist())

    def largest(self) -> float:
        """Return the largest |polynomial| at 33 points of every panel."""
        x = self.points(32)
        return float(np.abs(self(x)).max())

    def contain(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return bool (m,): whether left[i] to right[i] lies within one panel."""
        at = self._at(left)
        return (self.left[at] <= left) & (right <= self.right[at])

    def integrals(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the integrals (m,) from left[i] to right[i], each within one panel."""
        at = self._at(left)
        series = _integrated(self.coefficients)[:, at]
        ends = ((x - self.center[at]) / self.half[at] for x in (right, left))
        upper, lower = (_chebyshev(series, t) for t in ends)
        return (upper - lower) * self.half[at]

    def _at(self, x: np.ndarray) -> np.ndarray:
        return np.clip(np.searchsorted(self.left, x, side="right") - 1, 0, len(self.left) - 1)

    def points(self, per_panel: int = 16) -> np.ndarray:
        """Return `per_panel` + 1 points of every panel, ends included."""
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
    """Interpolate f by polynomials on `Panels` that are as wide as the tolerance allows.

    Args:
        f: Maps float64 (m,) to float64 (m,), finite on every segment.
        segments: The closed intervals on which f is smooth, ascending.
        tolerance: The largest error, as a fraction of the largest |f| (order 0) or |f'| (order 1).
        order: 0 to limit the error of the polynomials, 1 that of their derivatives.
        narrowest: Panels of at most this fraction of the domain are kept even if inaccurate, so f may have kinks.

    Raises:
        Unresolved: A panel would have to be narrower than floats allow, or more than 8,192 would be needed.
    """
    judge = _Judge(f, segments, tolerance, order, narrowest)
    left, right = (np.array(ends) for ends in zip(*segments, strict=True))
    low, high = left, right
    kept: list[tuple[np.ndarray, ...]] = []
    count = 0
    while len(left):
        fits = _Fits(f, left, right, low, high)
        good, unresolved = judge(fits)
        error = fits.errors[order]
        kept.append((left[good], right[good], *fits.series(good), error[good], unresolved[good]))
        count += int(good.sum())
        left, right, low, high = (ends[~good] for ends in (left, right, low, high))
        if count + 2 * len(left) > _MOST_PANELS:
            raise Unresolved(float(left[len(left) // 2]), judge.allowed)
        middle = left + 0.5 * (right - left)
        left, right = np.concatenate([left, middle]), np.concatenate([middle, right])
        low, high = np.tile(low, 2), np.tile(high, 2)
    left, right, center, half, coefficients, error, unresolved = (
        np.concatenate(parts, axis=-1) for parts in zip(*kept, strict=True)
    )
    ascending = np.argsort(left)
    return Panels(
        left[ascending],
        right[ascending],
        center[ascending],
        half[ascending],
        coefficients[:, ascending],
        _CAUTION * float(error.max()),
        judge.allowed,
        unresolved[ascending],
    )


class _Judge:
    """Decides which panels are accurate enough. `allowed` is the tolerance times the largest |f| or |f'| found so far."""

    def __init__(self, f, segments, tolerance, order, narrowest):
        self.samples, self.values, self.spacing = _sampled(f, segments)
        self.scale = _scale(self.samples, self.values, segments, order)
        self.variation = float(np.ptp(self.values)) if order else np.inf
        self.narrowest = narrowest * (segments[-1][1] - segments[0][0])
        self.tolerance, self.order = tolerance, order
        self.allowed = 0.0

    def __call__(self, fits: _Fits) -> tuple[np.ndarray, np.ndarray]:
        """Return the panels to keep, and those of them whose polynomial does not agree with f; or raise Unresolved."""
        order, left, right = self.order, fits.left, fits.right
        error = fits.errors[order]
        # The samples may miss the steepest place of f, so the interpolants raise the scale too. Inaccurate interpolants
        # do not, because a scale above the largest |f'| would allow more than the tolerance.
        sure = _CAUTION * error <= 0.01 * fits.largest[order]
        self.scale = max(
            self.scale, 0.99 * float(np.max(fits.largest[order], where=sure, initial=0.0))
        )
        self.allowed = allowed = self.tolerance * self.scale
        # If f is steep elsewhere, the allowed error of f' is large. The bound on the error of f still detects aliasing.
        close = (_CAUTION * error <= allowed) & (
            _CAUTION * fits.errors[0] <= _OF_VALUES * self.variation
        )
        missed, uneven = np.zeros(len(left)), np.zeros(len(left))
        missed[close], uneven[close] = fits.missed(
            self.samples, self.values, np.flatnonzero(close), allowed if order else np.inf
        )
        size = fits.size + np.maximum(np.abs(left), np.abs(right)) * self.scale * order
        tolerated = 4.0 * fits.errors[0] + np.maximum(
            allowed * (self.spacing if order else 1.0), 32.0 * _EPS * size
        )
        good = close & (missed <= tolerated) & (uneven <= _ROUNDINGS * _EPS * size)
        width = right - left
        # Narrower panels do not reduce an error that is due to rounding.
        rounding = _EPS * size * (_MORE / fits.half if order else 1.0)
        unresolved = ~good & ((width <= self.narrowest) | (~close & (error <= 4.0 * rounding)))
        if self.narrowest:
            return good | unresolved, unresolved
        tiny = width <= 64.0 * _EPS * np.maximum(np.abs(left), np.abs(right))
        hopeless = ~good & (tiny | (width <= 1e-290))
        if hopeless.any():
            raise Unresolved(float(left[hopeless][0]), allowed)
        return good, unresolved


def slope_within(f, start: np.ndarray, end: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the slopes at x (m,) of polynomials that interpolate f on the intervals from start (m,) to end (m,)."""
    center, half = start + 0.5 * (end - start), 0.5 * (end - start)
    nodes = center + half * _NODES[_FEWER][:, None]
    y = f(nodes.ravel()).reshape(nodes.shape)
    series = _differentiated(_interpolated(y, np.zeros_like(y)))
    return _chebyshev(series, (x - center) / half) / half


@dataclass(frozen=True)
class Side:
    """A polynomial that approximates a function f on one side of a point, a Chebyshev series in t = (x - center) / half.

    Attributes:
        coefficients: The series, (terms,).
        errors: The estimated errors of the polynomial and of its derivative.
        size: The largest |f| that was found in the interval.
    """

    center: float
    half: float
    coefficients: np.ndarray
    errors: tuple[float, float]
    size: float

    def slope(self, x: float, order: int) -> float:
        """Return the derivative of the given order at x; order 0 is the value."""
        series = self.coefficients
        for _ in range(order):
            series = _differentiated(series)
        return (
            float(_chebyshev(series, np.float64((x - self.center) / self.half))) / self.half**order
        )

    def noise(self, order: int) -> float:
        """Estimate the error of `slope` at an end of the interval."""
        amplified = _MORE**2 / self.half
        rounding = 4.0 * _EPS * (self.size + abs(self.center) + self.half)
        return (
            self.errors[min(order, 1)] * amplified ** max(order - 1, 0)
            + rounding * amplified**order
        )


def one_sided(f, near: float, far: float, allowed: float, order: int) -> Side | None:
    """Interpolate f from `near` towards `far`, as far as the error for `order` is at most `allowed`; return a `Side`, or None."""
    ends = near + (far - near) * 0.5 ** np.arange(40.0)
    ends = ends[np.abs(ends - near) > 1e-12 * (1.0 + abs(near))]
    left, right = np.minimum(near, ends), np.maximum(near, ends)
    if not len(ends):
        return None
    fits = _Fits(f, left, right, left, right)
    good = np.flatnonzero(_CAUTION * fits.errors[order] <= allowed)
    if not len(good):
        return None
    at = good[0]
    errors = (float(fits.errors[0][at]), float(fits.errors[1][at]))
    center, half, series = fits.series(at)
    return Side(float(center), float(half), series, errors, float(fits.size[at]))


class _Fits:
    """Two interpolants of f on every panel, and the distance between them."""

    def __init__(self, f, left, right, low, high):
        reach = _OVERLAP * (right - left)
        start, end = np.maximum(low, left - reach), np.minimum(high, right + reach)
        self.left, self.right = left, right
        self.center, self.half = start + 0.5 * (end - start), 0.5 * (end - start)
        nodes = np.concatenate([_NODES[_FEWER], _NODES[_MORE]])
        x = np.clip(self.center + self.half * nodes[:, None], start, end)
        y = f(x.ravel()).reshape(x.shape)
        self.size = np.abs(y).max(axis=0)
        # A constant is subtracted from f, because a large constant would add rounding errors to every coefficient.
        constant = y[0].copy()
        y -= constant
        # f was evaluated at x, which is rounded. `shift` is the distance from there to the exact node, in units of t.
        shift = nodes[:, None] - (x - self.center) / self.half
        self.fewer = _interpolated(y[:_FEWER], shift[:_FEWER])
        self.more = _interpolated(y[_FEWER:], shift[_FEWER:])
        self.more[0] += constant
        self.fewer[0] += constant
        share = np.linspace(0.0, 1.0, 25)[:, None]
        t = (left + (right - left) * share - self.center) / self.half
        series = self.more[:, None, :]
        self.largest = (
            np.abs(_chebyshev(series, t)).max(axis=0),
            np.abs(_chebyshev(_differentiated(series), t)).max(axis=0) / self.half,
        )
        apart = self.more.copy()
        apart[:_FEWER] -= self.fewer
        self.errors = (
            np.abs(_chebyshev(apart[:, None, :], t)).max(axis=0),
            np.abs(_chebyshev(_differentiated(apart)[:, None, :], t)).max(axis=0) / self.half,
        )

    def missed(self, samples, values, panels, slope):
        """Return the largest |polynomial - f| in the panels (m,), and its largest change between neighboring samples.

        `slope` times the distance of the samples is subtracted from the changes, down to 0.
        """
        starts = np.searchsorted(samples, self.left[panels], side="right")
        stops = np.searchsorted(samples, self.right[panels], side="right")
        lengths = stops - starts
        largest, uneven = np.zeros(len(panels)), np.zeros(len(panels))
        if not lengths.sum():
            return largest, uneven
        of = np.repeat(np.arange(len(panels)), lengths)
        first = np.cumsum(lengths) - lengths
        at = np.arange(lengths.sum()) - np.repeat(first - starts, lengths)
        series = panels[of]
        t = (samples[at] - self.center[series]) / self.half[series]
        residual = _chebyshev(self.more[:, series], t) - values[at]
        np.maximum.at(largest, of, np.abs(residual))
        if slope < np.inf:
            same = of[1:] == of[:-1]
            change = np.abs(np.diff(residual)) - slope * np.diff(samples[at])
            np.maximum.at(uneven, of[1:][same], change[same])
        return largest, uneven

    def series(self, which):
        return self.center[which], self.half[which], self.more[:, which]


def _sampled(f, segments):
    """Return (samples, f at the samples, spacing): an even mesh of every segment, denser around 0."""
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
    """Return a lower bound of max |f| (order 0) or max |f'| (order 1)."""
    if order == 0:
        return float(np.abs(values).max())
    largest = 0.0
    for low, high in segments:
        inside = (samples >= low) & (samples <= high)
        x, y = samples[inside][::4], values[inside][::4]
        largest = max(largest, float(np.max(np.abs(np.diff(y) / np.diff(x)), initial=0.0)))
    return largest


def _interpolated(y, shift):
    """Return the Chebyshev series with the values y at t = node - shift, to first order in `shift`."""
    series = _SERIES[len(y)] @ y
    slope = _SLOPES[len(y)] @ series
    return _SERIES[len(y)] @ (y + slope * shift)


def _chebyshev(coefficients, t):
    two = 2.0 * t
    ahead = behind = np.zeros_like(t)
    for coefficient in coefficients[:0:-1]:
        behind, ahead = ahead, coefficient + two * ahead - behind
    return coefficients[0] + t * ahead - behind


def _differentiated(series):
    out = np.zeros_like(series)
    terms = len(series)
    for k in range(terms - 1, 0, -1):
        out[k - 1] = (out[k + 1] if k + 1 < terms else 0.0) + 2.0 * k * series[k]
    out[0] *= 0.5
    return out


def _integrated(series):
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
