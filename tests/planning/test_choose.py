"""The exact solver: brute force on random instances, and the certified gap where labels are dropped."""

from itertools import product

import numpy as np
import pytest

from fewbit.planning import choose as solver
from fewbit.planning.choose import Part, choose, peak_of, totals


def instance(seed):
    """Return the parts of a step, a memory and a bound of the error, which may be infinite."""
    draw = np.random.default_rng(seed)
    parts = []
    same = draw.random() < 0.5  # blocks that are alike
    for number in range(draw.integers(2, 8)):
        options = int(draw.integers(1, 5))
        if same and number and draw.random() < 0.7:
            parts.append(parts[-1])
            continue
        saved = draw.integers(1, 100, options).astype(float)
        peak = 50 + saved * draw.random(options) + draw.integers(0, 60, options)
        seconds, error = draw.normal(1, 1, options), draw.random(options) * draw.integers(0, 2)
        parts.append(Part(saved, peak, seconds, error))
    memory = float(draw.uniform(80, 500))
    error = np.inf if draw.random() < 0.3 else float(draw.uniform(0, 2))
    return parts, memory, error


def by_force(parts, memory, error):
    """Return the least seconds of all choices that fit; None if none fits."""
    best = None
    for options in product(*(range(len(part.seconds)) for part in parts)):
        seconds, added = totals(parts, options)
        if (
            peak_of(parts, options) <= memory
            and added <= error
            and (best is None or seconds < best)
        ):
            best = seconds
    return best


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_against_brute_force(first):
    """On 100 random instances the choice is the best, and the bound is no more than the optimum."""
    found_some = 0
    for seed in range(first, first + 25):
        parts, memory, error = instance(seed)
        best, choice = by_force(parts, memory, error), choose(parts, memory, error)
        assert (best is None) == (choice is None), seed
        if best is None:
            continue
        found_some += 1
        seconds, added = totals(parts, choice.options)
        assert peak_of(parts, choice.options) <= memory and added <= error
        assert seconds == pytest.approx(best, abs=1e-9) == choice.seconds
        assert choice.bound <= best + 1e-9
        assert choice.bound == pytest.approx(best, abs=1e-9)  # the gap is closed
    assert found_some > 5


@pytest.mark.parametrize("tolerance, most", [(0.3, 4000), (0.0, 2)])
def test_the_certified_gap(monkeypatch, tolerance, most):
    """With a tolerance, or with few labels, the optimum lies between the bound and the result."""
    monkeypatch.setattr(solver, "MOST_LABELS", most)
    monkeypatch.setattr(solver, "FEW_LABELS", 2)
    gaps = 0
    for seed in range(25):
        parts, memory, error = instance(seed)
        best, choice = by_force(parts, memory, error), choose(parts, memory, error, tolerance)
        if choice is None or best is None:
            continue
        assert choice.bound <= best + 1e-9 <= choice.seconds + 2e-9
        gaps += choice.seconds > choice.bound + 1e-9
        if most > 2:
            assert choice.seconds <= best + tolerance + 1e-9
    assert gaps


def test_many_equal_blocks():
    """64 equal blocks with 9 options each take less than the time of a fast test, with a gap below a thousandth."""
    saved = np.array([100, 60, 30, 22, 15, 10, 5, 2.5, 0])
    part = Part(
        saved,
        120 + saved,
        np.array([0, 0.1, 0.12, 0.15, 0.2, 0.33, 0.34, 0.36, 0.5]),
        np.array([0, 1e-5, 1e-3, 4e-3, 2e-2, 0, 1e-4, 1e-3, 1e-4]),
    )
    parts = [part] * 48
    choice = choose(parts, 48 * 30 + 150.0, 0.05, tolerance=0.01)
    assert peak_of(parts, choice.options) <= 48 * 30 + 150.0
    assert totals(parts, choice.options)[1] <= 0.05
    assert choice.seconds - choice.bound <= 0.011
