"""`fewbit.compile` on random models: gradients with 8 bits are close to exact ones, and none is wrong.

Each model is traced and partitioned, which takes about half a second, so there is one model for each GRAPH cases.
"""

import pytest
import torch
from cases import CASES, CHUNKS, seeds
from random_graphs import RandomGraph, gradient

import fewbit

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
GRAPH = 20
MOST = 0.06
"""The largest relative error of a gradient. Of the first 80 models, the largest has .027; a wrong gradient has about 1."""


def compiled_gradient(model, **settings):
    torch._dynamo.reset()
    return gradient(model, fewbit.compile(model, backend="aot_eager", **settings))


@pytest.mark.parametrize("part", range(CHUNKS))
def test_gradients_of_random_graphs(part):
    for seed in seeds(part, CASES // GRAPH):
        model = RandomGraph(seed)
        # In compiled code, dropout draws another mask than in eager mode.
        if model.has_dropout:
            exact = compiled_gradient(model, overrides={"": None})
        else:
            exact = gradient(model, model)
        error, size = float((compiled_gradient(model, bits=8) - exact).norm()), float(exact.norm())
        assert error <= MOST * size, (seed, error, size)  # some gradients are 0
