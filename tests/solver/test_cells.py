"""The cells of the domain against closed forms, mpmath and adaptive quadrature."""

import mpmath
import numpy as np
import pytest
from high_precision import ORACLE
from mpmath import mpf
from scipy.integrate import quad

from fewbit import functions
from fewbit.errors import FunctionError, SolveError
from fewbit.solver.cells import survey
from fewbit.solver.weight import Histogram, Normal, Uniform

SMOOTH = [n for n in functions.names() if len(functions.get(n).kinks) == 0]


def scape_of(name, weight=None, domain=None):
    f = functions.get(name)
    return survey(f.derivative, f.kinks, weight or Uniform(), domain or f.domain, name)


def exact_second_derivative(name, x):
    with mpmath.workdps(60):
        return mpmath.diff(ORACLE[name], mpf(x), 2, h=mpf("1e-15"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOOTH)
def test_extrema_are_the_sign_changes_of_the_second_derivative(name):
    """The certificate assumes that f' is monotone between nodes, so no extremum may be missed."""
    f = functions.get(name)
    mesh = np.linspace(*f.domain, 401)
    curvatures = [exact_second_derivative(name, x) for x in mesh]
    # Turns flatter than rounding (1 + 1e-17 and the like) cannot be seen and do not matter.
    signs = [mpmath.sign(c) for c in curvatures if abs(c) > 1e-15]
    turns = sum(a * b < 0 for a, b in zip(signs[:-1], signs[1:], strict=True))
    found = scape_of(name).extrema
    assert len(found) == turns
    for point in found:
        assert abs(exact_second_derivative(name, point)) < 1e-6


@pytest.mark.parametrize("name", functions.names())
@pytest.mark.parametrize(
    "weight", [Uniform(), Normal(0.3, 0.7), Histogram([-2, 0, 1, 4], [1, 3, 1])]
)
def test_moments_against_adaptive_quadrature(name, weight):
    slope = functions.get(name).derivative
    cells = scape_of(name, weight).cells(256)
    assert (np.diff(cells.left) > 0).all() and (cells.mass > 0).all()
    assert ((cells.lowest <= cells.mean) & (cells.mean <= cells.highest)).all()
    for i in np.random.default_rng(0).choice(len(cells), 3, replace=False):
        mass, first = (
            quad(lambda x, p=power: slope(x) ** p * weight.density(np.array(x)), cells.left[i], cells.right[i], epsabs=0)[0]
            for power in (0, 1)
        )  # fmt: skip
        assert cells.mass[i] == pytest.approx(mass, rel=1e-10)
        assert cells.mean[i] * mass == pytest.approx(first, rel=1e-9, abs=1e-13 * mass)


def test_split_keeps_the_moments():
    landscape = scape_of("silu", Normal())
    cells = landscape.cells(64)
    points = np.sort(np.random.default_rng(1).uniform(-12, 12, 200))
    parts = landscape.split(cells, np.concatenate([points, cells.left[5:6], [1e9, -1e9]]))
    assert len(parts) > len(cells)
    assert parts.mass.sum() == pytest.approx(cells.mass.sum(), rel=1e-9)
    assert parts.second_moment == pytest.approx(cells.second_moment, rel=1e-9)
    assert (parts.right[:-1] <= parts.left[1:]).all()
    inside = points[(points > -10) & (points < 10)]
    assert np.isin(inside, parts.left).all()


def test_jumps_are_seen_from_inside_the_cell():
    cells = scape_of("relu6").cells(64)
    kink = np.flatnonzero(cells.left == 6.0)[0]
    assert (cells.value_left[kink], cells.value_right[kink - 1]) == (0.0, 1.0)


def test_cells_without_mass_are_left_out():
    cells = scape_of("gelu", Histogram([-3, -1, 1, 3], [1, 0, 1])).cells(64)
    assert not ((cells.left < 1) & (cells.right > -1)).any()
    assert (cells.left.min(), cells.right.max()) == (-3.0, 3.0)


def test_refusals():
    with pytest.raises(SolveError, match=r"some mass on the domain \[-10, 10\]"):
        scape_of("gelu", Histogram([20, 21], [1])).cells(64)
    with pytest.raises(FunctionError, match="not finite at x = "):
        survey(lambda x: 1 / np.maximum(x, 0.0), (), Uniform(), (-1.0, 1.0), "f")
