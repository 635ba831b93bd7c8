"""Layers that save little for their backward pass: one list for all tests of them, and comparisons of two modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import NamedTuple

import pytest
import torch
from quantized import quantized_bytes
from samples import ACTIVATIONS, GELU, RELU, normal, same, same_sums
from torch import nn
from torch.nn import functional as torch_f

import fewbit.functional as F
import fewbit.nn
from fewbit.functional.operations import contractions, elementwise, vector_norm
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.quantizers.quantizer import Quantizer


class Called(nn.Module):
    """A module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


class Gated(nn.Module):
    """A module that computes act(gate) * up."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, gate, up):
        return self.act(gate) * up


class LinearCrossEntropy(nn.Linear):
    """A linear layer and the cross-entropy of its result."""

    def __init__(self, features, classes, label_smoothing=0.0):
        super().__init__(features, classes)
        self.label_smoothing = label_smoothing

    def forward(self, x, target):
        logits = super().forward(x).flatten(0, -2)
        return torch_f.cross_entropy(logits, target.flatten(), label_smoothing=self.label_smoothing)


# Equivalents of the modules that torch.nn lacks.
GATES = {
    "SwiGLU": lambda: Gated(torch_f.silu),
    "GEGLU": lambda approximate="none": Gated(partial(torch_f.gelu, approximate=approximate)),
    "ReGLU": lambda: Gated(torch_f.relu),
    "LinearCrossEntropy": LinearCrossEntropy,
}


@dataclass(frozen=True)
class Layer:
    """A layer of a class of torch.nn, with its arguments and the shapes of its inputs.

    Attributes:
        others: the inputs after the first: shapes, or functions of a device and a dtype that return a tensor.
        exact: for each floating input and then each parameter, True if its gradient equals torch's to the bit. None: see
            `limits`.
        format: memory format of the first input.
        order: the first input's dimensions in the order of storage, from the outermost.
        saved_shape: shape of the quantized tensor, if that is not the input's.
        vectors: the number of float32 numbers that are saved besides the quantized tensor.
        channels: the number of channels whose means and scales the copy has.
        saved: (bits, output) -> saved bytes, for layers that save other tensors.
        kind: the usual kind of the layer's copies (docs/decisions/0016).
        make: (function that takes fewbit's settings and returns our module, function that returns torch's module), if
            the layer is no class of fewbit.nn.
        first: a function of a device and a dtype that returns the first input, if that is not normal.
        has_bits: whether the layer has the settings `bits`, `group_size` and `quantizer`.
        is_unbiased: whether all gradients are exact in expectation, for norms with two copies.
        limit: the largest relative error of a gradient at 8 bits that is not exact.
        rounding: the relative error of values and exact gradients in units of the dtype's eps, for layers that add in
            another order than torch.
    """

    name: str
    arguments: tuple
    shape: tuple[int, ...]
    options: dict = field(default_factory=dict)
    others: tuple = ()
    exact: tuple[bool, ...] | None = None
    format: torch.memory_format | None = None
    order: tuple[int, ...] | None = None
    saved_shape: tuple[int, ...] | None = None
    vectors: int = 0
    channels: int = 0
    saved: Callable | None = field(default=None, repr=False)
    kind: str = "rotated"
    make: tuple[Callable, Callable] | None = field(default=None, repr=False)
    first: Callable | None = field(default=None, repr=False)
    has_bits: bool = True
    is_unbiased: bool = False
    limit: float = 0.02
    rounding: float = 0.0

    @property
    def id(self) -> str:
        last = " channels last" if self.format else ""
        return f"{self.name}{self.arguments}{self.options or ''}{last} {self.shape}"

    @property
    def is_linear(self) -> bool:
        """True if only parameters' gradients depend on the saved input: linearly, so they are exact in expectation."""
        return self.name.startswith(("Linear", "Conv"))

    @property
    def is_norm(self) -> bool:
        return "Norm" in self.name

    @property
    def has_copies(self) -> bool:
        """True if a Quantizer of the layer makes all that it saves quantized."""
        return self.has_bits and self.name != "PreActivation"

    @property
    def is_class(self) -> bool:
        """True if fewbit.nn has the layer as a subclass of torch's class."""
        return self.make is None and self.name not in GATES

    def theirs(self) -> nn.Module:
        if self.make is not None:
            return self.make[1]()
        return (GATES.get(self.name) or getattr(nn, self.name))(*self.arguments, **self.options)

    def ours(self, **options) -> nn.Module:
        if self.make is not None:
            return self.make[0](**options)
        return getattr(fewbit.nn, self.name)(*self.arguments, **self.options, **options)

    def pair(self, bits: int, device="cpu", dtype=torch.float32, **ours):
        """Return our module and torch's, with the same parameters and buffers."""
        torch.manual_seed(0)
        theirs = self.theirs().to(device, dtype)
        with torch.no_grad():
            for number, parameter in enumerate(theirs.parameters()):
                parameter.copy_(normal(parameter.shape, dtype, device, 0.5, seed=number) + 0.2)
        module = self.ours(**({"bits": bits} if self.has_bits else {}), **ours).to(device, dtype)
        module.load_state_dict(theirs.state_dict())
        return module, theirs

    def pair_with(self, quantizer, device="cpu", dtype=torch.float32, **ours):
        """Return our module with the given Quantizer, and torch's."""
        if self.make is not None:
            return self.pair(8, device, dtype, quantizer=quantizer)
        module, theirs = self.pair(8, device, dtype, **ours)
        module.quantizer = quantizer
        return module, theirs

    def input(self, device="cpu", dtype=torch.float32, offset=0.0):
        if self.first is not None:
            return self.first(device, dtype)
        x = normal(self.shape, dtype, device, scale=1.0) + offset
        if self.order:
            back = [self.order.index(dim) for dim in range(len(self.order))]
            return x.permute(self.order).contiguous().permute(back)
        return x.contiguous(memory_format=self.format) if self.format else x

    def inputs(self, device="cpu", dtype=torch.float32, offset=0.0):
        others = [
            other(device, dtype)
            if callable(other)
            else normal(other, dtype, device, scale=1.0, seed=number) + offset
            for number, other in enumerate(self.others)
        ]
        return [self.input(device, dtype, offset), *others]

    def expected_bytes(self, bits: int, y: torch.Tensor) -> int:
        """Return the bytes that the forward with output y saves besides parameters (docs/concepts/quantizer.md)."""
        if self.saved is not None:
            return self.saved(bits, y)
        copied = quantized_bytes(self.saved_shape or self.shape, bits, kind=self.kind)
        return copied + 4 * (self.vectors + self.channels)

    def limits(self, module, dtype) -> list[float]:
        """Return the largest relative error of each gradient at 8 bits, of the inputs and then of the parameters."""
        if self.exact is not None:
            exact = self.rounding * torch.finfo(dtype).eps
            return [exact if is_exact else self.limit for is_exact in self.exact]
        if dtype.itemsize == 2:  # sums of 16-bit numbers have their own rounding errors
            return [0.06] * (1 + len(list(module.parameters())))
        names = [name for name, _ in module.named_parameters()]
        return [
            1e-5 if self.is_linear else 0.02,
            *(1e-5 if name == "bias" else 0.02 for name in names),
        ]


