"""The domain, cut into cells on which f' is monotone, with integrals of f' over every cell.

A cell is the interval between two neighboring *nodes*. Kinks, extrema of f' and jumps of w are always nodes, so that
Gauss-Legendre quadrature integrates smooth functions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from fewbit.errors import FunctionError, SolveError
from fewbit.solver.weight import ScaledWeight
from fewbit.table.checks import FLOAT32_MAX

_GAUSS = np.polynomial.legendre.leggauss(8)
_UNIFORM_MESH = 4096
_SMALLEST_SCALE = 1e-2
_POINTS_PER_PANEL = 32
# The share of nodes that are spaced evenly. The other nodes are denser at points at which a step function has large
# errors.
_EVEN_SHARE = 0.25
# For a smaller f' squared errors would underflow, so that the error of a table would be 0.
_LEAST_SLOPE = 1e-140


@dataclass(frozen=True)
class Cells:
    """n cells in ascending x. Every attribute is float64 (n,).

    Attributes:
        value_left: The limit of f' at the left end from inside.
        value_right: The limit of f' at the right end from inside.
        mass: The integral of w, not 0.
        mean: The weighted mean of f'.
        spread: The integral of (f' - mean)**2 w.
        lowest: The smallest of the two limits and the values of f' at points of the quadrature.
        highest: The largest of these values.
    """

    left: np.ndarray
    right: np.ndarray
    value_left: np.ndarray
    value_right: np.ndarray
    mass: np.ndarray
    mean: np.ndarray
    spread: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray

    def __len__(self):
        return len(self.left)

    def take(self, index):
        """Return the cells that `index` selects: indices, or a bool mask (n,)."""
        return Cells(*(getattr(self, f.name)[index] for f in fields(self)))

    @property
    def second_moment(self):
        """The integral of f'**2 w over all cells."""
        return float(np.sum(self.mass * self.mean**2 + self.spread))


def concatenate(parts):
    """Join the cells of all `parts`."""
    return Cells(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Cells)))


def merge(cells, nodes):
    """Merge the cells between neighboring `nodes`, which must include all kinks, extrema of f' and jumps of w."""
    group = np.searchsorted(nodes, 0.5 * (cells.left + cells.right))
    starts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    ends = np.append(starts[1:], len(cells)) - 1
    mass = np.add.reduceat(cells.mass, starts)
    reference = np.repeat(cells.value_left[starts], ends - starts + 1)
    shift = np.add.reduceat(cells.mass * (cells.mean - reference), starts) / mass
    mean = cells.value_left[starts] + shift
    deviation = cells.mean - np.repeat(mean, ends - starts + 1)
    lowest = np.minimum.reduceat(cells.lowest, starts)
    highest = np.maximum.reduceat(cells.highest, starts)
    return Cells(
        left=cells.left[starts],
        right=cells.right[ends],
        value_left=cells.value_left[starts],
        value_right=cells.value_right[ends],
        mass=mass,
        mean=np.clip(mean, lowest, highest),
        spread=np.add.reduceat(cells.spread + cells.mass * deviation**2, starts),
        lowest=lowest,
        highest=highest,
    )


