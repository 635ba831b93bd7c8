"""Small models, a loss and a policy with fixed averages, for tests of probes and of the policies that use them."""

import torch
from samples import normal
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.runtime.quantizers import copies
from fewbit.runtime.saved.bit_policy import BitPolicy
from fewbit.runtime.saved.saving_function import SavingFunction


class Fixed(BitPolicy):
    """A policy with given averages, and with a probe in the forward passes that will be measured."""

    def __init__(self, averages=None, probe=None):
        super().__init__()
        self.averages, self.probe = averages or {}, probe

    def begin(self, module, inputs):
        assignment = super().begin(module, inputs)
        assignment.probe = self.probe
        return assignment


def converted(model, bits=4, **options):
    """Compress a model with adaptive bits and codes of activations, and return its controller."""
    options.setdefault("layers", {"activation_bits": 3})
    return fewbit.compress_(model, fewbit.AdaptiveBits(bits), verbose=False, **options)


def loss_of(y):
    """Return a loss whose gradients have every size; y: a tensor, or a tuple with a tensor in front."""
    y = y if isinstance(y, torch.Tensor) else y[0]
    return (y.float() * normal(y.shape, scale=1.0, seed=9).to(y.device)).sum()


def gradient(model, x, seed=0):
    """Return the gradients of all parameters in one step, as one vector."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss_of(model(x)).backward()
    return torch.cat([x.new_empty(0), *(weight.grad.flatten() for weight in model.parameters())])


class Residual(nn.Module):
    """A module that computes x + body(x)."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x + self.body(x)


class Attention(nn.Module):
    """Self-attention of four heads, computed by torch's function."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        heads = [part.unflatten(2, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2)]
        y = F.scaled_dot_product_attention(*heads)
        return self.proj(y.transpose(1, 2).flatten(2))


def convnet():
    def block():
        return nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
        )

    stem = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    blocks = Residual(block()), nn.ReLU(), Residual(block()), nn.ReLU()
    return nn.Sequential(*stem, *blocks, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(8 * 4, 10))


def transformer():
    def block():
        return (
            Residual(nn.Sequential(nn.LayerNorm(32), Attention())),
            Residual(
                nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            ),
        )

    return nn.Sequential(*block(), *block(), nn.LayerNorm(32), nn.Linear(32, 10))


MODELS = {"convnet": (convnet, (8, 3, 8, 8)), "transformer": (transformer, (4, 8, 32))}
"""{name: (function that makes the model, shape of an input)}."""


class Twice(nn.Module):
    """One layer that is called with two inputs of different scales."""

    def __init__(self, scales, is_checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scales, self.is_checkpointed = nn.Linear(64, 64), scales, is_checkpointed

    def forward(self, x):
        def both(x):
            first, second = self.scales
            return self.linear(first * x) + self.linear(second * x.flip(0))

        return checkpoint(both, x, use_reentrant=False) if self.is_checkpointed else both(x)


class Counted(SavingFunction):
    """A Function that multiplies x by a weight and saves x quantized. It counts its backward passes."""

    passes = 0

    @staticmethod
    def forward(ctx, x, weight, quantizer):
        ctx.count = type(ctx)._forward_cls
        return copies.keep(ctx, x * weight, weight=weight, x=quantizer.quantize(x))

    @staticmethod
    def backward(ctx, grad):
        ctx.count.passes += 1
        kept = copies.Kept(ctx)
        return grad * kept.tensor("weight"), (kept.values("x") * grad).sum(0), None


class Collective(Counted):
    """The same Function, declared to run collectives in its backward pass."""

    backward_has_collectives = True
