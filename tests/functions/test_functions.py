"""The named functions, compared with 50-digit arithmetic, torch's autograd and transformers' activations."""

import itertools
import math

import numpy as np
import pytest
import torch
from high_precision import ORACLE, oracle
from samples import ACTIVATIONS
from transformers.activations import ACT2CLS, ACT2FN

from fewbit import functions
from fewbit.errors import FunctionError

SAMPLES = [
    *[(name, {}) for name in functions.names()],
    ("leaky_relu", {"negative_slope": -0.2}),
    ("leaky_relu", {"negative_slope": 0.0}),
    ("rrelu", {"lower": 0.1, "upper": 0.3}),
    ("threshold", {"threshold": 0.3, "value": 2.0}),
    ("threshold", {"threshold": -15.0, "value": -1.0}),
    ("elu", {"alpha": 2.0}),
    ("elu", {"alpha": -0.5}),
    ("celu", {"alpha": 0.3}),
    ("celu", {"alpha": 4.0}),
    ("laplace", {"mu": 0.0, "sigma": 1.0}),
    ("laplace", {"mu": -3.0, "sigma": 2.5}),
    ("hardtanh", {"min_val": -2.0, "max_val": 0.5}),
    ("hardtanh", {"min_val": -20.0, "max_val": 20.0}),
    ("hardshrink", {"lambd": 0.0}),
    ("hardshrink", {"lambd": 1.25}),
    ("softshrink", {"lambd": 0.0}),
    ("softshrink", {"lambd": 2.0}),
    ("softplus", {"beta": 2.0, "threshold": 3.0}),
    ("softplus", {"beta": 0.3, "threshold": 1.0}),
    ("softplus", {"beta": 7.0, "threshold": 20.0}),
]
IDS = [name + "".join(f"-{key}={number:g}" for key, number in p.items()) for name, p in SAMPLES]
every_sample = pytest.mark.parametrize(("name", "parameters"), SAMPLES, ids=IDS)


def away_from_kinks(function, x):
    if not function.kinks:
        return 1
    nearest = min(function.kinks, key=lambda kink: abs(x - kink))
    return 1 if x >= nearest else -1


def points(function):
    """Return points up to +-1e3, denser around 0, with tiny numbers and both sides of every kink."""
    positive = np.concatenate(
        [
            [1e-300, 1e-20, 1e-9, 1e-4],
            np.geomspace(1e-2, 60.0, 20),
            [75.3, 152.0, 353.7, 708.1, 1e3],
        ]
    )
    near = [np.nextafter(kink, side) for kink in function.kinks for side in (-np.inf, np.inf)]
    x = np.unique(np.concatenate([-positive, [0.0], positive, near]))
    return x[~np.isin(x, function.kinks)]


def digits_for(slope):
    """Return the digits of which 50 remain after the squared step of 1e-30 and for a slope of this size."""
    return 140 + max(0, math.ceil(-math.log10(max(abs(slope), 1e-320))))


@every_sample
def test_value_and_derivative_match_high_precision(name, parameters):
    function = functions.get(name, parameters)
    tiny = np.finfo(np.float64).tiny
    for x in points(function):
        value, slope = function.value(x), function.derivative(x)
        exact_value, exact_slope = oracle(
            name, parameters, x, away_from_kinks(function, x), digits_for(slope)
        )
        value_error, slope_error = float(abs(exact_value - value)), float(abs(exact_slope - slope))
        assert value_error <= 1e-14 * max(1.0, abs(value)), f"f({x!r}) is off by {value_error:.2e}"
        assert slope_error <= 1e-14 * max(1.0, abs(slope)), f"f'({x!r}) is off by {slope_error:.2e}"
        # In a decaying tail the digits of f' itself have to be right, not only those of 1.
        in_tail = abs(x) > 8.0 and tiny < abs(exact_slope) < 1e-3
        if in_tail:
            relative = float(slope_error / abs(exact_slope))
            assert relative <= 1e-12, f"f'({x!r}) is off by {relative:.2e} of it"


TAILS = [
    ("gelu", -37.4), ("gelu_10", -37.4), ("gelu_tanh", -21.2), ("gelu_fast", -21.2), ("quick_gelu", -400.0),
    ("silu", -700.0), ("mish", -700.0), ("sigmoid", -700.0), ("sigmoid", 700.0), ("logsigmoid", 700.0),
    ("softplus", -700.0), ("sqrtsoftplus", -1400.0), ("elu", -700.0), ("celu", -700.0), ("selu", -700.0),
    ("tanh", 350.0), ("laplace", 0.707107 + 37.0 * 0.282095),
]  # fmt: skip