@dataclass(frozen=True)
class Landscape:
    """The functions f' and w on the domain, from which cells are made.

    Attributes:
        derivative: f', a function of float64 arrays. It raises FunctionError for a value that is not finite.
        weight: The weight w, a `ScaledWeight`. Masses and errors of cells are those of the scaled weight.
        kinks: The kinks of f' in the domain, ascending.
        weight_edges: The points at which w jumps, ascending.
        mesh: Points that are dense enough to find every extremum of f'.
        extrema: The local extrema of f' between kinks, ascending.
    """

    derivative: object
    weight: ScaledWeight
    domain: tuple[float, float]
    kinks: np.ndarray
    weight_edges: np.ndarray
    mesh: np.ndarray
    extrema: np.ndarray

    @property
    def density(self):
        """The scaled weight, a function of float64 arrays."""
        return self.weight.density

    def cells(self, count):
        """Cut the domain at `nodes(count)`, and return the cells that have mass."""
        nodes = self.nodes(count)
        cells = self.integrate(nodes[:-1], nodes[1:])
        return self._present(cells.take(cells.mass > 0))

    def supporting_cells(self, count):
        """Cut the domain into about `count` cells, and return those on which w is positive, however small."""
        low, high = self.domain
        weight = self.weight.weight
        edges = weight.support_edges(self.domain)
        nodes = np.union1d(self.nodes(count), edges[(edges > low) & (edges < high)])
        cells = self.integrate(nodes[:-1], nodes[1:])
        return self._present(cells.take(weight.support(0.5 * (cells.left + cells.right))))

    def nodes(self, count):
        """Return about `count` nodes, ascending, denser where w f''**2 is large.

        Raises:
            SolveError: The weight has no mass on the domain.
        """
        forced = np.unique(
            np.concatenate([self.domain, self.kinks, self.weight_edges, self.extrema])
        )
        mesh = np.union1d(self.mesh, forced)
        left, right = self.end_values(mesh[:-1], mesh[1:])
        width = np.diff(mesh)
        weight = self.density(0.5 * (mesh[:-1] + mesh[1:])) * width
        share = np.cbrt(weight * (right - left) ** 2)
        share = share / share.sum() if share.sum() > 0 else share
        even = np.where(weight > 0, 1.0, 0.0)
        if not even.any():
            raise self._without_mass()
        share = (1 - _EVEN_SHARE) * share + _EVEN_SHARE * even / even.sum()
        cumulative = np.concatenate([[0.0], np.cumsum(share)])
        wanted = np.interp(np.linspace(0, cumulative[-1], count + 1)[1:-1], cumulative, mesh)
        nearest = np.clip(np.searchsorted(forced, wanted), 1, len(forced) - 1)
        gap = np.minimum(wanted - forced[nearest - 1], forced[nearest] - wanted)
        return np.union1d(forced, wanted[gap > 1e-12 * (1 + np.abs(wanted))])

    def _present(self, cells):
        if not cells.mass.size:
            raise self._without_mass()
        return cells

    def _without_mass(self):
        low, high = self.domain
        return SolveError(
            f"weight: expected some mass on the domain [{low:g}, {high:g}], got none"
            + self.weight.weight.absence()
        )

    def integrate(self, left, right):
        """Return the cells with these ends, float64 (n,). No cell may contain a kink, extremum of f' or jump of w."""
        half = 0.5 * (right - left)
        x = 0.5 * (left + right)[:, None] + half[:, None] * _GAUSS[0]
        weight = self.density(x) * (half[:, None] * _GAUSS[1])
        value = self.derivative(x)
        value_left, value_right = self.end_values(left, right)
        mass = weight.sum(axis=1)
        safe = np.where(mass > 0, mass, 1.0)[:, None]
        relative = value - value_left[:, None]
        mean = value_left + (weight / safe * relative).sum(axis=1)
        spread = (weight * (value - mean[:, None]) ** 2).sum(axis=1)
        lowest = np.minimum(np.minimum(value_left, value_right), value.min(axis=1))
        highest = np.maximum(np.maximum(value_left, value_right), value.max(axis=1))
        mean = np.clip(mean, lowest, highest)
        return Cells(left, right, value_left, value_right, mass, mean, spread, lowest, highest)

    def split(self, cells, points):
        """Split the cells that contain any of `points`, and return all cells."""
        inside = np.searchsorted(cells.left, points, side="right") - 1
        ok = inside >= 0
        points, inside = points[ok], inside[ok]
        ok = (cells.left[inside] < points) & (points < cells.right[inside])
        points, inside = points[ok], inside[ok]
        if len(points) == 0:
            return cells
        touched = np.unique(inside)
        left = np.union1d(cells.left[touched], points)
        right = np.union1d(cells.right[touched], points)
        kept = np.ones(len(cells), dtype=bool)
        kept[touched] = False
        joined = concatenate([cells.take(kept), self.integrate(left, right)])
        return joined.take(np.argsort(joined.left, kind="stable"))

    def end_values(self, left, right):
        """Return the limits of f' at both ends of intervals, from inside."""
        jump_left = np.isin(left, self.kinks)
        jump_right = np.isin(right, self.kinks)
        return (
            self.derivative(np.where(jump_left, np.nextafter(left, right), left)),
            self.derivative(np.where(jump_right, np.nextafter(right, left), right)),
        )


