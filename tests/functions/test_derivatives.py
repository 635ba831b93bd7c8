"""Numerical derivatives of unknown functions, compared with mpmath: as accurate as promised, or refused."""

import math

import numpy as np
import pytest
from high_precision_functions import Floats, exact_slopes

from fewbit.errors import FunctionError
from fewbit.functions.callables import from_callable
from fewbit.functions.panels import RESOLUTION, resolve_panels
from fewbit.solver.solve import solve

PROMISE = 1e-10
THIRD, PLACE = 0.3, math.pi / 7


def steep(k, c):
    """Return functions with a bend of width 1/k at c."""
    return {
        f"arctan({k:g}) at {c:.2g}": lambda m, x: m.arctan(k * (x - c)),
        f"arctan({k:g})/k at {c:.2g}": lambda m, x: m.arctan(k * (x - c)) / k,
        f"erf({k:g}) at {c:.2g}": lambda m, x: m.erf(k * (x - c)),
        f"tanh({k:g}) at {c:.2g}": lambda m, x: m.tanh(k * (x - c)),
        f"sigmoid({k:g}) at {c:.2g}": lambda m, x: m.expit(k * (x - c)),
        f"1/(1+({k:g} x)^2) at {c:.2g}": lambda m, x: 1 / (1 + (k * (x - c)) ** 2),
        f"exp(-({k:g} x)^2) at {c:.2g}": lambda m, x: m.exp(-((k * (x - c)) ** 2)),
        f"softplus({k:g} x)/k at {c:.2g}": lambda m, x: m.softplus(k * (x - c)) / k,
        f"logcosh({k:g} x)/k at {c:.2g}": lambda m, x: (
            (m.softplus(2 * k * (x - c)) - k * (x - c)) / k
        ),
        f"x sigmoid({k:g} x) at {c:.2g}": lambda m, x: (x - c) * m.expit(k * (x - c)),
        f"arcsinh({k:g} x) at {c:.2g}": lambda m, x: m.arcsinh(k * (x - c)),
    }