LAST = torch.channels_last
LAST_3D = torch.channels_last_3d
LINEAR = [
    Layer("Linear", (70, 9), (5, 70)),
    Layer("Linear", (300, 9), (2, 5, 300)),
    Layer("Linear", (40, 3), (40,)),
    Layer("Linear", (20, 3), (2, 130, 20), channels=20),
    Layer("Linear", (7, 3), (11, 7), {"bias": False}),
    Layer("Conv1d", (4, 6, 3), (3, 4, 30)),
    Layer("Conv1d", (4, 6, 3), (4, 30), saved_shape=(1, 4, 30)),
    Layer("Conv2d", (4, 6, 3), (2, 4, 9, 10), {"stride": 2, "padding": 1}),
    Layer("Conv2d", (4, 6, 3), (2, 4, 9, 10), format=LAST),
    Layer("Conv2d", (4, 6, 3), (2, 4, 12, 11), format=LAST, channels=4),
    Layer("Conv2d", (4, 8, (2, 3)), (2, 4, 9, 10), {"dilation": (2, 1), "groups": 2, "bias": False}),
    Layer("Conv2d", (4, 4, (2, 4)), (2, 4, 9, 10), {"padding": "same"}, saved_shape=(2, 4, 10, 11)),
    Layer("Conv2d", (4, 4, 3), (2, 4, 9, 10), {"padding": "same"}),
    Layer("Conv2d", (4, 4, 3), (2, 4, 9, 10), {"padding": 1, "padding_mode": "circular"}, saved_shape=(2, 4, 11, 12)),
    Layer("Conv2d", (4, 4, 3), (2, 4, 9, 10), {"padding": 2, "padding_mode": "reflect"}, saved_shape=(2, 4, 13, 14)),
    Layer("Conv3d", (2, 4, 2), (2, 2, 4, 5, 6)),
    Layer("ConvTranspose1d", (4, 6, 3), (3, 4, 20), {"stride": 2}),
    Layer("ConvTranspose2d", (4, 6, 3), (4, 7, 8), saved_shape=(1, 4, 7, 8)),
    Layer(
        "ConvTranspose2d",
        (4, 6, 3),
        (2, 4, 7, 8),
        {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2, "dilation": 2},
    ),
    Layer("ConvTranspose3d", (2, 4, 2), (2, 2, 4, 5, 6)),
    Layer("Conv1d", (4, 6, 4), (2, 4, 20), {"padding": "same"}, saved_shape=(2, 4, 21)),
    Layer("Conv1d", (4, 6, 3), (2, 4, 20), {"padding": "same", "padding_mode": "reflect", "dilation": 2}, saved_shape=(2, 4, 24)),
    Layer(
        "Conv3d",
        (2, 4, (2, 3, 1)),
        (2, 2, 4, 5, 6),
        {"padding": "same", "padding_mode": "circular"},
        saved_shape=(2, 2, 5, 7, 6),
    ),
    Layer(
        "Conv3d",
        (2, 4, 3),
        (2, 2, 4, 5, 6),
        {"padding": (1, 2, 1), "padding_mode": "replicate", "stride": 2},
        format=LAST_3D,
        saved_shape=(2, 2, 6, 9, 8),
        channels=2,
    ),
    Layer("ConvTranspose1d", (4, 6, 3), (3, 4, 20), {"stride": 3, "output_padding": 2}),
    Layer("ConvTranspose3d", (2, 4, 2), (2, 2, 3, 4, 5), {"stride": 2, "padding": 1, "output_padding": (1, 0, 1)}),
]  # fmt: skip
NORMS = [
    Layer("LayerNorm", (96,), (5, 96), vectors=5),
    Layer("LayerNorm", ((6, 16),), (3, 2, 6, 16), vectors=6),
    Layer("LayerNorm", (96,), (5, 96), {"elementwise_affine": False}, vectors=5),
    Layer("LayerNorm", (12,), (2, 130, 12), vectors=260, channels=12),
    Layer("LayerNorm", (96,), (5, 96), {"bias": False}, vectors=5),
    Layer("RMSNorm", (96,), (5, 7, 96), vectors=35),
    Layer("RMSNorm", ((6, 16),), (3, 6, 16), {"eps": 1e-3}, vectors=3),
    Layer("RMSNorm", ((2, 6),), (2, 130, 2, 6), vectors=260, channels=12),
    Layer("GroupNorm", (4, 8), (3, 8, 5, 6), vectors=12),
    Layer("GroupNorm", (4, 8), (3, 8, 5, 6), vectors=12, format=LAST),
    Layer("GroupNorm", (1, 4), (1, 4, 8, 8), vectors=1),
    Layer("GroupNorm", (2, 4), (2, 4, 3, 4, 5), vectors=4, format=LAST_3D),
    Layer("GroupNorm", (2, 6), (5, 6, 40), {"affine": False}, vectors=10),
    Layer("BatchNorm1d", (70,), (9, 70), vectors=70),
    Layer("BatchNorm1d", (7,), (5, 7, 20), {"momentum": None}, vectors=7),
    Layer("BatchNorm2d", (5,), (4, 5, 6, 7), vectors=5),
    Layer("BatchNorm2d", (5,), (4, 5, 6, 7), vectors=5, format=LAST),
    Layer("BatchNorm2d", (5,), (4, 5, 6, 7), {"track_running_stats": False}, vectors=5),
    Layer("BatchNorm2d", (5,), (4, 5, 6, 7), {"affine": False}, vectors=5),
    Layer("BatchNorm3d", (3,), (2, 3, 4, 5, 6), vectors=3),
    Layer("BatchNorm3d", (3,), (2, 3, 4, 5, 6), vectors=3, format=LAST_3D),
    Layer("InstanceNorm1d", (3,), (4, 3, 40), vectors=12),
    Layer("InstanceNorm1d", (3,), (3, 40), saved_shape=(1, 3, 40), vectors=3),
    Layer(
        "InstanceNorm2d",
        (3,),
        (4, 3, 6, 7),
        {"affine": True, "track_running_stats": True},
        vectors=2 * 12,  # the weight is saved too, once for each sample
    ),
    Layer("InstanceNorm3d", (3,), (2, 3, 4, 3, 5), {"affine": True}, vectors=2 * 6),
]
LINEAR = [replace(layer, is_unbiased=True) for layer in LINEAR]
NORMS = [replace(layer, is_unbiased=True) for layer in NORMS]
LAYERS = LINEAR + NORMS
"""Layers that save one quantized input."""