def survey(derivative, kinks, weight, domain, name="f'", *, panels=(), accuracy=0.0):
    """Locate the extrema of f', and make the `Landscape` of a problem.

    `panels` are the ends of the polynomials that approximate f', if any, and `accuracy` bounds the error of `derivative`.

    Raises:
        FunctionError: f' is not finite somewhere on the domain, or is too small or varies too fast for the solver.
    """
    low, high = domain

    def checked(x):
        with np.errstate(all="ignore"):  # the error below reports values that are not finite
            value = np.asarray(derivative(x), dtype=np.float64)
        if not np.isfinite(value).all():
            bad = np.flatnonzero(~np.isfinite(value.ravel()))[0]
            raise FunctionError(
                f"{name}: the derivative is not finite at x = {x.ravel()[bad]:.17g} ({value.ravel()[bad]})"
            )
        return value

    # Kinks at an end of the domain count too, since f' has the value of the other side there.
    inner = np.asarray(sorted(k for k in kinks if low <= k <= high), dtype=np.float64)
    edges = weight.edges(domain)
    edges = edges[(edges > low) & (edges < high)]
    mesh = _mesh(low, high, weight.mesh(domain))
    mesh = np.union1d(mesh, np.concatenate([inner, edges, _inside_panels(panels, low, high)]))
    value = checked(mesh)
    largest = float(np.max(np.abs(value)))
    if 0 < largest < _LEAST_SLOPE:
        raise FunctionError(
            f"{name}: expected a derivative that is 0 or reaches {_LEAST_SLOPE:g}, got at most {largest:g}"
        )
    if largest > FLOAT32_MAX:
        raise FunctionError(
            f"{name}: expected a derivative that is finite in float32, got {largest:g}; choose a smaller domain"
        )
    extrema = _extrema(checked, mesh, value, inner, name, accuracy)
    scaled = ScaledWeight(weight, (low, high))
    return Landscape(checked, scaled, (low, high), inner, edges, mesh, extrema)


def _mesh(low, high, hints):
    even = np.linspace(low, high, _UNIFORM_MESH + 1)
    reach = np.arcsinh(max(abs(low), abs(high)) / _SMALLEST_SCALE)
    dense = _SMALLEST_SCALE * np.sinh(np.linspace(-reach, reach, _UNIFORM_MESH + 1))
    points = np.concatenate([even, dense, hints])
    return np.unique(points[(points >= low) & (points <= high)])


def _inside_panels(panels, low, high):
    """Return points that are dense enough to find every extremum of polynomials between `panels`."""
    edges = np.asarray(panels, dtype=np.float64)
    shares = 0.5 - 0.5 * np.cos(np.linspace(0.0, np.pi, _POINTS_PER_PANEL + 1))[:-1]
    points = np.append(edges[:-1, None] + np.diff(edges)[:, None] * shares, edges[-1:])
    return points[(points >= low) & (points <= high)]


def _extrema(derivative, mesh, value, kinks, name, accuracy):
    """Return the extrema of f' that are not kinks. Changes of at most `accuracy` do not count."""
    noise = 8 * np.finfo(float).eps * np.max(np.abs(value)) + 2 * accuracy
    change = np.diff(value)
    change[np.abs(change) <= noise] = 0.0
    sign = np.sign(change)
    moving = np.flatnonzero(sign)
    turn = moving[:-1][sign[moving[:-1]] * sign[moving[1:]] < 0]
    following = moving[1:][sign[moving[:-1]] * sign[moving[1:]] < 0]
    if len(turn) == 0:
        return np.empty(0)
    if len(turn) > len(mesh) // 16:
        raise FunctionError(
            f"{name}: the derivative turns more than {len(mesh) // 16} times on the domain "
            f"[{mesh[0]:g}, {mesh[-1]:g}]: expected a smaller domain"
        )
    a, b = mesh[turn], mesh[following + 1]
    direction = -sign[turn]
    ratio = (np.sqrt(5.0) - 1) / 2
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    fc, fd = direction * derivative(c), direction * derivative(d)
    for _ in range(64):
        left = fc < fd
        b, a = np.where(left, d, b), np.where(left, a, c)
        c, d, fc, fd = (
            np.where(left, b - ratio * (b - a), d),
            np.where(left, c, a + ratio * (b - a)),
            np.where(left, np.nan, fd),
            np.where(left, fc, np.nan),
        )
        fresh = direction * derivative(np.where(left, c, d))
        fc, fd = np.where(left, fresh, fc), np.where(left, fd, fresh)
    found = 0.5 * (a + b)
    # Extrema at kinks are left out, since kinks are nodes already.
    near = np.abs(found[:, None] - kinks[None, :]).min(axis=1, initial=np.inf)
    return np.unique(found[near > 1e-7 * (1 + np.abs(found))])
