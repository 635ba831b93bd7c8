"""`compress_` with `everything` on random models: gradients with 8 bits are close to exact ones, and none is wrong."""

import copy

import pytest
from cases import CASES, CHUNKS, seeds
from random_graphs import RandomGraph, gradient

import fewbit

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
GRAPH = 4
"""The number of cases for each model."""
MOST = 0.15
"""The largest relative error of a gradient. Of 1,500 models, the largest has .042; a wrong gradient has about 1."""


@pytest.mark.parametrize("part", range(CHUNKS))
def test_gradients_of_random_graphs(part):
    for seed in seeds(part, CASES // GRAPH):
        model = RandomGraph(seed)
        few = copy.deepcopy(model)
        # Functions that fewbit replaces have tests of their own.
        layers = {"everything": True, "activation_bits": 8, "functional": False}
        fewbit.compress_(few, bits=8, layers=layers, verbose=False)
        exact = gradient(model, model)
        error, size = float((gradient(few, few) - exact).norm()), float(exact.norm())
        assert error <= MOST * size, (seed, error, size)  # some gradients are 0