QUICK = [(50.0, THIRD), (1e4, THIRD)]
CASES = [
    pytest.param(f, id=name, marks=[] if key in QUICK else pytest.mark.slow)
    for key in (*QUICK, (1.0, 0.0), (20.0, PLACE), (1e3, PLACE), (1e4, 0.0))
    for name, f in steep(*key).items()
]
SMOOTH = {
    "sin 5x": lambda m, x: m.sin(5 * x),
    "sin 50x": lambda m, x: m.sin(50 * x),
    "x sin 9x": lambda m, x: x * m.sin(9 * x),
    "snake": lambda m, x: x + m.sin(5 * x) ** 2 / 5,
    "sin of square": lambda m, x: m.sin(x * x),
    "polynomial": lambda m, x: x**5 / 1000 - x**3 / 10 + x,
    "exp": lambda m, x: m.exp(x),
    "gelu": lambda m, x: x * (1 + m.erf(x / m.sqrt(2.0))) / 2,
    "mish": lambda m, x: x * m.tanh(m.softplus(x)),
    "serf": lambda m, x: x * m.erf(m.softplus(x)),
    "sum of steps": lambda m, x: (
        m.tanh(9 * (x + 7.1)) + m.erf(30 * (x - 1.7)) + m.arctan(90 * (x - PLACE))
    ),
    "root of one and squares": lambda m, x: m.sqrt(1 + 100 * x * x),
    "small": lambda m, x: 1e-12 * m.tanh(x - THIRD),
    "large": lambda m, x: 1e12 * m.tanh(x - THIRD),
    "offset": lambda m, x: 30 + m.tanh(x),
    "|x|^1.5": lambda m, x: m.abs(x) ** 1.5,
    "bump": lambda m, x: m.where(m.abs(x) < 1, m.exp(-1 / m.maximum(1 - x * x, 1e-30)), 0 * x),
}
KINKED = {
    "relu at .3": (lambda m, x: m.maximum(x - 0.3, 0 * x), 0.3),
    **{
        f"tanh and corner, {kink:.3g}": (
            lambda m, x, kink=kink: m.tanh(x) + 0.5 * m.abs(x - kink),
            kink,
        )
        for kink in (math.pi, -math.e, 1e-3)
    },
    # The estimated error of the location must not be 0, or the kink is not rounded to 0.
    "signed square": (lambda m, x: x * m.abs(x), 0.0),
    "signed log": (lambda m, x: m.where(x > 0, 1, -1) * m.log1p(m.abs(x)), 0.0),
    "signed exponential": (lambda m, x: m.where(x > 0, 1, -1) * m.expm1(-m.abs(x)), 0.0),
    "elish": (lambda m, x: m.where(x > 0, x, m.expm1(x)) * m.expit(x), 0.0),
    "abs of tanh": (lambda m, x: m.abs(m.tanh(x)), 0.0),
    "elu": (lambda m, x: m.where(x > 0, x, m.expm1(x)), 0.0),
    "steep elu": (lambda m, x: m.where(x > 0, x, m.expm1(50 * x)), 0.0),
    "tanh and corner": (lambda m, x: m.tanh(x) + m.abs(x - 1.25) / 2, 1.25),
    "softsign": (lambda m, x: x / (1 + m.abs(x)), 0.0),
    "softsign of 20 x": (lambda m, x: 20 * x / (1 + m.abs(20 * x)), 0.0),
    "square": (lambda m, x: m.maximum(x + 2.5, 0 * x) ** 2, -2.5),
    "sine and corner": (lambda m, x: m.sin(7 * x) + m.abs(x - PLACE), PLACE),
}
REFUSED = {
    "root": (lambda m, x: m.sqrt(m.abs(x)), 0.0),
    "|x - .3|^1.5": (lambda m, x: m.abs(x - 0.3) ** 1.5, 0.3),
    "tanh on a million": (lambda m, x: 1e6 + m.tanh(x), None),
    "single precision": (lambda m, x: np.tanh(x.astype(np.float32)).astype(np.float64), None),
    "rounded": (lambda m, x: np.round(np.tanh(x), 9), None),
    "sin 10,000 x": (lambda m, x: m.sin(1e4 * x), None),
    "a narrow bump on a line": (lambda m, x: x + 5e-5 * m.exp(-((2e4 * (x - 5.1)) ** 2)), 5.1),
    "chirp": (lambda m, x: m.sin(1 / (m.abs(x) + 1e-6)), 0.0),
}


def check(f, kinks=()):
    found = from_callable(lambda x: f(Floats, x))
    rng = np.random.default_rng(5)
    centers = np.array([0.0, THIRD, PLACE, *kinks])
    near = rng.choice(centers, 60) + rng.choice([-1.0, 1.0], 60) * 10.0 ** rng.uniform(-7, 0.5, 60)
    x = np.concatenate([rng.uniform(-10.0, 10.0, 40), near, rng.choice(found.panels, 10)])
    x = np.setdiff1d(x, kinks)
    # The oracle's own steps must not cross a kink.
    x = x[np.abs(np.subtract.outer(x, [*kinks, math.inf])).min(axis=1) > 1e-20]
    exact = exact_slopes(f, x)
    error = np.abs(found.derivative(x) - exact).max()
    edges = np.array(found.panels)
    inner = edges[:-1, None] + np.diff(edges)[:, None] * np.linspace(0.0, 1.0, 33)
    largest = np.abs(found.derivative(inner.ravel())).max()
    # The oracle rounds once more, and a kink's place is a float.
    assert error <= found.accuracy + 4e-15 * largest
    assert found.accuracy <= PROMISE * largest * (1 + 1e-6)
    return found


@pytest.mark.parametrize("f", CASES)
def test_steep_functions_are_right_everywhere(f):
    assert check(f).kinks == ()


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_functions_are_right_everywhere(name):
    check(SMOOTH[name], [0.0] if "|" in name else [])


