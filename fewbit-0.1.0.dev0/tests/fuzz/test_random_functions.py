"""Random compositions of steep, kinked and oscillating functions: f' is as exact as promised, or refused.

A case is a function and a point; ten points share a function.
"""

import numpy as np
import pytest
from cases import CASES, CHUNKS, seeds
from high_precision_functions import Floats, exact_slopes

from fewbit.errors import FunctionError
from fewbit.functions.callables import from_callable

pytestmark = pytest.mark.slow
POINTS = 10

UNARY = [
    lambda m, u: m.tanh(u),
    lambda m, u: m.arctan(u),
    lambda m, u: m.erf(u),
    lambda m, u: m.expit(u),
    lambda m, u: m.softplus(u),
    lambda m, u: m.arcsinh(u),
    lambda m, u: m.sqrt(1 + u * u),
    lambda m, u: m.exp(-u * u),
    lambda m, u: 1 / (1 + u * u),
    lambda m, u: m.sin(m.arcsinh(u)),
    lambda m, u: m.cos(5 * m.tanh(u)),
    lambda m, u: u * m.expit(u),
    lambda m, u: m.maximum(u, u / 8),
    lambda m, u: m.abs(u),
    lambda m, u: u / (1 + m.abs(u)),
]


def line(rng):
    """Return a straight line, usually steep, with its zero anywhere or at a round place."""
    slope = 10.0 ** rng.uniform(-1.0, rng.choice([0.5, 2.0, 4.0])) * rng.choice([-1.0, 1.0])
    zero = rng.choice([0.0, 0.3, rng.uniform(-9.0, 9.0), round(rng.uniform(-9.0, 9.0), 1)])
    return lambda m, x: slope * (x - zero)


def composition(rng, depth):
    if depth == 0:
        return line(rng)
    inner, unary = composition(rng, depth - 1), UNARY[rng.integers(len(UNARY))]
    if rng.uniform() < 0.5:
        return lambda m, x: unary(m, inner(m, x))
    other, scale = composition(rng, rng.integers(depth)), rng.normal()
    if rng.uniform() < 0.5:
        return lambda m, x: unary(m, inner(m, x)) + scale * other(m, x)
    return lambda m, x: unary(m, inner(m, x)) * other(m, x)


def check(seed):
    """True if f' was found and is right, False if it was refused in one line."""
    rng = np.random.default_rng(seed)
    f = composition(rng, int(rng.integers(1, 4)))
    try:
        found = from_callable(lambda x: f(Floats, x))
    except FunctionError as refusal:
        text = str(refusal)
        assert "\n" not in text and any(
            advice in text for advice in ("pass derivative=", "pass kinks=", "smaller domain")
        ), text
        return False
    edges = np.array(found.panels)
    near = rng.choice(edges, POINTS // 2) + rng.normal(size=POINTS // 2) * 10.0 ** rng.uniform(
        -6, 0
    )
    x = np.append(rng.uniform(-10.0, 10.0, POINTS - len(near)), np.clip(near, -10.0, 10.0))
    x = x[~np.isin(x, found.kinks)]
    error = np.abs(found.derivative(x) - exact_slopes(f, x)).max()
    inner = edges[:-1, None] + np.diff(edges)[:, None] * np.linspace(0.0, 1.0, 17)
    largest = np.abs(found.derivative(inner.ravel())).max()
    assert error <= found.accuracy + 1e-13 * largest, (error, found.accuracy, largest)
    assert found.accuracy <= 1e-10 * largest * (1 + 1e-3)
    return True


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_compositions(chunk):
    right, functions = 0, seeds(chunk, CASES // POINTS)
    for seed in functions:
        try:
            right += check(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert right >= len(functions) // 2