@pytest.mark.parametrize(("name", "x"), TAILS)
def test_far_tails_keep_their_digits(name, x):
    """The points are close to the end of the range in which f' is a normal number."""
    for point in x * np.linspace(0.95, 1.0, 3):
        _, exact = oracle(name, {}, point, 1, 460)
        assert 0 < abs(exact) < 1e-200
        assert abs(functions.get(name).derivative(point) / exact - 1) <= 1e-12


# --- torch and transformers ----------------------------------------------------------------------


THEIRS = {sample.function: sample.theirs for sample in ACTIVATIONS} | {
    "identity": torch.nn.Identity()
}
"""{name: the function of torch, or its formula}."""


@every_sample
def test_agrees_with_torch_also_at_its_kinks(name, parameters):
    function = functions.get(name, parameters)
    near = [np.nextafter(kink, side) for kink in function.kinks for side in (-np.inf, kink, np.inf)]
    x = np.concatenate([near, np.linspace(-30.0, 30.0, 601), [-700.0, -100.0, 100.0, 700.0]])
    if name == "gelu_10":  # from torch 2.14 on, clamp has no gradient at the ends of its interval
        x = x[abs(abs(x) - 10) > 1e-6]
    leaf = torch.tensor(x, requires_grad=True)
    y = THEIRS[name](leaf, *function.parameters.values())
    y.sum().backward()
    # torch rounds 1/6 (hardsigmoid) and 1/alpha (celu) to float32 on the way.
    tolerance = 1e-7 if name in ("hardsigmoid", "celu") else 1e-12
    np.testing.assert_allclose(function.value(x), y.detach(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(function.derivative(x), leaf.grad, rtol=tolerance, atol=tolerance)


def test_agrees_with_transformers():
    x = np.linspace(-12.0, 12.0, 481)
    learned = {"prelu", "xielu"}
    for name in set(ACT2CLS) - learned:
        expected = ACT2FN[name](torch.tensor(x)).numpy()
        np.testing.assert_allclose(
            functions.get(name).value(x), expected, rtol=1e-12, atol=1e-12, err_msg=name
        )


def test_every_pointwise_class_of_torch_is_here():
    learned = {"MultiheadAttention", "PReLU"}
    left_out = learned | {"GLU", "Softmin", "Softmax", "Softmax2d", "LogSoftmax"}
    known = {name.replace("_", "") for name in (*functions.names(), *functions.aliases())}
    assert {name.lower() for name in set(torch.nn.modules.activation.__all__) - left_out} <= known


# --- what is claimed about each function ---------------------------------------------------------


@every_sample
def test_slopes_are_the_limits(name, parameters):
    function = functions.get(name, parameters)
    for sign, slope in zip((-1.0, 1.0), function.slopes, strict=True):
        far = function.derivative(sign * np.array([1e8, 1e30, 1e200, np.inf]))
        if math.isinf(slope):
            assert far[-1] == slope and np.all(np.diff(sign * far * np.sign(slope)) > 0)
        else:
            np.testing.assert_allclose(far, slope, rtol=0, atol=1e-4)
            np.testing.assert_allclose(far[2:], slope, rtol=0, atol=1e-15)


@every_sample
def test_even_derivative_exactly_where_claimed(name, parameters):
    function = functions.get(name, parameters)
    x = np.concatenate([function.kinks, np.linspace(0.0, 30.0, 997), [1e-200, 1e3, np.inf]])
    even = np.array_equal(function.derivative(x), function.derivative(-x))
    assert function.even_derivative == even
    if even:
        assert function.domain[0] == -function.domain[1]


@every_sample
def test_derivative_is_smooth_between_kinks(name, parameters):
    """At a kink that is not listed the second difference of f' would decrease with h, not with h**2."""
    function = functions.get(name, parameters)
    edges = [-25.0, *[kink for kink in function.kinks if -25.0 < kink < 25.0], 25.0]
    for low, high in itertools.pairwise(edges):
        low, high = np.nextafter(low, np.inf), np.nextafter(high, -np.inf)
        bends = []
        for n in (20001, 40001):
            x = np.linspace(low, high, n)
            bends.append(np.max(np.abs(np.diff(function.derivative(x), 2))))
        assert bends[1] <= 0.3 * bends[0] + 1e-13


@every_sample
def test_domain_holds_the_kinks_with_a_margin(name, parameters):
    function = functions.get(name, parameters)
    low, high = function.domain
    assert low <= -10.0 and high >= 10.0
    if "softplus" not in name:
        assert all(low * 0.85 < kink < high * 0.85 for kink in function.kinks)


@pytest.mark.parametrize(
    ("name", "parameters", "all_parameters", "domain"),
    [
        ("gelu", {}, {}, (-10.0, 10.0)),
        ("gelu_10", {}, {}, (-12.0, 12.0)),
        ("softplus", {}, {"beta": 1.0, "threshold": 20.0}, (-10.0, 10.0)),
        ("softplus", {"beta": 0.1}, {"beta": 0.1, "threshold": 20.0}, (-100.0, 100.0)),
        ("hardtanh", {"max_val": 20, "min_val": -20}, {"min_val": -20, "max_val": 20}, (-24.0, 24.0)),
        ("threshold", {}, {"threshold": 0.0, "value": 0.0}, (-10.0, 10.0)),
        ("rrelu", {}, {"lower": 0.125, "upper": 1 / 3}, (-10.0, 10.0)),
    ],
)  # fmt: skip
def test_parameters_and_domains(name, parameters, all_parameters, domain):
    function = functions.get(name, parameters)
    assert (function.parameters, function.domain) == (all_parameters, domain)


@every_sample
def test_shapes_nan_and_infinities(name, parameters):
    function = functions.get(name, parameters)
    grid = np.linspace(-7.0, 7.0, 12).reshape(3, 4)
    for f in (function.value, function.derivative):
        with np.errstate(all="raise"):
            everywhere = f(
                np.array([-np.inf, -1e300, -745.0, -5e-324, 0.0, 5e-324, 745.0, 1e300, np.inf])
            )
        assert not np.isnan(everywhere).any()
        assert np.isnan(f(np.nan)) and np.isnan(f([1.0, np.nan])[1])
        assert f(grid).shape == (3, 4) and f(grid).dtype == np.float64
        assert f(np.empty((0, 2))).shape == (0, 2)
        assert np.shape(f(1.5)) == () and f(1.5) == f(np.array([1.5]))[0]
        np.testing.assert_array_equal(f(grid.T), f(grid).T)


@every_sample
def test_parameters_are_complete_plain_floats(name, parameters):
    function = functions.get(name, {key: np.float32(number) for key, number in parameters.items()})
    assert function.name == name and function.reference
    assert set(parameters) <= set(function.parameters)
    assert all(type(number) is float for number in function.parameters.values())
    assert function.kinks == tuple(sorted(set(function.kinks)))
    again = functions.get(name, function.parameters)
    x = np.linspace(-5, 5, 11)
    np.testing.assert_array_equal(again.derivative(x), function.derivative(x))


def test_softplus_switches_where_torch_does():
    assert functions.get("softplus").kinks == (20.0,)
    for beta in (0.3, 0.7, 1.1, 3.3, 7.0, 11.0):
        (kink,) = functions.get("softplus", {"beta": beta}).kinks
        assert beta * kink <= 20.0 < beta * math.nextafter(kink, math.inf)


# --- names and errors ----------------------------------------------------------------------------


def test_names_and_aliases():
    assert sorted(functions.names()) == sorted(ORACLE)
    for alias, name in functions.aliases().items():
        assert alias not in functions.names() and name in functions.names()
        assert functions.canonical(alias) == name == functions.get(alias).name
    assert functions.canonical("swish") == "silu"
    assert functions.canonical("gelu") == "gelu"


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("gelo", None, "unknown function 'gelo': did you mean gelu"),
        ("zzz", None, "expected one of relu, relu6"),
        (3, None, "expected the name of a function, got int"),
        ("relu", {"alpha": 1.0}, "relu has no parameter 'alpha'; expected: none"),
        ("elu", {"beta": 1.0}, "elu has no parameter 'beta'; expected: alpha"),
        ("elu", {"alpha": math.nan}, "elu: expected a finite number for alpha, got nan"),
        ("elu", {"alpha": math.inf}, "expected a finite number"),
        ("elu", {"alpha": "1"}, "expected a finite number for alpha, got '1'"),
        ("elu", {"alpha": True}, "expected a finite number"),
        ("celu", {"alpha": 0.0}, "celu: expected alpha > 0, got alpha=0.0"),
        ("hardtanh", {"min_val": 1.0}, "expected min_val < max_val, got min_val=1.0, max_val=1.0"),
        ("rrelu", {"lower": 0.5}, "expected lower <= upper"),
        ("softplus", {"beta": 0.0}, "softplus: expected beta > 0, got beta=0.0"),
        ("softplus", {"beta": 1e-320}, "moderate size"),
        ("hardshrink", {"lambd": -0.5}, "expected lambd >= 0"),
        ("softshrink", {"lambd": -0.5}, "expected lambd >= 0"),
        ("laplace", {"sigma": 0.0}, "expected sigma > 0"),
    ],
)
def test_errors_say_what_was_expected(name, parameters, message):
    with pytest.raises(FunctionError) as caught:
        functions.get(name, parameters)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
