"""Count the kernels that a training step of one layer launches on a GPU, with the fake device of `fake_cuda.py`.

An operation of torch that computes something counts as one kernel, and so does a call of a fewbit kernel. On a GPU some of
torch's operations launch more than one kernel, for example the backward of a convolution, but they do so in exact training
and with fewbit alike. RMS norm and dropout, which torch computes in one operation only on a GPU, are one operation here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from fake_cuda import DEVICE, FakeCuda
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

import fewbit


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


def _rms_norm(x, shape, weight, eps):
    """Compute `torch.ops.aten._fused_rms_norm` for one normalized dimension."""
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * rstd * (1 if weight is None else weight), rstd


def _rms_norm_backward(grad, x, shape, rstd, weight, mask):
    """Compute `torch.ops.aten._fused_rms_norm_backward` for one normalized dimension."""
    normalized, g = x * rstd, grad * (1 if weight is None else weight)
    grad_x = (g - normalized * (normalized * g).mean(-1, keepdim=True)) * rstd
    grads = grad_x, (grad * normalized).flatten(0, -2).sum(0)
    return tuple(x if is_needed else None for x, is_needed in zip(grads, mask, strict=True))


class _RMSNorm(Function):
    """torch's own RMS norm on a GPU."""

    @staticmethod
    def forward(ctx, x, shape, weight, eps):
        y, rstd = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(x, rstd, weight)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, rstd, weight = ctx.saved_tensors
        grads = torch.ops.aten._fused_rms_norm_backward(
            grad, x, ctx.shape, rstd, weight, (True, True)
        )
        return grads[0], None, grads[1], None


def fuse(patch: pytest.MonkeyPatch, cuda: FakeCuda, is_exact: bool) -> None:
    """Let operations that are one kernel on a GPU, and several on the CPU, be one kernel on the fake device.

    Args:
        patch: pytest's fixture.
        cuda: the fake device.
        is_exact: whether torch's functions call these operations, too, for layers that are not converted.
    """
    operations = {"_fused_rms_norm": _rms_norm, "_fused_rms_norm_backward": _rms_norm_backward}
    for name, function in operations.items():
        patch.setattr(torch.ops.aten, name, cuda.kernel(name, function))
    norms = importlib.import_module("fewbit.functional.layer_norm")
    patch.setattr(norms, "_HAS_RMS_NORM_BACKWARD", True)
    if is_exact:
        dropout = lambda x, p, training, inplace: torch.native_dropout(x, p, training)[0]  # noqa: E731
        patch.setattr(F, "dropout", dropout)
        patch.setattr(F, "rms_norm", _RMSNorm.apply)


class Step(NamedTuple):
    """The names of the kernels and transfers of one training step."""

    forward: list[str]
    backward: list[str]

    @property
    def total(self) -> int:
        return len(self.forward) + len(self.backward)


def steps_of(name: str, is_exact: bool) -> list[Step]:
    """Return the first eight training steps of a layer, in exact training or with 2 bits."""
    make, shape = LAYERS[name]
    with pytest.MonkeyPatch.context() as patch, FakeCuda(patch) as cuda:
        fuse(patch, cuda, is_exact)
        model = nn.Sequential(make()).to(DEVICE)
        if not is_exact:
            fewbit.compress_(model, bits=2, verbose=False)
        if name == "Embedding":
            x = torch.randint(32, shape).to(DEVICE)
        else:
            x = torch.randn(shape).to(DEVICE).requires_grad_()
        return [_step(cuda, model, x) for _ in range(8)]


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
    return Step(forward, backward)