def _signs(count: int) -> int:
    """Return the bytes of a mask of `count` elements."""
    return 4 * packed_words(count, 1)


def _prelu(arguments, shape, format=None):
    return Layer(
        "PReLU",
        arguments,
        shape,
        format=format,
        exact=(True, False),
        saved=lambda bits, y: _signs(y.numel()) + quantized_bytes(shape, bits),
        is_unbiased=True,
    )


def _bilinear(arguments, lead):
    shape, other = ((*lead, size) for size in arguments[:2])
    return Layer(
        "Bilinear",
        arguments,
        shape,
        others=(other,),
        exact=(False, False, False, True)[: 3 + arguments[3]],
        saved=lambda bits, y: quantized_bytes(shape, bits) + quantized_bytes(other, bits),
        is_unbiased=True,
    )


def _gated(name, arguments=(), shape=(6, 9, 50), channels=0):
    return Layer(
        name,
        arguments,
        shape,
        others=(shape,),
        exact=(False, False),
        saved=lambda bits, y: (
            2 * quantized_bytes(shape, bits)
            + 2 * 4 * channels
            + (name == "ReGLU") * _signs(y.numel())
        ),
        is_unbiased=name == "ReGLU",
    )


def _glu(arguments, shape):
    return Layer(
        "GLU",
        arguments,
        shape,
        exact=(False,),
        saved=lambda bits, y: quantized_bytes(shape, bits),
    )


def _dropout(name, shape, features=None):
    """Return a dropout with a mask over the first `features` dimensions."""
    return Layer(
        name,
        (0.3,),
        shape,
        exact=(True,),
        saved=lambda bits, y: _signs(prod(y.shape[:features])),
        has_bits=False,
    )


def _pool(name, shape, arguments, place=0, options=None):
    """Return a pooling that saves the place of each maximum in `place` bits."""
    return Layer(
        name,
        arguments,
        shape,
        options or {},
        exact=(True,),
        saved=lambda bits, y: place // 8 * y.numel() if place > 8 else place * _signs(y.numel()),
        has_bits=False,
    )


