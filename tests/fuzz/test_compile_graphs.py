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
"""The largest usual error of a gradient, relative to its norm. Of 500 models, the second largest error is .032.

If terms of a gradient cancel, the error may be larger, but draws of the rounding have a small mean error. A wrong gradient
has the same error in every draw.
"""
DRAWS = 32


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
        error = compiled_gradient(model, bits=8) - exact
        if error.norm() > MOST * exact.norm():
            torch._dynamo.reset()
            run = fewbit.compile(model, bits=8, backend="aot_eager")
            # The rounding differs in each draw, dropout does not.
            errors = torch.stack([gradient(model, run) - exact for _ in range(DRAWS)])
            mean, usual = float(errors.mean(0).norm()), float(errors.norm(dim=1).mean())
            assert mean < 0.5 * usual, (seed, mean, usual)
