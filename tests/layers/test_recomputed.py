"""Results of activations, dropout and padding that later layers compute again from a copy of the input."""

import copy

import pytest
import torch
from composed import Composed
from layers import relative
from quantized import quantized_bytes
from samples import normal
from torch import nn
from torch.nn import functional as torch_f
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit import functions
from fewbit.runtime.activations import recomputed
from fewbit.runtime.ops.torch_functions import FORWARD

SMOOTH = [name for name in functions.names() if name not in recomputed.TWO_VALUED]


def gradient(model, x):
    """Return all gradients of the parameters as one vector."""
    model.zero_grad()
    model(x).square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def copies_of(model, x) -> int:
    """Return the bytes of packed codes that a forward pass saves."""
    return fewbit.saved_bytes(model, x).by_kind()["packed"]


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives(name):
    """grad * f'(x), against autograd in float64."""
    defaults = tuple(functions.get(name).parameters.values())
    x, grad = normal((50,), scale=2.0).double(), normal((50,), scale=1.0, seed=1).double()
    y = FORWARD[name](x.requires_grad_(), *defaults)
    (expected,) = torch.autograd.grad(y, x, grad)
    found = recomputed.times_derivative(grad, x.detach(), name, defaults)
    torch.testing.assert_close(found, expected)


def mlp(act):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), act, nn.Linear(64, 8))


SCALED = [  # an activation, the greatest error with inputs of deviations .03, 1 and 10
    (nn.GELU(), (0.1, 0.1, 0.2)),
    (nn.SiLU(), (0.1, 0.1, 0.2)),
    (nn.Softplus(), (0.1, 0.1, 0.1)),
    (nn.Mish(), (0.1, 0.1, 0.2)),
    (nn.Hardswish(), (0.1, 0.1, 0.2)),
    (nn.Tanhshrink(), (0.25, 0.25, 0.25)),
    (nn.Tanh(), (0.05, 0.1, 0.6)),
    (nn.Sigmoid(), (0.05, 0.1, 0.6)),
]


@pytest.mark.parametrize("act, errors", SCALED, ids=str)
@pytest.mark.parametrize("number, scale", [(0, 0.03), (1, 1.0), (2, 10.0)])
def test_inputs_of_every_scale(act, errors, number, scale):
    """The gradient behind the activation has the right size, which codes of a table do not give at small scales."""
    model = mlp(act)
    with torch.no_grad():
        model[0].weight.normal_(std=scale / 32**0.5)
        model[0].bias.zero_()
    x = normal((256, 32), scale=1.0).requires_grad_()
    weights = normal((8,), scale=1.0, seed=2)
    (exact,) = torch.autograd.grad((model(x) * weights).sum(), x)
    fewbit.compress_(model, 3, verbose=False)
    (found,) = torch.autograd.grad((model(x) * weights).sum(), x)
    assert relative(found, exact) < errors[number]
    # Tanh and sigmoid of such large inputs are saturated nearly everywhere.
    size = (found * exact).sum() / exact.square().sum()
    assert abs(size - 1) < (0.02 if errors[number] <= 0.25 else 0.2)


@pytest.mark.parametrize("act", [nn.GELU(), nn.SiLU(inplace=True), nn.Mish()], ids=str)
@pytest.mark.parametrize("bits, of_input", [(1, 3), (4, 6), (7, 8), (8, 8)])
def test_an_activation_saves_one_copy_and_the_layer_after_it_none(act, bits, of_input):
    model, x = mlp(copy.deepcopy(act)), normal((40, 32)).requires_grad_()
    fewbit.compress_(model, bits, verbose=False)
    expected = quantized_bytes((40, 32), bits) + quantized_bytes((40, 64), of_input)
    assert fewbit.saved_bytes(model, x).total == expected


def test_functions_and_modules_save_alike():
    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = mlp(nn.GELU())[::2]

        def forward(self, x):
            return self.b(torch_f.gelu(self.a(x)))

    x, saved = normal((40, 32)), []
    for model in (Called(), mlp(nn.GELU())):
        fewbit.compress_(model, 2, verbose=False)
        saved.append(copies_of(model, x))
    assert saved[0] == saved[1]