ROUNDED = [
    _prelu((), (4, 5, 9)),
    _prelu((5,), (4, 5, 6)),
    _prelu((5,), (4, 5, 9, 8)),
    _prelu((70,), (6, 70)),
    _prelu((), (40,)),
    _prelu((5,), (2, 5, 4, 3), LAST),
    _prelu((5,), (2, 5, 2, 4, 3), LAST_3D),
    Layer("Softmax", (-1,), (6, 70), exact=(False,), kind="uniform"),
    Layer("Softmax", (1,), (3, 4, 5), exact=(False,), kind="uniform"),
    Layer("LogSoftmax", (-1,), (6, 70), exact=(False,), kind="uniform", is_unbiased=True),
    Layer("LogSoftmax", (0,), (3, 4, 5), exact=(False,), kind="uniform", is_unbiased=True),
    _bilinear((5, 6, 7, True), (30,)),
    _bilinear((66, 6, 3, False), (4, 5)),
    _gated("SwiGLU"),
    _gated("GEGLU", shape=(2, 130, 20), channels=20),
    _gated("GEGLU", ("tanh",)),
    _gated("ReGLU"),
    _glu((), (6, 9, 100)),
    _glu((1,), (3, 8, 40)),
]
"""Layers that save other quantized tensors."""
DROPOUTS = [
    _dropout("Dropout", (7, 33)),
    _dropout("Dropout", (40, 50, 60)),
    _dropout("Dropout", (2, 3, 4, 5)),
    _dropout("Dropout1d", (4, 5, 6), 2),
    _dropout("Dropout1d", (40, 6), 1),
    _dropout("Dropout2d", (4, 9, 5, 6), 2),
    _dropout("Dropout3d", (4, 5, 2, 3, 3), 2),
    _dropout("Dropout3d", (5, 4, 3, 3), 1),
    _dropout("AlphaDropout", (7, 33)),
    _dropout("FeatureAlphaDropout", (4, 9, 5, 6), 2),
    _dropout("FeatureAlphaDropout", (4, 9), 2),
]
CEIL, INDICES = {"ceil_mode": True}, {"return_indices": True}
POOLINGS = [
    _pool("MaxPool1d", (2, 3, 17), (2,), 1),
    _pool("MaxPool1d", (2, 3, 17), (5, 2, 1, 2), 3, CEIL),
    _pool("MaxPool1d", (3, 17), (3, 2), 2),
    _pool("MaxPool1d", (2, 1, 700), (300, 100), 16),
    _pool("MaxPool2d", (2, 3, 8, 9), (2,), 2),
    _pool("MaxPool2d", (2, 3, 8, 9), (3, 2, 1), 4),
    _pool("MaxPool2d", (2, 3, 8, 9), (3, 2, 1, 1), 4, CEIL | INDICES),
    _pool("MaxPool2d", (2, 3, 8, 9), ((1, 2), (2, 1), 0, (1, 3)), 1),
    _pool("MaxPool2d", (2, 3, 8, 9), (1, 2), 0),
    _pool("MaxPool2d", (3, 8, 9), (3, 1, 1), 4),
    _pool("MaxPool2d", (1, 2, 16, 16), (16,), 8),
    _pool("MaxPool2d", (1, 2, 17, 17), (17,), 16),
    _pool("MaxPool2d", (1, 1, 182, 182), (182,), 32),
    _pool("MaxPool2d", (0, 3, 8, 9), (2,), 2),
    _pool("MaxPool3d", (2, 3, 4, 5, 6), (2,), 3),
    _pool("MaxPool3d", (2, 3, 4, 5, 6), (3, 2, 1), 5, CEIL),
    _pool("MaxPool3d", (3, 4, 5, 6), ((1, 3, 2), 1), 3, INDICES),
    _pool("AdaptiveMaxPool1d", (2, 3, 17), (5,), 3),
    _pool("AdaptiveMaxPool1d", (3, 17), (20,), 1),
    _pool("AdaptiveMaxPool2d", (2, 3, 8, 9), (1,), 7),
    _pool("AdaptiveMaxPool2d", (2, 3, 8, 9), ((3, None),), 2, INDICES),
    _pool("AdaptiveMaxPool2d", (2, 3, 8, 9), ((8, 9),), 0),
    _pool("AdaptiveMaxPool2d", (3, 8, 9), ((4, 3),), 3),
    _pool("AdaptiveMaxPool2d", (1, 2, 20, 30), (1,), 16),
    _pool("AdaptiveMaxPool3d", (2, 3, 4, 5, 6), ((2, 3, 4),), 4),
    _pool("AdaptiveMaxPool3d", (3, 4, 5, 6), ((None, 5, None),), 0),
    _pool("AvgPool1d", (2, 3, 17), (3, 2, 1)),
    _pool("AvgPool1d", (3, 17), (4,)),
    _pool("AvgPool2d", (2, 3, 8, 9), (2,)),
    _pool("AvgPool2d", (2, 3, 8, 9), (3, 2, 1, True, False)),
    _pool("AvgPool2d", (3, 8, 9), ((2, 3), 1, 0, False, True, 5)),
    _pool("AvgPool3d", (2, 3, 4, 5, 6), (2,)),
    _pool("AvgPool3d", (3, 4, 5, 6), (3, (1, 2, 2), 1, True, False, 7)),
    _pool("AdaptiveAvgPool1d", (2, 3, 17), (5,)),
    _pool("AdaptiveAvgPool1d", (3, 17), (1,)),
    _pool("AdaptiveAvgPool2d", (2, 3, 8, 9), ((3, None),)),
    _pool("AdaptiveAvgPool2d", (2, 3, 8, 9), (1,)),
    _pool("AdaptiveAvgPool2d", (3, 8, 9), ((1, 2),)),
    _pool("AdaptiveAvgPool3d", (2, 3, 4, 5, 6), ((2, 3, 4),)),
    _pool("AdaptiveAvgPool3d", (2, 3, 4, 5, 6), (1,)),
]


