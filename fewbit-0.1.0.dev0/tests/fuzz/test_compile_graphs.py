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

If terms of a gradient cancel, its error may be larger, for example in the gradient of the mean square of a layer norm's
result, which is almost constant. Then the error shrinks with the errors of the copies, which are 16 times as large with
4 bits. The error of a wrong gradient is the same for all bits.
"""
DRAWS = 8


def compiled_gradient(model, **settings):
    torch._dynamo.reset()
    return gradient(model, fewbit.compile(model, backend="aot_eager", **settings))


def usual_error(model, bits, exact) -> float:
    """Return the mean norm of the error of a compiled model's gradient."""
    torch._dynamo.reset()
    run = fewbit.compile(model, bits, backend="aot_eager")
    # The rounding differs in each draw, dropout does not.
    errors = [gradient(model, run) - exact for _ in range(DRAWS)]
    return float(torch.stack(errors).norm(dim=1).mean())


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
            with_8, with_4 = (usual_error(model, bits, exact) for bits in (8, 4))
            assert with_8 < with_4 / 4, (seed, with_8, with_4)
