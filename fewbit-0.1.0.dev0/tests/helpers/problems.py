"""Sequences that break careless arithmetic and careless searches, by name and tag.

Tags: `small` (every partition can be tried), `medium` (the plain loop in exact arithmetic), `far`
(offsets or gaps of 1e9), `ties`, `massless` (some or all weights are zero).
"""

import functools
import warnings
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Problem:
    name: str
    values: np.ndarray
    weights: np.ndarray
    tags: frozenset

    def __str__(self):
        return self.name


def _problem(name, values, weights=None, tags=""):
    values = np.asarray(values, dtype=np.float64)
    weights = np.ones_like(values) if weights is None else np.asarray(weights, dtype=np.float64)
    size = "small" if len(values) <= 7 else "medium"
    return Problem(name, values, weights, frozenset([size, *tags.split()]))


def _build():
    rng = np.random.default_rng(20240607)

    def noise(n, scale=1.0):
        return scale * rng.standard_normal(n)

    yield _problem("one item", [3.0])
    yield _problem("one item without mass", [3.0], [0.0], "massless")
    yield _problem("two items", [1.0, 4.0], [3.0, 1.0])
    yield _problem("all equal", np.full(7, 0.1), tags="ties")
    yield _problem("all equal and far", np.full(7, 1e9 + 0.1), tags="ties far")
    yield _problem("no mass at all", noise(6), np.zeros(6), "massless")
    yield _problem("mass on one item", noise(7), [0, 0, 0, 2, 0, 0, 0], "massless")
    yield _problem("up and down", [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0], tags="ties")
    yield _problem("no mass at either end", noise(7), [0, 0, 1, 2, 1, 0, 0], "massless")
    yield _problem("random, small", noise(7), rng.random(7))
    yield _problem("descending", [6.0, 5.5, 3.0, 2.5, 2.0, 0.0])
    yield _problem("far, small", 1e9 + noise(7), rng.random(7), "far")
    yield _problem("two far clusters, small", [0, 1, 0, 1e9, 1e9 + 1, 1e9 + 3], tags="far")
    yield _problem("far clusters, interleaved, small", [0, 1e9, 1, 1e9 + 1, 2, 1e9], tags="far")
    yield _problem("three far clusters, small", [-1e9, 1e9, 0, 1, 1e9 + 1, -1e9 + 1], tags="far")
    yield _problem(
        "a massless value far away", [0, 1, 1e15, 2, 3, 5], [1, 1, 0, 1, 1, 1], "far massless"
    )
    yield _problem("tiny and huge", [1e-8, 2e-8, 4e-8, 1e8, 2e8, 4e8])

    yield _problem("random", noise(40), rng.random(40))
    yield _problem("random, equal weights", noise(48))
    yield _problem("power of two", noise(32), rng.random(32))
    yield _problem("power of two and one", noise(33), rng.random(33))
    yield _problem("sorted", np.sort(noise(40)), rng.random(40))
    yield _problem("ties", rng.integers(0, 4, 40) * 0.1, tags="ties")
    yield _problem("ties with weights", rng.integers(0, 5, 40) / 3, rng.random(40), "ties")
    yield _problem(
        "ties with zeros", rng.integers(0, 5, 40) / 3, rng.integers(0, 3, 40), "ties massless"
    )
    yield _problem(
        "half without mass", noise(40), rng.random(40) * (rng.random(40) < 0.5), "massless"
    )
    yield _problem("far", 1e9 + noise(40), rng.random(40), "far")
    yield _problem("far, tiny spread", 1e9 + noise(40, 1e-5), rng.random(40), "far ties")
    yield _problem("far to the left", -1e9 + noise(40), rng.random(40), "far")
    two = np.repeat([0.0, 1e9], 20)
    yield _problem("two far clusters", two + noise(40), rng.random(40), "far")
    yield _problem("two far clusters, tiny spread", two + noise(40, 1e-6), rng.random(40), "far")
    yield _problem("two far clusters, interleaved", rng.permutation(two) + noise(40), None, "far")
    zeros = rng.random(40) * (rng.random(40) < 0.6)
    yield _problem("two far clusters with zeros", two + noise(40), zeros, "far massless")
    yield _problem(
        "interleaved with zeros", rng.permutation(two) + noise(40), zeros, "far massless"
    )
    three = rng.choice([-1e9, 0.0, 1e9], 42)
    yield _problem("three far clusters, interleaved", three + noise(42), rng.random(42), "far")
    yield _problem("weights over many decades", noise(40), 10 ** rng.uniform(-9, 6, 40))
    yield _problem("values over many decades", noise(40) * 10 ** rng.uniform(-8, 6, 40))
    yield _problem("a wave", np.sin(np.linspace(0, 20, 44)), rng.random(44))
    yield _problem("a step with noise", np.repeat([0.0, 3.0, 1.0, 3.0], 11) + noise(44, 0.1))


PROBLEMS = list(_build())


def tagged(*tags):
    return [problem for problem in PROBLEMS if problem.tags >= set(tags)]


def long_sequence(kind, n, seed=7):
    """Return values and weights of thousands of items, for the pruned search."""
    rng = np.random.default_rng(seed)
    weights = rng.random(n)
    values = {
        "random": lambda: rng.standard_normal(n),
        "wave": lambda: np.sin(np.linspace(0, 31, n)) + 0.01 * rng.standard_normal(n),
        "steps": lambda: rng.standard_normal(9)[np.arange(n) * 9 // n],
        "noisy steps": lambda: (
            rng.standard_normal(9)[np.arange(n) * 9 // n] + 0.2 * rng.standard_normal(n)
        ),
        "ties": lambda: rng.integers(0, 6, n) / 3.0,
        "far": lambda: 1e9 + rng.standard_normal(n),
        "far clusters": lambda: rng.choice([0.0, 1e9], n) + rng.standard_normal(n),
        "walk": lambda: np.cumsum(rng.standard_normal(n)),
    }[kind]()
    if kind in ("ties", "walk"):
        weights *= rng.random(n) < 0.5
    return values, weights


LONG = ("random", "wave", "steps", "noisy steps", "ties", "far", "far clusters", "walk")


# --- continuous problems ------------------------------------------------------------------------


@functools.cache
def solved(name, bits=None, **options):
    """Return the cached result of `fewbit.solve`, without the warning about unbounded derivatives."""
    from fewbit.solver.solve import solve

    options = {key: dict(value) if key == "parameters" else value for key, value in options.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return solve(name, bits, **options)