# -- the rows of all other layers ------------------------------------------------------------------


def function_row(name, ours, theirs, shape, others=(), *, is_result=False, has_bits=True, **fields):
    """Return a row of two functions, of which ours takes a quantizer if it has bits.

    is_result: whether the inputs are results of an operation. Products save leaves, which are in memory anyway, in full.
    """

    def called(function):
        return Called(lambda *inputs: function(*(1.0 * x if is_result else x for x in inputs)))

    def make(bits=4, group_size=256, quantizer=None):
        if not has_bits:
            return called(ours)
        if not isinstance(quantizer, Quantizer):
            quantizer = Quantizer(bits, group_size, kind=quantizer)
        return called(partial(ours, quantizer=quantizer))

    made = make, lambda: called(theirs)
    return Layer(name, (), shape, others=others, has_bits=has_bits, make=made, **fields)


def _copies(*shapes, kind="rotated", extra=0):
    """Return the function (bits, output) -> bytes of one copy for each shape, and `extra` bytes."""
    return lambda bits, y: sum(quantized_bytes(shape, bits, kind=kind) for shape in shapes) + extra


def indices(high, *shape):
    """Return a function of a device and a dtype that returns random whole numbers below `high`."""

    def make(device, dtype):
        generator = torch.Generator().manual_seed(3)
        return torch.randint(high, shape, generator=generator).to(device)

    return make


def _mask(*shape):
    return lambda device, dtype: torch.ones(shape, dtype=torch.bool, device=device).tril(1)


QUERY, KEY = (3, 4, 9, 16), (3, 4, 11, 16)
CPU_STATE = 5056
"""The bytes of the state of the CPU's random generator."""


def _attention(label, query=QUERY, key=KEY, others=(), count=3, extra=0, **options):
    """Return a row of attention whose first `count` inputs need a gradient."""
    return function_row(
        f"scaled_dot_product_attention, {label}",
        partial(F.scaled_dot_product_attention, **options),
        partial(torch_f.scaled_dot_product_attention, **options),
        query,
        (key, key, *others),
        exact=(False,) * count,
        saved=_copies(query, key, key, extra=extra),
    )


def _self_attention(**options):
    lengths = 7, 9, 9
    return Layer(
        "MultiheadAttention",
        (32, 4),
        (7, 3, 32),
        options,
        others=((9, 3, 32), (9, 3, 32)),
        exact=(False,) * 6 + (True,) if options.get("bias", True) else (False,) * 5,
        # The inputs, the projected inputs, and the result of attention.
        saved=_copies(*2 * [(length, 3, 32) for length in lengths], (21, 32)),
        limit=0.1,
    )


def _cross_entropy(shape, count, **options):
    target = (shape[0], *shape[2:]) if len(shape) > 1 else ()
    return Layer(
        "CrossEntropyLoss",
        (),
        shape,
        options,
        others=(indices(count, *target),),
        exact=(False,),
        saved=_copies(shape, kind="uniform", extra=8 * prod(target)),
        kind="uniform",
        is_unbiased=True,
    )


def _embedding(rows, size, shape=(3, 5), **options):
    return Layer(
        "Embedding",
        (rows, 4),
        shape,
        options,
        first=indices(rows, *shape),
        exact=(True,),
        saved=lambda bits, y: size * prod(shape),
        has_bits=False,
    )


def _resized(name, shape, **options):
    return Layer(name, (), shape, options, exact=(True,), saved=lambda bits, y: 0, has_bits=False)


def _operation(
    name, ours, theirs, shapes, saved, is_exact=False, *, others=(), exact=None, **fields
):
    """Return a row of an operation, whose inputs of the given shapes need a gradient."""
    return function_row(
        name,
        ours,
        theirs,
        shapes[0],
        (*shapes[1:], *others),
        is_result=True,
        exact=exact or (is_exact,) * len(shapes),
        has_bits=not is_exact,
        saved=saved,
        **fields,
    )


class PreActivated(nn.Module):
    """A model of the layers of a pre-activation block, with the block's names."""

    def __init__(self):
        super().__init__()
        self.norm, self.activation, self.linear = nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3)

    def forward(self, x):
        return self.linear(self.activation(self.norm(x)))


def _pre_activation(bits=4):
    torch.manual_seed(0)
    parts = PreActivated()
    return fewbit.nn.PreActivation(parts.norm, parts.linear, parts.activation, bits)


