"""How the samples of a tensor share its bits."""

import numpy as np
import pytest
import torch
from samples import normal

from fewbit.compress import allocation
from fewbit.runtime.variables import Variable, split


@pytest.mark.parametrize("samples", [1, 2, 5, 32, 100])
@pytest.mark.parametrize("average", [1, 1.25, 1.5, 2, 2.75, 4, 7.9, 8])
def test_split_is_the_best_allocation(samples, average, device):
    squares = torch.exp(3 * normal((samples,), scale=1.0, seed=samples)).to(device)
    total = Variable(("", 0), average).total(samples)
    bits = split(squares, total).cpu().numpy()
    assert bits.sum() == total and (bits >= 1).all() and (bits <= 8).all()
    weights = squares.cpu().double().numpy()
    best = allocation.allocate(weights, np.ones(samples, np.int64), total)
    assert allocation.variance(weights, bits) == pytest.approx(allocation.variance(weights, best))


def test_samples_that_are_not_finite_get_least():
    squares = torch.tensor([1.0, torch.nan, 4.0, torch.inf])
    assert split(squares, 8).tolist() == [3, 1, 3, 1]


def test_totals():
    assert Variable(("", 0), 1.25).total(8) == 10
    assert Variable(("", 0), 2.0).total(3) == 6
    assert Variable(("", 0), 1.25).total(3) == 3  # what does not fill a bit is left
    assert Variable(("", 0), 2.9).uniform() == 2 and Variable(("", 0), 9.0).uniform() == 8
