"""Count the kernels that a training step of one layer launches on a GPU, with the fake device of `fake_cuda.py`.

An operation of torch that computes something counts as one kernel, and so does a call of a fewbit kernel. On a GPU some of
torch's operations launch more than one kernel, for example the backward of a convolution, but they do so in exact training
and with fewbit alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from fake_cuda import DEVICE, FakeCuda
from torch import nn
from torch.nn import functional as F

import fewbit

QUIET, ASKS = 7, 8
"""A step in which fewbit only trains, and one in which it also asks which dtype means need (`saved/min_dtype.py`)."""


class _Attention(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(*x.chunk(3, -1))


class _Softmax(nn.Module):
    def forward(self, x):
        return F.softmax(x, -1)


TOKENS, IMAGES = (4, 32, 64), (4, 8, 16, 16)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(64, 64), TOKENS),
    "Conv2d": (lambda: nn.Conv2d(8, 8, 3), IMAGES),
    "LayerNorm": (lambda: nn.LayerNorm(64), TOKENS),
    "RMSNorm": (lambda: nn.RMSNorm(64), TOKENS),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(8), IMAGES),
    "GroupNorm": (lambda: nn.GroupNorm(4, 8), IMAGES),
    "GELU": (nn.GELU, TOKENS),
    "attention": (_Attention, (2, 2, 16, 192)),
    "softmax": (_Softmax, TOKENS),
    "Dropout": (nn.Dropout, TOKENS),
    "Embedding": (lambda: nn.Embedding(32, 64), TOKENS[:2]),
}
"""{name: (a function that makes the layer, the shape of its input)}."""


class Step(NamedTuple):
    """The names of the kernels and transfers of one training step."""

    forward: list[str]
    backward: list[str]

    @property
    def total(self) -> int:
        return len(self.forward) + len(self.backward)


def steps_of(name: str, is_exact: bool, dtype=torch.float32) -> dict[int, Step]:
    """Return {number of a training step, from 1: its kernels} of a layer in exact training or with 2 bits."""
    make, shape = LAYERS[name]
    with pytest.MonkeyPatch.context() as patch, FakeCuda(patch) as cuda:
        model = nn.Sequential(make()).to(DEVICE, dtype)
        if not is_exact:
            fewbit.compress_(model, bits=2, verbose=False)
        if name == "Embedding":
            x = torch.randint(32, shape).to(DEVICE)
        else:
            x = torch.randn(shape, dtype=dtype).to(DEVICE).requires_grad_()
        return {number: _step(cuda, model, x) for number in range(1, ASKS + 1)}


def _step(cuda: FakeCuda, model: nn.Module, x: torch.Tensor) -> Step:
    cuda.launches.clear()
    y = model(x)
    forward = list(cuda.launches)
    grad = torch.ones_like(y.detach())
    cuda.launches.clear()
    y.backward(grad)
    backward = list(cuda.launches)
    x.grad = None
    model.zero_grad()
    torch.cuda.synchronize()  # so that answers to the host arrive
    return Step(forward, backward)