MATRICES = (4, 16, 24), (4, 20, 24)
OFFSETS = torch.tensor([20, 20, 60], dtype=torch.int32)
ATTENTION = [
    _attention("plain"),
    _attention("causal", is_causal=True),
    _attention("boolean mask", others=(_mask(9, 11),), extra=9 * 11),
    _attention("learned mask", others=((9, 11),), count=4, extra=4 * 9 * 11),
    _attention("scale, three dimensions", (12, 9, 16), (12, 11, 16), scale=0.1),
    _attention("dropout", dropout_p=0.3, extra=CPU_STATE),
    _attention("fewer keys", (3, 4, 9, 16), (3, 2, 11, 16), enable_gqa=True),
    _self_attention(),
    _self_attention(bias=False),
]
LOSSES = [
    _cross_entropy((30, 7), 7),
    _cross_entropy((7,), 7, reduction="sum"),
    _cross_entropy((4, 7, 3, 5), 7, label_smoothing=0.3, ignore_index=2),
    _cross_entropy((6, 700), 700, reduction="none"),
    *(
        Layer(
            "LinearCrossEntropy",
            (16, 40),
            (4, 5, 16),
            options,
            others=(indices(40, 4, 5),),
            exact=(True,) * 3,
            has_bits=False,
            rounding=8.0,
        )
        for options in ({}, {"label_smoothing": 0.1})
    ),
]  # fmt: skip
EMBEDDINGS = [
    _embedding(10, 1),
    _embedding(256, 1, ()),
    _embedding(257, 2),
    function_row(
        "embedding, negative padding_idx",
        partial(F.embedding, padding_idx=-1),
        partial(torch_f.embedding, padding_idx=-1),
        (3, 5),
        ((4, 6),),
        first=indices(4, 3, 5),
        exact=(True,),
        saved=lambda bits, y: 15,
        has_bits=False,
    ),
    _embedding(4, 1, padding_idx=1),
    _embedding(1 << 15, 2, (7,), scale_grad_by_freq=True),
    _embedding((1 << 15) + 1, 4),
    _embedding(50, 1, max_norm=1.0),
    _embedding(50, 1, (40,), max_norm=1.0, norm_type=1.0, scale_grad_by_freq=True),
]
RESIZED = [
    *(_resized("Upsample", (2, 3, 9), mode=mode, scale_factor=1.7) for mode in ("nearest", "linear")),
    *(_resized("Upsample", (2, 3, 9), mode=mode, size=1) for mode in ("nearest-exact", "area")),
    *(_resized("Upsample", (2, 3, 9, 8), mode=mode, scale_factor=0.5) for mode in ("bilinear", "area")),
    _resized("Upsample", (2, 3, 9, 8), mode="bicubic", size=3),
    _resized("Upsample", (2, 3, 9, 8), mode="area", scale_factor=(0.6, 1.5)),
    _resized("Upsample", (2, 3, 9, 8), mode="area", size=[2, 11]),
    _resized("Upsample", (2, 3, 9, 8), mode="area", scale_factor=0.4, recompute_scale_factor=True),
    _resized("Upsample", (2, 3, 9, 8), mode="bilinear", scale_factor=2.0, align_corners=True),
    *(_resized("Upsample", (2, 3, 5, 4, 6), mode=mode, scale_factor=1.7) for mode in ("trilinear", "area")),
    _resized("UpsamplingNearest2d", (2, 3, 4, 5), scale_factor=2),
    _resized("UpsamplingBilinear2d", (2, 3, 4, 5), scale_factor=2),
    *(
        function_row(
            f"{name}, {options['mode']}",
            partial(getattr(F, name), **options),
            partial(getattr(torch_f, name), **options),
            shape,
            exact=(True,),
            has_bits=False,
            saved=lambda bits, y: 0,
        )
        for name, shape, options in (
            ("interpolate", (2, 3, 9, 8), {"scale_factor": 0.5, "mode": "area"}),
            ("interpolate", (2, 3, 9, 8), {"size": (4, 5), "mode": "bicubic", "antialias": True}),
            ("pad", (2, 3, 5), {"pad": (1, 2), "mode": "reflect"}),
            ("pad", (2, 3, 5, 6), {"pad": (1, 2, 1, 1), "mode": "replicate"}),
            ("pad", (2, 3, 4, 5, 6), {"pad": (1, 1, 2, 1, 0, 1), "mode": "replicate"}),
            ("pad", (3, 5, 6), {"pad": (1, 2, 1, 1), "mode": "constant", "value": 2.0}),
        )
    ),
]  # fmt: skip
OPERATIONS = [
    _operation("matmul", F.matmul, torch.matmul, MATRICES[:1] + ((24, 5),), _copies((4, 16, 24), (24, 5)), is_unbiased=True),
    _operation("matmul, batches", F.matmul, torch.matmul, ((2, 3, 30), (2, 30, 4)), _copies((2, 3, 30), (2, 30, 4)), is_unbiased=True),
    _operation("mul", F.mul, torch.mul, ((6, 70), (6, 70)), _copies((6, 70), (6, 70)), is_unbiased=True),
    _operation("mul, broadcast", F.mul, torch.mul, ((3, 40, 30), (40, 30)), _copies((3, 40, 30), (40, 30)), is_unbiased=True),
    _operation(
        "einsum",
        lambda a, b, **ours: contractions.einsum("nij,nkj->nik", a, b, **ours),
        lambda a, b: torch.einsum("nij,nkj->nik", a, b),
        MATRICES, _copies(*MATRICES), is_unbiased=True,
    ),
    _operation(
        "einsum, one tensor",
        lambda a, **ours: contractions.einsum("nij,nkj->nik", a, a, **ours),
        lambda a: torch.einsum("nij,nkj->nik", a, a),
        MATRICES[:1], _copies(MATRICES[0], MATRICES[0]), is_unbiased=True,
    ),
    _operation(
        "baddbmm",
        lambda x, a, b, **ours: contractions.baddbmm(x, a, b.mT, beta=0.5, alpha=2, **ours),
        lambda x, a, b: torch.baddbmm(x, a, b.mT, beta=0.5, alpha=2),
        ((4, 16, 20), *MATRICES), _copies(*MATRICES), exact=(True, False, False), is_unbiased=True,
    ),
    _operation(
        "addcmul",
        partial(contractions.addcmul, value=0.5), partial(torch.addcmul, value=0.5),
        ((6, 70), (6, 70), (6, 70)), _copies((6, 70), (6, 70)), exact=(True, False, False), is_unbiased=True,
    ),
    _operation(
        "grouped_mm",  # one of the three groups is empty
        lambda a, b, **ours: contractions.grouped_mm(a, b, offs=OFFSETS, **ours),
        lambda a, b: torch_f.grouped_mm(a, b, offs=OFFSETS),
        ((60, 24), (3, 24, 32)), _copies((60, 24), (3, 24, 32), extra=12), is_unbiased=True,
    ),
    _operation("square", elementwise.square, torch.square, ((6, 70),), _copies((6, 70)), is_unbiased=True),
    _operation(
        "pow", lambda x, **ours: elementwise.pow(x, 2, **ours), lambda x: x**2, ((6, 70),), _copies((6, 70)),
        is_unbiased=True,
    ),
    _operation(
        "exp", lambda x, **ours: elementwise.exp(0.3 * x - 3, **ours), lambda x: (0.3 * x - 3).exp(), ((6, 70),),
        _copies((6, 70), kind="uniform"), is_unbiased=True,
    ),
    _operation(
        "erf", elementwise.erf, torch.erf, ((6, 70),), _copies((6, 70), kind="uniform"), is_unbiased=True,
    ),
    _operation(
        "clamp", lambda x: elementwise.clamp(x, -0.5, 1), lambda x: x.clamp(-0.5, 1), ((6, 70),),
        lambda bits, y: _signs(420), True,
    ),
    *(
        _operation(
            name, getattr(elementwise, name), getattr(torch, name), ((6, 70), (6, 70)), lambda bits, y: 2 * _signs(420), True,
        )
        for name in ("maximum", "minimum")
    ),
    _operation(
        "gather", lambda x, i: elementwise.gather(x, 1, i.long()), lambda x, i: x.gather(1, i.long()), ((6, 70),),
        lambda bits, y: 6 * 30, True, others=(indices(70, 6, 30),),
    ),
    _operation(
        "vector_norm", partial(vector_norm.vector_norm, dim=1), partial(torch.linalg.vector_norm, dim=1),
        ((6, 70),), _copies((6, 70)), is_unbiased=True,
    ),
    _operation(
        "norm", partial(vector_norm.norm, dim=1, keepdim=True), partial(torch.norm, dim=1, keepdim=True),
        ((6, 70),), _copies((6, 70)), is_unbiased=True,
    ),
    _operation(
        "normalize", partial(vector_norm.normalize, dim=1, eps=8.4), partial(torch_f.normalize, dim=1, eps=8.4),
        ((6, 70),), _copies((6, 70), extra=5 * 6),
    ),
]  # fmt: skip
PRE_ACTIVATION = Layer(
    "PreActivation",
    (),
    (3, 6, 7, 5),
    exact=(False,) * 5,
    saved=lambda bits, y: 4 * packed_words(3 * 6 * 7 * 5, bits) + 4 * 6,
    make=(_pre_activation, PreActivated),
)
OTHERS = [
    *ATTENTION,
    *LOSSES,
    *EMBEDDINGS,
    *RESIZED,
    *OPERATIONS,
    Layer("SyncBatchNorm", (5,), (4, 5, 6, 7), vectors=5, is_unbiased=True),
    PRE_ACTIVATION,
]
"""Rows that tests of `EVERY` do not use."""


