"""Budgets for the calls of functions in one step of a layer, which cost the host's time for each small tensor.

A call is what a profiler reports: of a Python function, or of a function written in C that Python code calls, apart from fewbit's
kernels, which are the work itself. A budget is the
number of calls of a converted layer minus that of torch's layer. It is a ratchet: a change that needs fewer calls has to lower it.
"""

import gc
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from quantized import compiled
from samples import normal
from torch import nn

import fewbit

FOLDER = str(Path(fewbit.__file__).parent)
IS_COMPILING = torch.compiler.is_compiling.__code__
MOST_OF_ACTIVATION = 20
SLACK = 0.1
"""The share of a budget that may stay unused. Versions of torch and of Python differ a little."""


class Block(nn.Module):
    """A block of a transformer whose attention is torch's function."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.proj = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.norm2, self.up, self.act, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)  # fmt: skip

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(n, length, width))
        return x + self.down(self.act(self.up(self.norm2(x))))


def conv_bn_relu():
    return nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()


TOKENS, IMAGES = (4, 16, 64), (4, 8, 8, 8)
BUDGETS = {  # name: (layers, shape of the input, calls of the forward, of the backward; under AdaptiveBits in steps that measure nothing)
    "linear": (lambda: [nn.Linear(64, 64)], TOKENS, 81, 27, 128, 29),
    "conv": (lambda: [nn.Conv2d(8, 8, 3)], IMAGES, 90, 20, 137, 22),
    "layer norm": (lambda: [nn.LayerNorm(64)], TOKENS, 106, 32, 153, 35),
    "rms norm": (lambda: [nn.RMSNorm(64)], TOKENS, 109, 30, 156, 32),
    "group norm": (lambda: [nn.GroupNorm(2, 8)], IMAGES, 124, 43, 183, 47),
    "conv, batch norm, ReLU": (conv_bn_relu, IMAGES, 250, 84, 331, 88),
    "linear, GELU": (lambda: [nn.Linear(64, 64), nn.GELU()], TOKENS, 154, 47, 233, 51),
    "dropout": (lambda: [nn.Dropout(0.5)], TOKENS, 79, 34, 103, 34),
    "max pool": (lambda: [nn.MaxPool2d(2)], IMAGES, 167, 69, 191, 69),
    "softmax": (lambda: [nn.Softmax(-1)], TOKENS, 104, 13, 143, 13),
    "attention": (lambda: [Attention()], (4, 4, 16, 16), 161, 115, 254, 121),
    "block": (lambda: [Block()], TOKENS, 591, 325, 864, 349),
}
FILES_OF_LINEAR, OWN_OF_LINEAR = 20, (32, 10)


class Attention(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


def profiled(run):
    """Return the number of calls that `run` makes, and the code objects of fewbit's functions among them."""
    codes, count = [], 0

    def profile(frame, event, called):
        nonlocal count
        is_kernel = type(getattr(called, "__self__", None)).__module__ == "fewbit._kernels"
        count += event in ("call", "c_call") and not is_kernel
        is_ours = frame.f_code.co_filename.startswith(FOLDER)
        if event == "call" and (is_ours or frame.f_code is IS_COMPILING):
            codes.append(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count, codes


def step(layers, shape, bits):
    """Return what `profiled` found in the forward and in the backward of a step that measures nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers()).train()
    if bits is not None:
        fewbit.compress_(model, bits, verbose=False)
    x, results = normal(shape).requires_grad_(), []
    for _ in range(6):
        model(x).sum().backward()
    gc.disable()  # or the finalizers of other tests' objects may be called here
    try:
        forward = profiled(lambda: results.append(model(x)))
        loss = results[0].sum()
        return forward, profiled(lambda: loss.backward())
    finally:
        gc.enable()


@compiled
@pytest.mark.parametrize("under_policy", [False, True])
@pytest.mark.parametrize("name", BUDGETS)
def test_calls_of_a_layer(name, under_policy):
    layers, shape, *budgets = BUDGETS[name]
    budgets = budgets[2:] if under_policy else budgets[:2]
    bits = fewbit.AdaptiveBits(2) if under_policy else 2
    counts = [found[0] for found in step(layers, shape, bits)]
    exact = [found[0] for found in step(layers, shape, None)]
    more = [a - b for a, b in zip(counts, exact, strict=True)]
    for count, budget in zip(more, budgets, strict=True):
        assert budget * (1 - SLACK) - 3 <= count <= budget, f"expected {budgets}, got {more}"


@compiled
def test_functions_of_a_linear_layer():
    found = step(partial(lambda: [nn.Linear(64, 64)]), TOKENS, 2)
    codes = [[code for code in of if code is not IS_COMPILING] for _, of in found]
    assert tuple(map(len, codes)) <= OWN_OF_LINEAR
    assert len({code.co_filename for of in codes for code in of}) <= FILES_OF_LINEAR


@compiled
@pytest.mark.parametrize("function", [fewbit.functional.silu, fewbit.functional.gelu])
def test_an_activation(function):
    x = normal((16, 64)).requires_grad_()
    grad = torch.ones_like(x)
    for _ in range(2):  # the first call makes what later calls find
        _, codes = profiled(lambda: function(x, bits=3).backward(grad))
    names = [code.co_name for code in codes]
    assert "backward" in names
    assert len(names) <= MOST_OF_ACTIVATION, names