@pytest.mark.parametrize("name", KINKED)
def test_kinked_functions_are_right_on_both_sides(name):
    f, kink = KINKED[name]
    found = check(f, [kink])
    # A decimal of a few digits is found to the float.
    assert found.kinks == pytest.approx((kink,), rel=0, abs=0 if kink in (0.0, 0.3) else 1e-12)
    left = found.derivative(math.nextafter(found.kinks[0], -1e9))
    assert found.derivative(found.kinks[0]) == pytest.approx(left, abs=1e-10)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_promised_is_refused_with_the_place(name):
    f, place = REFUSED[name]
    with pytest.raises(FunctionError) as refusal:
        from_callable(lambda x: f(Floats, x))
    text = str(refusal.value)
    # The processor's kernels decide whether rounding in single precision looks like noise or like a jump.
    assert "\n" not in text
    assert any(advice in text for advice in ("derivative=", "kinks=", "smaller domain"))
    if place is not None:
        assert abs(float(text.split("x = ")[1].split()[0].rstrip(";")) - place) < 0.05


KNOWN = {  # {name: (f, its derivative, its kinks)}
    "tanh": (np.tanh, lambda x: 1 / np.cosh(x) ** 2, []),
    "arctan": (lambda x: np.arctan(50 * (x - 0.3)) / 50, lambda x: 1 / (1 + (50 * (x - 0.3)) ** 2), []),
    "softsign": (lambda x: (x - 0.3317) / (1 + abs(x - 0.3317)), lambda x: 1 / (1 + abs(x - 0.3317)) ** 2, [0.3317]),
}  # fmt: skip


@pytest.mark.parametrize("objective", ["mse", "unbiased", "minimax"])
@pytest.mark.parametrize("name", KNOWN)
def test_error_and_bound_hold_for_the_exact_derivative(name, objective):
    """The bounds of a table from the numerical derivative include the error of a table from the exact one."""
    f, slope, kinks = KNOWN[name]
    found = solve(f, 2, objective=objective)
    exact = solve(f, 2, objective=objective, derivative=slope, kinks=kinks)
    assert found.lower_bound <= exact.error and exact.lower_bound <= found.error
    assert exact.error <= found.error * (1 + 1e-12) + 1e-12
    assert found.error == pytest.approx(exact.error, rel=1e-6) and found.gap < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_narrow_bumps_anywhere_are_seen(seed):
    """A bump as wide as the distance of a few samples is either differentiated accurately or refused."""
    rng = np.random.default_rng(seed)
    place, width = rng.uniform(-9.0, 9.0), 20.0 / RESOLUTION * rng.uniform(0.2, 3.0)

    def bump(m, x):
        return width * m.exp(-(((x - place) / width) ** 2))

    assert any(abs(edge - place) < width for edge in check(bump).panels)
    try:
        found = check(lambda m, x: x + bump(m, x))
    except FunctionError as refusal:
        assert "pass derivative=" in str(refusal)
    else:
        assert any(abs(edge - place) < width for edge in found.panels)


@pytest.mark.slow
def test_a_narrow_bump_of_a_derivative_is_part_of_the_error():
    """The mesh of the solver alone would miss the bump."""
    width, place = 1e-4, PLACE

    def f(x):
        return x / 1000 + width * np.exp(-(((x - place) / width) ** 2))

    def slope(x):
        t = (x - place) / width
        return 1e-3 - 2 * t * np.exp(-t * t)

    numerical, exact = solve(f, 3), solve(f, 3, derivative=slope)
    assert numerical.error == pytest.approx(exact.error, rel=1e-5)
    x = np.linspace(place - 10 * width, place + 10 * width, 200_001)
    inside = np.mean((slope(x) - exact(x)) ** 2) * 20 * width
    assert exact.error == pytest.approx(inside, rel=1e-3)
    assert exact.lower_bound <= exact.error and exact.gap < 1e-2


def test_panels_integrate_and_differentiate():
    panels = resolve_panels(np.sin, [(-10.0, 10.0)], 1e-12, order=0)
    rng = np.random.default_rng(3)
    x = rng.uniform(-10.0, 10.0, 1000)
    np.testing.assert_allclose(panels(x), np.sin(x), rtol=0, atol=1e-12)
    np.testing.assert_allclose(panels.derivative()(x), np.cos(x), rtol=0, atol=1e-9)
    points = panels.points(8)
    left, right = points[:-1], points[1:]
    assert panels.contain(left, right).all() and not panels.contain(left, right + 5.0).any()
    np.testing.assert_allclose(
        panels.integrals(left, right), np.cos(left) - np.cos(right), rtol=0, atol=1e-12
    )
    assert panels.largest() == pytest.approx(1.0, abs=1e-2)