def first_of_each(layers) -> list[Layer]:
    """Return the first layer of each class."""
    return list({layer.name: layer for layer in reversed(layers)}.values())


EVERY = [*LAYERS, *ROUNDED, *first_of_each(DROPOUTS), *first_of_each(POOLINGS)]
"""Layers of every class of fewbit.nn but embeddings, upsampling, attention and activations."""
ROWS = [*LAYERS, *ROUNDED, *DROPOUTS, *POOLINGS, *OTHERS]
"""All rows."""


def first(*names) -> list[Layer]:
    """Return the first layer of each class name."""
    return [next(layer for layer in EVERY if layer.name == name) for name in names]


class Case(NamedTuple):
    """A layer and inputs for it.

    Args:
        ours: a module of fewbit.
        theirs: torch's module, with equal parameters.
        inputs: the inputs of both.
        is_coded: whether the layer saves codes within the transforms of torch.func.
    """

    ours: nn.Module
    theirs: nn.Module
    inputs: list
    is_coded: bool = False


def _layer(layer, **options):
    return lambda: Case(*layer.pair(8, **options), layer.inputs())


def _function(ours, theirs, *shapes, coded=False, **inputs):
    """Return a maker of a case of two functions. A shape stands for random numbers; `inputs` are passed to both by name."""

    def make():
        numbers = [normal(shape, scale=1.0, seed=seed) for seed, shape in enumerate(shapes)]
        return Case(*(Called(partial(run, **inputs)) for run in (ours, theirs)), numbers, coded)

    return make


def _activation(sample):
    return _function(sample, sample.torch, (5, 9), coded=True)


