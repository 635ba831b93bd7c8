"""Bits under a budget: the greedy algorithm against an exact dynamic program, and against itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fewbit.errors import InputError
from fewbit.policies import allocation
from fewbit.policies.allocation import allocate, variance


def optimum(sensitivity, elements, budget, least=1, most=8, at_one=None) -> float:
    """The least variance, by a dynamic program over the bits used so far. O(n budget most)."""
    best = np.zeros(budget + 1)
    at_one = sensitivity if at_one is None else at_one
    for weight, coarsest, size in zip(sensitivity, at_one, elements, strict=True):
        following = np.full(budget + 1, np.inf)
        for bits in range(least, most + 1):
            cost = size * bits
            if cost <= budget:
                noise = coarsest if bits == 1 else weight / (2.0**bits - 1) ** 2
                following[cost:] = np.minimum(following[cost:], best[: budget + 1 - cost] + noise)
        best = following
    return float(best.min())


def instance(seed, tensors, sizes=(1, 2, 4, 9, 16)):
    """Sensitivities over several orders of magnitude."""
    rng = np.random.default_rng(seed)
    return 10.0 ** rng.uniform(-3, 3, tensors), rng.choice(sizes, tensors)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 12)), max_size=12),
    st.floats(0, 1),
    st.integers(1, 3),
    st.integers(3, 8),
    st.floats(0.25, 10),
)
def test_the_kernel_is_the_reference(tensors, share, least, most, factor):
    sensitivity = np.array([weight for weight, _ in tensors], np.float64)
    elements = np.array([size for _, size in tensors], np.int64)
    total = int(elements.sum())
    budget = int(total * (least + share * (most - least)))
    at_one = factor * sensitivity
    bits = allocate(sensitivity, elements, budget, least, most, at_one)
    assert bits.dtype == np.uint8 and (bits >= least).all() and (bits <= most).all()
    assert (bits * elements).sum() <= budget
    expected = allocation.reference(sensitivity, at_one, elements, budget, least, most)
    assert bits.tolist() == expected.tolist()
    # No bit that would fit is left over.
    left = budget - (bits * elements).sum()
    assert all(size > left or b == most for size, b in zip(elements, bits, strict=True) if size)


@pytest.mark.parametrize("average", [1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_equal_sizes_are_optimal(seed, average):
    sensitivity, _ = instance(seed, 24)
    elements = np.ones(24, np.int64)
    budget = int(average * 24)
    bits = allocate(sensitivity, elements, budget)
    assert variance(sensitivity, bits) == pytest.approx(optimum(sensitivity, elements, budget))


@pytest.mark.parametrize("average", [1.1, 1.5, 2, 3])
def test_variances_at_one_bit(average):
    """The result is that of the dynamic program for tensors of one size, with variances at 1 bit given separately."""
    sensitivity, _ = instance(3, 24)
    at_one = sensitivity * np.random.default_rng(3).uniform(0.25, 8, 24)
    sizes, budget = np.ones(24, np.int64), int(average * 24)
    bits = allocate(sensitivity, sizes, budget, at_one=at_one)
    found = np.where(bits == 1, at_one, sensitivity / (2.0**bits - 1) ** 2).sum()
    best = optimum(sensitivity, sizes, budget, at_one=at_one)
    assert found == pytest.approx(best)
    assert best < optimum(sensitivity, sizes, budget, at_one=8 * sensitivity)


@pytest.mark.parametrize("average", [1.25, 1.5, 1.75, 2, 2.5, 3, 4])
def test_within_one_percent_of_the_optimum(average):
    """Layers of several sizes, with samples of one size each, as in a network."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        sizes = np.repeat(rng.choice((1, 2, 4, 9, 16), 8), 16)
        layers = np.repeat(10.0 ** rng.uniform(-3, 3, 8), 16)
        sensitivity = layers * 10.0 ** rng.uniform(-1, 1, len(layers))
        budget = int(average * sizes.sum())
        found = variance(sensitivity, allocate(sensitivity, sizes, budget))
        assert found <= 1.01 * optimum(sensitivity, sizes, budget)


def test_more_bits_never_hurt():
    sensitivity, elements = instance(0, 50)
    total = int(elements.sum())
    found = [
        variance(sensitivity, allocate(sensitivity, elements, b))
        for b in range(total, 8 * total + 1, 7)
    ]
    assert all(a >= b * (1 - 0.02) for a, b in zip(found, found[1:], strict=False))
    assert found[0] == sensitivity.sum()


@pytest.mark.parametrize("arguments, message", [
    (([1.0, 2.0], [3], 9), "as many sensitivities"),
    (([1.0, np.nan], [3, 3], 9), "finite sensitivities"),
    (([1.0, -1.0], [3, 3], 9), "finite sensitivities of 0 or more, got -1"),
    (([1.0], [-3], 9), "0 or more, got -3"),
    (([1.0], [3], 9, 0, 8), "1 <= least <= most <= 8"),
    (([1.0], [10], 9), "a budget from 10 to 80 bits for 10 elements, got 9"),
])  # fmt: skip
def test_bad_input(arguments, message):
    with pytest.raises(InputError, match=message):
        allocate(*arguments)