# Places at which the gap between the panels is not centered on the kink.
SMOOTH_KINKS = {
    "softsign at .3317": (lambda m, x: (x - 0.3317) / (1 + m.abs(x - 0.3317)), 0.3317),
    "softsign at 3.302": (lambda m, x: (x - 3.302) / (1 + m.abs(x - 3.302)), 3.302),
    "steep elu at 1.7719": (
        lambda m, x: (
            m.maximum(x - 1.7719, 0 * x) + m.expm1(-1e3 * m.maximum(1.7719 - x, 0 * x)) / 1e3
        ),
        1.7719,
    ),
    "square at .3317": (lambda m, x: m.maximum(x - 0.3317, 0 * x) ** 2, 0.3317),
}


@pytest.mark.parametrize("name", SMOOTH_KINKS)
def test_a_jump_of_the_second_derivative_is_no_jump_of_the_first(name):
    f, kink = SMOOTH_KINKS[name]
    found = from_callable(lambda x: f(Floats, x), kinks=[])
    near = kink + np.outer([-1.0, 1.0], np.geomspace(1e-14, 1e-2, 60)).ravel()
    error = np.abs(found.derivative(near) - exact_slopes(f, near)).max()
    assert error <= found.accuracy + 1e-13
    assert found.kinks == pytest.approx((kink,), rel=0, abs=1e-9)


FEATURES = [
    (2.6507651664869882e-8, 7656.8270632536005, -6.852131997673368),
    (2.65e-9, 7656.8, -6.8521),
    (4e-8, 9e3, 3.3),
    (1e-8, 4e3, -0.2),
]


@pytest.mark.parametrize(("height", "k", "place"), FEATURES)
@pytest.mark.parametrize("bend", [lambda x: x, lambda x: x**3 / 300, lambda x: np.sin(x)])
def test_low_and_narrow_features_that_are_sampled_are_right_or_refused(bend, height, k, place):
    def narrow(x):
        return height / (1 + (k * (x - place)) ** 2)

    try:
        found = from_callable(lambda x: bend(x) + height * np.arctan(k * (x - place)) / k)
    except FunctionError as refusal:
        assert "pass derivative=" in str(refusal)
        return
    plain = from_callable(bend)
    x = place + np.outer([-1.0, 1.0], np.geomspace(1e-7, 1e-2, 100)).ravel()
    error = np.abs(found.derivative(x) - plain.derivative(x) - narrow(x)).max()
    # Rounding can hide this much between two samples, in addition to the promised accuracy.
    assert error <= found.accuracy + plain.accuracy + 4e-10
    assert found.accuracy > 0.0


@pytest.mark.parametrize("place", [0.0, 1.0, -20.0])
def test_a_bend_that_is_narrow_on_a_large_domain_is_not_called_exact(place):
    found = solve(lambda x: np.logaddexp(0, x - place), 1, domain=(-1e15, 1e15))
    assert found.error > 0.0 and not found.exact


@pytest.mark.parametrize("kink", [0.0, 0.3, math.pi / 3, -2.5, 7.123456789])
@pytest.mark.parametrize("reach", [10.0, 1e6])
def test_straight_lines_between_kinks_are_exact(kink, reach):
    for f in (lambda x: np.maximum(x - kink, 0.0), lambda x: abs(x - kink) / 3 + x * 0.7):
        assert solve(f, 1, domain=(-reach, reach)).exact


@pytest.mark.parametrize("objective", ["mse", "unbiased", "minimax"])
@pytest.mark.parametrize("scale", [1e-160, 1e-200, 1e-300])
def test_slopes_whose_squares_underflow_are_refused(scale, objective):
    with pytest.raises(FunctionError, match="expected a derivative that is 0 or reaches 1e-140"):
        solve(lambda x: np.tanh(x) * scale, 1, objective=objective)


def test_small_slopes_keep_their_error():
    small, usual = (solve(lambda x, scale=scale: np.tanh(x) * scale, 1) for scale in (1e-30, 1.0))
    assert small.error == pytest.approx(1e-60 * usual.error, rel=1e-6)
    assert solve(lambda x: 0.0 * x, 1).exact