def _self_attention(need_weights):
    def make():
        ours, theirs = (
            of.MultiheadAttention(16, 4, batch_first=True, **bits)
            for of, bits in ((fewbit.nn, {"bits": 8}), (nn, {}))
        )
        theirs.load_state_dict(ours.state_dict())

        def on_itself(module):
            wrapped = Called(lambda x: module(x, x, x, need_weights=need_weights)[0])
            wrapped.module = module
            return wrapped

        return Case(on_itself(ours), on_itself(theirs), [normal((2, 5, 16), scale=1.0)])

    return make


_NAMES = (
    "matmul", "mul", "square", "exp", "erf", "clamp", "maximum", "gather", "einsum", "baddbmm", "addcmul", "vector_norm",
    "normalize", "pad, reflect", "interpolate, area",
    *(f"scaled_dot_product_attention, {label}" for label in ("plain", "causal", "boolean mask", "dropout")),
)  # fmt: skip
_FUNCTIONS = [layer for layer in OTHERS if layer.name in _NAMES]
_UNLIKE = {}
for _row in EVERY:
    _UNLIKE.setdefault((_row.name, len(_row.shape), _row.format), _row)
_MODULES = list(_UNLIKE.values())
"""A layer of each class, number of dimensions and memory format."""
CASES = {
    **{layer.id: _layer(layer) for layer in (*_MODULES, *_FUNCTIONS, LOSSES[0], EMBEDDINGS[0], PRE_ACTIVATION)},
    **{f"{layer.id}, two copies": _layer(layer, copies=2) for layer in _MODULES if layer.is_norm},
    **{sample.id: _activation(sample) for sample in ACTIVATIONS if not sample.parameters},
    "RReLU in training": _function(
        partial(F.rrelu, training=True), partial(torch_f.rrelu, training=True), (5, 9)
    ),
    "unbiased GELU": _function(
        partial(F.gelu, table=fewbit.load_table("gelu", 2, objective="unbiased")),
        lambda x: torch_f.gelu(x) + 0 * torch.rand(1),  # torch's own refuse random numbers in vmap, too
        (5, 9),
        coded=True,
    ),
    "Pointwise": _function(
        partial(F.pointwise, function=torch.tanh, table=fewbit.load_table("tanh", 8)),
        torch.tanh,
        (5, 9),
        coded=True,
    ),
    "MultiheadAttention": _self_attention(False),
    "MultiheadAttention with weights": _self_attention(True),
}  # fmt: skip
"""{name: a maker of a Case}, of every layer, activation and operation."""


def one_of_each_class() -> list[str]:
    """Return the names of cases of every layer and operation, one for each class, and of two activations."""
    names = {name.split("(")[0]: name for name in reversed(CASES)}
    others = {sample.id for sample in ACTIVATIONS} - {GELU.id, RELU.id} | {"unbiased GELU"}
    return [name for name in names.values() if name not in others]


def ids(layers) -> dict:
    return {"argvalues": layers, "ids": [layer.id for layer in layers]}


def gradients(module, *inputs):
    """Return y and the gradients of the inputs and of each parameter, from a random gradient of y."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    y = first_result(module(*inputs))
    grad = output_gradient(y)
    wanted = [leaf for leaf in (*inputs, *module.parameters()) if leaf.requires_grad]
    return y, torch.autograd.grad(y, wanted, grad)


def _seeded_step(function, x):
    """Return the results, the gradient of x, a leaf with its own strides, and the generator's state after the forward."""
    x = x.detach().requires_grad_()
    torch.manual_seed(3)
    results = function(x)
    state = torch.cuda.get_rng_state() if x.is_cuda else torch.get_rng_state()
    results = results if isinstance(results, tuple) else (results,)
    grad = normal(results[0].shape, x.dtype, x.device, seed=6)
    return results, torch.autograd.grad(results[0], x, grad)[0], state


def check_equal(ours, theirs, x):
    """Check that two functions return the same to the bit, strides and gradient and state included, or refuse alike."""
    try:
        results, grad, state = _seeded_step(theirs, x)
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            _seeded_step(ours, x)
        return
    found, own_grad, own_state = _seeded_step(ours, x)
    for one, other in zip(found, results, strict=True):
        assert same(one, other) and one.stride() == other.stride()
    assert same_sums(own_grad, grad) and torch.equal(own_state, state)


def output_gradient(y):
    """Return the gradient of y that `gradients` uses, with the strides of y."""
    return torch.empty_like(y).copy_(normal(y.shape, y.dtype, y.device, 1.0, seed=7))


def first_result(results):
    """Return the result, without what some layers return besides it: indices or weights of attention."""
    return results[0] if isinstance(results, tuple) else results


def relative(ours, exact) -> float:
    """Return ||ours - exact|| / ||exact||, computed in float64."""
    ours, exact = ours.detach().double(), exact.detach().double()
    return float((ours - exact).norm() / exact.norm().clamp_min(1e-300))


def saved_by(function, *inputs):
    """Return y and the tensors that a forward saves, one for each storage that is no parameter's."""
    own = function.parameters() if isinstance(function, nn.Module) else ()
    saved, own = {}, {weight.untyped_storage().data_ptr() for weight in own}

    def pack(tensor):
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            saved[place] = tensor.detach()
        return tensor.detach()  # the tensor itself would hold the graph that holds it

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function(*inputs)
    return y, list(saved.values())


def bytes_by(function, *inputs) -> int:
    """Return the bytes of the storages of what a forward saves."""
    return sum(x.untyped_storage().nbytes() for x in saved_by(function, *inputs)[1])


def fresh(module):
    """Return a copy with gradients and buffers of its own."""
    return copy.deepcopy(module)
