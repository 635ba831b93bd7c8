"""The division of bits among the samples of a tensor."""

import numpy as np
import pytest
import torch
from composed import Composed
from layers import relative, saved_by
from quantized import check_bits_of_samples
from samples import normal
from torch import nn

import fewbit
from fewbit.policies import allocation
from fewbit.runtime import backends
from fewbit.runtime.format import groups
from fewbit.runtime.format.bit_sharing import share_bits
from fewbit.runtime.format.distortion import BITS, distortion
from fewbit.runtime.saved.assignment import TensorSlot


@pytest.mark.parametrize("kind", ["uniform", "rotated"])
@pytest.mark.parametrize("samples", [1, 5, 32])
@pytest.mark.parametrize("average", [1, 1.25, 2.75, 7.9, 8])
def test_split_is_the_best_allocation(samples, average, kind, device):
    squares = torch.exp(3 * normal((samples,), scale=1.0, seed=samples)).to(device)
    total = TensorSlot(("", 0), average).total(samples)
    bits = share_bits(squares, total, kind).cpu().numpy()
    assert bits.sum() == total and (bits >= 1).all() and (bits <= 8).all()
    by_bits = np.array([distortion(kind, number) for number in BITS])
    variances = squares.cpu().double().numpy()[:, None] * by_bits
    best = allocation.allocate(variances, np.ones(samples, np.int64), total)
    assert allocation.variance(variances, bits) == pytest.approx(
        allocation.variance(variances, best)
    )


@pytest.mark.parametrize("kind", ["uniform", "rotated"])
@pytest.mark.parametrize("samples", [1, 3, 255, 700])
def test_kernels_divide_bits_as_the_reference_does(samples, kind, device):
    kernels = backends.on[torch.empty(0, device=device).device]
    check_bits_of_samples(kernels, samples, kind, device)


def test_samples_that_are_not_finite_get_least():
    squares = torch.tensor([1.0, torch.nan, 4.0, torch.inf])
    assert share_bits(squares, 8, "uniform").tolist() == [3, 1, 3, 1]


def test_totals():
    assert TensorSlot(("", 0), 1.25).total(8) == 10
    assert TensorSlot(("", 0), 2.0).total(3) == 6
    assert TensorSlot(("", 0), 1.25).total(3) == 3  # what does not fill a bit is left
    assert TensorSlot(("", 0), 2.9).uniform() == 2 and TensorSlot(("", 0), 9.0).uniform() == 8


# -- in a model --------------------------------------------------------------------------------------


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 40),
        nn.LayerNorm(40),
        nn.Linear(40, 10),
    )


def shared(model, average, copies=None, **options):
    layers = fewbit.LayerSettings(functional=False, copies=copies)
    fewbit.compress_(model, fewbit.SampleBits(average), layers=layers, verbose=False, **options)
    return model


def gradient(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


X = normal((6, 3, 6, 6), scale=1.0)


@pytest.mark.parametrize("copies", [1, 2])
def test_eight_bits_are_as_close_as_fixed_ones(copies, device):
    x, exact = X.to(device), build().to(device)
    model = shared(build().to(device), 8, copies=copies)
    assert relative(gradient(model, x), gradient(exact, x)) < 0.02


@pytest.mark.parametrize("average", [1, 1.25, 1.5, 2, 3.5])
def test_bytes_follow_from_the_average_alone(average):
    def kept(scale):
        x = X * torch.tensor(scale).view(6, 1, 1, 1)
        return sorted(
            (str(tensor.dtype), tensor.nbytes)
            for tensor in saved_by(shared(build(), average), x)[1]
        )

    found = kept([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert found == kept([9.0, 0.1, 7.0, 0.0, 1.0, 1.0])
    # The convolution, the batch norm, the linear layer and the layer norm. Norms have 1 bit more.
    features = (3 * 36, 0), (8 * 36, 1), (8 * 36, 0), (40, 1)
    words = sorted(
        4 * groups.words_of_total(TensorSlot(("", 0), average + extra).total(6), count)
        for count, extra in features
    )
    codes = sorted(size for dtype, size in found if dtype == "torch.int32")
    assert [size for size in codes if size in words] == words


def test_tokens_of_samples(device):
    """A tensor (batch * tokens, features) has as many samples as the model's input."""
    model = Composed(lambda model, x: model.linear(x.flatten(0, 1)), linear=nn.Linear(24, 5))
    shared(model.to(device), 1.5)
    x = normal((4, 7, 24), scale=1.0).to(device)
    _, kept = saved_by(model, x)
    (widths,) = [tensor for tensor in kept if tensor.dtype == torch.uint8]
    assert len(widths) == 4 and widths.sum() == 6
    shared(model, 8)
    exact = nn.Linear(24, 5).to(device)
    exact.load_state_dict(model.linear.state_dict())
    expected = gradient(exact, x.flatten(0, 1))
    assert relative(gradient(model, x), expected) < 0.02


def test_where_samples_are_not_known_bits_are_those_of_the_tensor():
    halved = Composed(lambda model, x: model.linear(x[:3]), linear=nn.Linear(64, 5))
    _, kept = saved_by(shared(halved, 2.6), normal((4, 64)))
    assert not [tensor for tensor in kept if tensor.dtype == torch.uint8]
    (codes,) = [tensor for tensor in kept if tensor.dtype == torch.int32]
    assert codes.nbytes == 4 * 2 * 3 * 64 // 32


def test_samples_that_differ_share_bits_better():
    """At the same average, the variance of the gradient is lower."""
    x = X * torch.tensor([0.05, 0.05, 0.05, 0.05, 0.05, 8.0]).view(6, 1, 1, 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())
    exact = gradient(model, x)

    def noise():
        return sum((gradient(model, x) - exact).square().sum() for _ in range(10))

    fewbit.compress_(model, bits=2, verbose=False)
    fixed = noise()
    shared(model, 2.0)
    assert 0 < noise() < 0.3 * fixed
