"""Compiled elementwise functions, whose backward passes multiply one gradient by several tensors."""

import pytest
import torch
from compiled_models import MARKS, gradient
from layers import relative
from torch import nn

import fewbit

pytestmark = MARKS


class Chain(nn.Module):
    """A linear layer and an elementwise function of its result, whose backward pass has several factors."""

    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, dtype=dtype), nn.Linear(64, 64, dtype=dtype)
        self.function = function

    def forward(self, x):
        x = self.a(x.to(self.a.weight.dtype))
        return self.function(x, self.b(x)).float().square().mean()


def gelu_written_out(x, y):
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.045 * x**3)))


def differences(x, y):
    return torch.tanh(x) * y - x.sin() * y / 3 - (-y) * x.cos()


def with_itself(x, y):
    return x - x * torch.tanh(x) * 0.5 + 2 * x


def broadcast(x, y):
    scale = torch.linspace(0.1, 30, x.shape[-2])[:, None]
    return (x.sin() * scale).tanh() * y.mean(-1, keepdim=True)


def several_users(x, y):
    inner = x * y
    return inner.tanh() + inner.sin() * x.cos() + inner.cumsum(-1) / 64


def casts(x, y):
    return (x.float().sin() * y.float()).to(x.dtype) * torch.tanh(x) + 0.5 * x.float().cos()


def small_and_large(x, y):
    """20 sin(x) + 10^-4 exp(x), where the ratio of the factors exceeds float16's range."""
    return 20 * x.sin() + 1e-4 * (x * 4).exp()


def small_divisor(x, y):
    return (y * 1e-4).sin() / (1e-5 + x.detach().abs() * 1e-5)


def large_factor(x, y):
    x = x.float()
    return ((x + 12).exp() * x.sigmoid() * 1e-6).to(y.dtype)


class Difference(torch.autograd.Function):
    """sin(x) + cos(x), whose backward pass subtracts products of the gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin() + x.cos()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos() - gradient * x.sin()


def custom(x, y):
    return Difference.apply(x) * y


FLOAT16 = small_and_large, small_divisor, large_factor
CHAINS = custom, gelu_written_out, differences, with_itself, broadcast, several_users, casts


def errors(function, dtype, scale=1):
    """Return the errors of the gradients with 8 bits and of torch's own, relative to those of the model in float64.

    The loss is multiplied by `scale`.
    """
    torch.manual_seed(0)
    model, x = Chain(function, dtype), torch.randn(8, 16, 64)
    reference = Chain(function, torch.float64)
    reference.load_state_dict(model.state_dict())
    compiled = fewbit.compile(model, 8, backend="aot_eager", fullgraph=True)

    def of(module, run):
        return gradient(module, lambda x: scale * run(x), x)

    exact = of(reference, reference)
    return relative(of(model, compiled), exact), relative(of(model, model), exact)


@pytest.mark.inductor
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("function", CHAINS)
def test_gradients_of_chains(function, dtype):
    found, plain = errors(function, dtype)
    # A group of the chain "broadcast" has rows of very different sizes.
    assert found < (0.015 if function is broadcast else 0.01) + 1.5 * plain


@pytest.mark.inductor
@pytest.mark.parametrize(
    "function",
    [*(pytest.param(function, marks=pytest.mark.slow) for function in CHAINS), *FLOAT16],
)
def test_float16_does_not_overflow(function):
    found, plain = errors(function, torch.float16, scale=1 if function is small_divisor else 1024)
    assert found < 0.02 + 1.5 * plain


@pytest.mark.inductor
def test_powers_have_exact_means():
    """The backward pass of x * x * x multiplies the gradient by x twice."""
    torch.manual_seed(0)
    model, x = Chain(lambda x, y: y + x * x * x), torch.randn(8, 16, 64)
    exact = gradient(model, model, x)
    compiled = fewbit.compile(model, 2, backend="aot_eager")
    errors = torch.stack([gradient(model, compiled, x, seed) - exact for seed in range(100)])
    # The products of different draws' errors have the mean of the squared bias.
    products = errors @ errors.T
    others = float((products.sum() - products.diagonal().sum()) / (100 * 99))
    assert others < 0.01 * float(products.diagonal().mean())


@pytest.mark.inductor
def test_a_derivative_that_is_written_out_is_one_tensor():
    torch.manual_seed(0)
    model, x = Chain(gelu_written_out), torch.randn(8, 16, 64)
    rows = {}
    for name, autocast in {"float32": False, "bfloat16": True}.items():
        torch._dynamo.reset()
        compiled = fewbit.compile(model, 2, backend="aot_eager")
        with torch.autocast("cpu", torch.bfloat16, autocast):
            gradient(model, compiled, x)
        rows[name] = sorted(row.bits for row in compiled.partitioner.report.rows if row.bits)
    # The gradient of the square is a multiple of the loss's gradient too. Autocast makes another tensor of the input.
    assert rows == {"float32": [3], "bfloat16": [2, 3]}