def test_given_bits_of_activations_are_those_of_codes():
    model, x = mlp(nn.GELU()), normal((40, 32)).requires_grad_()
    fewbit.compress_(model, 4, layers={"activation_bits": 3}, verbose=False)
    expected = quantized_bytes((40, 32), 4) + quantized_bytes((40, 64), 4)
    assert fewbit.saved_bytes(model, x).total == expected + 40 * 64 * 3 // 8


def test_a_result_that_is_written_to_is_saved():
    """A copy of the activation's input does not say what was written."""

    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.act, self.b = mlp(nn.GELU())

        def forward(self, x):
            y = self.act(self.a(x)).clone()
            y.mul_(-2)
            return self.b(y)

    model, x = Written(), normal((40, 32))
    exact = gradient(model, x)
    fewbit.compress_(model, 8, verbose=False)
    assert relative(gradient(model, x), exact) < 0.03
    assert copies_of(model, x) > copies_of(compressed(mlp(nn.GELU()), 8), x)


def compressed(model, bits, **options):
    fewbit.compress_(model, bits, verbose=False, **options)
    return model


@pytest.mark.parametrize("first", [0, 1], ids=["linear", "activation"])
def test_regions(first):
    """A checkpointed region computes the same, also if an activation gets its input, a leaf in the second run."""
    layers, x = mlp(nn.SiLU()), normal((64, 32)).requires_grad_()
    model = Composed(
        lambda model, x: checkpoint(model.last, model.first(x), use_reentrant=False),
        first=layers[:first],
        last=layers[first:],
    )
    exact = gradient(model, x)
    compressed(model, 8)
    assert relative(gradient(model, x), exact) < 0.02


def images(act, pad=None):
    torch.manual_seed(0)
    padding = [nn.ZeroPad2d(1)] if pad is None else pad
    layers = nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), act, *padding, nn.Conv2d(8, 8, 3)
    model = nn.Sequential(*layers)
    with torch.no_grad():
        model[1].weight.uniform_(0.5, 3)
        model[1].bias.uniform_(-1, 1)
    return model


SIDES = [
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.ReLU6(),
    nn.LeakyReLU(0.2),
    nn.Hardtanh(-0.5, 1.5, inplace=True),
]
AFTER = {"": [], "padding": [nn.ZeroPad2d(1)], "dropout": [nn.Dropout(0.3)]}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("act", SIDES, ids=str)
def test_the_norms_copy_and_a_bit_are_enough(act, after, layout):
    """The convolution after the activation saves nothing; its gradient is that of torch."""
    model = images(copy.deepcopy(act), AFTER[after])
    x = normal((4, 8, 12, 12)).contiguous(memory_format=layout).requires_grad_()
    torch.manual_seed(1)
    exact = gradient(model, x)
    compressed(model, 8)
    torch.manual_seed(1)
    found = gradient(model, x)
    assert relative(found, exact) < 0.03
    masks = 4 * 8 * 100 // 8 * (2 if after == "dropout" else 1)
    norm_and_input = quantized_bytes((4, 8, 100), 8) + quantized_bytes((4, 8, 144), 8)
    assert copies_of(model, x) <= norm_and_input + masks


@pytest.mark.slow
@pytest.mark.parametrize("act", [nn.ReLU6(), nn.LeakyReLU(0.2)], ids=str)
def test_gradients_through_sides_are_exact_in_expectation(act):
    """The weight of the convolution after the activation, whose input is computed from the norm's copy."""
    model, x = images(act), normal((4, 8, 12, 12)).requires_grad_()
    weight = model[-1].weight

    def draw():
        (grad,) = torch.autograd.grad(model(x).sum(), weight)
        return grad

    exact = draw()
    compressed(model, 2)
    errors = torch.stack([draw() - exact for _ in range(400)]).double()
    z = errors.mean(0) / (errors.std(0) / len(errors) ** 0.5)
    assert z.square().mean() < 2.5
