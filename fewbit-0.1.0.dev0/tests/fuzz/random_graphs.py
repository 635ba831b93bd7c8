"""Random models of torch functions, which `fewbit.compile` has never seen: a chain of operations on a few tensors."""

import random

import torch
import torch.nn.functional as F
from torch import nn

TOKENS, WIDTH = 32, 64


def _dropout(x):
    return F.dropout(x, 0.2)


def _lerp(x, y):
    return torch.lerp(x, y, 0.3)


UNARY = (
    torch.tanh, torch.sigmoid, torch.sin, F.gelu, F.silu, F.relu, F.elu, F.softplus, F.mish, F.leaky_relu, torch.abs,
    lambda x: torch.exp(-x.square()), lambda x: torch.log1p(x.square()), lambda x: torch.sqrt(1 + x.square()),
    lambda x: x.clamp(-1, 1), lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: torch.softmax(x, -1) * 8,
    _dropout, lambda x: x.flip(1), lambda x: x.roll(1, -1), lambda x: x.cumsum(1) / 8,
    lambda x: x * x.mean(-1, keepdim=True), lambda x: x - x.amax(-1, keepdim=True), lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    lambda x: x.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2), lambda x: x.where(x > 0, x.square()),
    lambda x: torch.einsum("btd,bsd->bts", x, x)[..., :1] * x / 64, lambda x: x.sort(-1).values,
    lambda x: x.topk(8, -1).values.sum(-1, keepdim=True) * x / 8, lambda x: F.max_pool1d(x, 2).repeat(1, 1, 2),
)  # fmt: skip
BINARY = (
    torch.add, torch.sub, torch.mul, torch.maximum, lambda x, y: x / (1 + y.square()), _lerp,
    lambda x, y: torch.sigmoid(x) * y, lambda x, y: torch.where(x > y, x, y), lambda x, y: x.clone().add_(y).mul_(0.5),
    lambda x, y: F.scaled_dot_product_attention(*(z.unflatten(-1, (4, -1)).transpose(1, 2) for z in (x, y, x + y)))
    .transpose(1, 2).flatten(-2),
)  # fmt: skip


class RandomGraph(nn.Module):
    """A chain of random operations. Each takes tensors that earlier ones made.

    Args:
        seed: the seed of the choice, of the parameters and of the input.
        count: the number of operations.

    Attributes:
        has_dropout: whether one of the operations is dropout.
    """

    def __init__(self, seed: int, count: int = 6):
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.steps = []
        self.has_dropout = False
        for number in range(count):
            arity = draw.choice((0, 1, 1, 2))
            function = draw.choice((UNARY, UNARY, BINARY)[arity]) if arity else None
            self.has_dropout |= function is _dropout
            places = [draw.randrange(-1, number) for _ in range(2)]
            self.steps.append((function, arity, places))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count + 1))
        self.x = torch.randn(4, TOKENS, WIDTH)

    def forward(self, x):
        made = [self.layers[-1](x)]
        for (function, arity, places), layer in zip(self.steps, self.layers, strict=False):
            inputs = [made[place + 1] for place in places]
            made.append(layer(inputs[0]) if function is None else function(*inputs[:arity]))
        return torch.stack([y.square().mean() for y in made[1:]]).sum()


def gradient(model, run):
    """Return the gradient of all parameters of a model after one call of `run`, as a float64 vector."""
    model.zero_grad()
    torch.manual_seed(3)
    run(model.x).backward()
    gradients = [x.grad.flatten() for x in model.parameters() if x.grad is not None]
    return torch.cat(gradients).double()
