"""Layers that keep a quantized input: one list for all tests of them, and how to compare two modules."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from samples import normal
from torch import nn

import fewbit.nn
from fewbit.runtime.format.groups import quantized_bytes


@dataclass(frozen=True)
class Layer:
    """A class name of torch.nn, its arguments, and the shape of an input.

    linear: whether backward is linear in what is kept, so that parameters' gradients are exact in expectation and
    the input's is exact. vectors: float32 numbers kept besides the quantized input. order: the input's dimensions
    as they lie in storage, from the outermost.
    """

    name: str
    arguments: tuple
    shape: tuple[int, ...]
    options: dict = field(default_factory=dict)
    linear: bool = True
    format: torch.memory_format | None = None
    kept_shape: tuple[int, ...] | None = None  # where it is not the input's
    vectors: int = 0
    order: tuple[int, ...] | None = None

    @property
    def id(self) -> str:
        last = " channels last" if self.format else ""
        return f"{self.name}{self.arguments}{self.options or ''}{last} {self.shape}"

    def pair(self, bits: int, device="cpu", dtype=torch.float32, **ours):
        """Our module and torch's, with the same parameters and buffers."""
        torch.manual_seed(0)
        theirs = getattr(nn, self.name)(*self.arguments, **self.options).to(device, dtype)
        with torch.no_grad():
            for number, parameter in enumerate(theirs.parameters()):
                parameter.copy_(normal(parameter.shape, dtype, device, 0.5, seed=number) + 0.2)
        module = getattr(fewbit.nn, self.name)(*self.arguments, **self.options, bits=bits, **ours)
        module = module.to(device, dtype)
        module.load_state_dict(theirs.state_dict())
        return module, theirs

    def input(self, device="cpu", dtype=torch.float32, offset=0.0):
        x = normal(self.shape, dtype, device, scale=1.0) + offset
        if self.order:
            back = [self.order.index(dim) for dim in range(len(self.order))]
            return x.permute(self.order).contiguous().permute(back)
        return x.contiguous(memory_format=self.format) if self.format else x

    def kept_bytes(self, bits: int, **options) -> int:
        """What the forward keeps for backward besides parameters, by the formula of docs/quantizer.md."""
        shape = self.kept_shape or self.shape
        return quantized_bytes(shape, bits, **options) + 4 * self.vectors


LAST = torch.channels_last
LAST_3D = torch.channels_last_3d
LINEAR = [
    Layer("Linear", (70, 9), (5, 70)),
    Layer("Linear", (300, 9), (2, 5, 300)),
    Layer("Linear", (40, 3), (40,)),
    Layer("Linear", (7, 3), (11, 7), {"bias": False}),
    Layer("Conv1d", (4, 6, 3), (3, 4, 30)),
    Layer("Conv1d", (4, 6, 3), (4, 30), kept_shape=(1, 4, 30)),
    Layer("Conv2d", (4, 6, 3), (2, 4, 9, 10), {"stride": 2, "padding": 1}),
    Layer("Conv2d", (4, 6, 3), (2, 4, 9, 10), format=LAST),
    Layer(
        "Conv2d", (4, 8, (2, 3)), (2, 4, 9, 10), {"dilation": (2, 1), "groups": 2, "bias": False}
    ),
    Layer("Conv2d", (4, 4, (2, 4)), (2, 4, 9, 10), {"padding": "same"}, kept_shape=(2, 4, 10, 11)),
    Layer("Conv2d", (4, 4, 3), (2, 4, 9, 10), {"padding": "same"}),
    Layer(
        "Conv2d",
        (4, 4, 3),
        (2, 4, 9, 10),
        {"padding": 1, "padding_mode": "circular"},
        kept_shape=(2, 4, 11, 12),
    ),
    Layer(
        "Conv2d",
        (4, 4, 3),
        (2, 4, 9, 10),
        {"padding": 2, "padding_mode": "reflect"},
        kept_shape=(2, 4, 13, 14),
    ),
    Layer("Conv3d", (2, 4, 2), (2, 2, 4, 5, 6)),
    Layer("ConvTranspose1d", (4, 6, 3), (3, 4, 20), {"stride": 2}),
    Layer("ConvTranspose2d", (4, 6, 3), (4, 7, 8), kept_shape=(1, 4, 7, 8)),
    Layer(
        "ConvTranspose2d",
        (4, 6, 3),
        (2, 4, 7, 8),
        {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2, "dilation": 2},
    ),
    Layer("ConvTranspose3d", (2, 4, 2), (2, 2, 4, 5, 6)),
    Layer("Conv1d", (4, 6, 4), (2, 4, 20), {"padding": "same"}, kept_shape=(2, 4, 21)),
    Layer(
        "Conv1d",
        (4, 6, 3),
        (2, 4, 20),
        {"padding": "same", "padding_mode": "reflect", "dilation": 2},
        kept_shape=(2, 4, 24),
    ),
    Layer(
        "Conv3d",
        (2, 4, (2, 3, 1)),
        (2, 2, 4, 5, 6),
        {"padding": "same", "padding_mode": "circular"},
        kept_shape=(2, 2, 5, 7, 6),
    ),
    Layer(
        "Conv3d",
        (2, 4, 3),
        (2, 2, 4, 5, 6),
        {"padding": (1, 2, 1), "padding_mode": "replicate", "stride": 2},
        format=LAST_3D,
        kept_shape=(2, 2, 6, 9, 8),
    ),
    Layer("ConvTranspose1d", (4, 6, 3), (3, 4, 20), {"stride": 3, "output_padding": 2}),
    Layer(
        "ConvTranspose3d",
        (2, 4, 2),
        (2, 2, 3, 4, 5),
        {"stride": 2, "padding": 1, "output_padding": (1, 0, 1)},
    ),
]
NORMS = [
    Layer("LayerNorm", (96,), (5, 96), linear=False, vectors=5),
    Layer("LayerNorm", ((6, 16),), (3, 2, 6, 16), linear=False, vectors=6),
    Layer("LayerNorm", (96,), (5, 96), {"elementwise_affine": False}, linear=False, vectors=5),
    Layer("LayerNorm", (96,), (5, 96), {"bias": False}, linear=False, vectors=5),
    Layer("RMSNorm", (96,), (5, 7, 96), linear=False, vectors=35),
    Layer("RMSNorm", ((6, 16),), (3, 6, 16), {"eps": 1e-3}, linear=False, vectors=3),
    Layer("GroupNorm", (4, 8), (3, 8, 5, 6), linear=False, vectors=12),
    Layer("GroupNorm", (4, 8), (3, 8, 5, 6), linear=False, vectors=12, format=LAST),
    Layer("GroupNorm", (1, 4), (1, 4, 8, 8), linear=False, vectors=1),
    Layer("GroupNorm", (2, 4), (2, 4, 3, 4, 5), linear=False, vectors=4, format=LAST_3D),
    Layer("GroupNorm", (2, 6), (5, 6, 40), {"affine": False}, linear=False, vectors=10),
    Layer("BatchNorm1d", (70,), (9, 70), linear=False, vectors=70),
    Layer("BatchNorm1d", (7,), (5, 7, 20), {"momentum": None}, linear=False, vectors=7),
    Layer("BatchNorm2d", (5,), (4, 5, 6, 7), linear=False, vectors=5),
    Layer("BatchNorm2d", (5,), (4, 5, 6, 7), linear=False, vectors=5, format=LAST),
    Layer(
        "BatchNorm2d", (5,), (4, 5, 6, 7), {"track_running_stats": False}, linear=False, vectors=5
    ),
    Layer("BatchNorm2d", (5,), (4, 5, 6, 7), {"affine": False}, linear=False, vectors=5),
    Layer("BatchNorm3d", (3,), (2, 3, 4, 5, 6), linear=False, vectors=3),
    Layer("BatchNorm3d", (3,), (2, 3, 4, 5, 6), linear=False, vectors=3, format=LAST_3D),
    Layer("InstanceNorm1d", (3,), (4, 3, 40), linear=False, vectors=12),
    Layer("InstanceNorm1d", (3,), (3, 40), linear=False, kept_shape=(1, 3, 40), vectors=3),
    Layer(
        "InstanceNorm2d",
        (3,),
        (4, 3, 6, 7),
        {"affine": True, "track_running_stats": True},
        linear=False,
        vectors=2 * 12,  # the weight too, once a sample
    ),
    Layer("InstanceNorm3d", (3,), (2, 3, 4, 3, 5), {"affine": True}, linear=False, vectors=2 * 6),
]
LAYERS = LINEAR + NORMS


def first(*names) -> list[Layer]:
    """The first layer of each class."""
    return [next(layer for layer in LAYERS if layer.name == name) for name in names]


def ids(layers) -> dict:
    return {"argvalues": layers, "ids": [layer.id for layer in layers]}


def gradients(module, x, seed=7):
    """(y, [gradient of the input, of each parameter]) with a random gradient of the output."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = module(x)
    grad = torch.empty_like(y).copy_(normal(y.shape, y.dtype, y.device, 1.0, seed))
    wanted = [x, *(each for each in module.parameters() if each.requires_grad)]
    return y, torch.autograd.grad(y, wanted, grad)


def relative(ours, exact) -> float:
    """||ours - exact|| / ||exact|| in float64."""
    ours, exact = ours.double(), exact.double()
    return float((ours - exact).norm() / exact.norm().clamp_min(1e-300))


def saved_by(module, x):
    """The tensors that a forward keeps for backward, each storage once, but for the parameters'."""
    saved, own = {}, {each.untyped_storage().data_ptr() for each in module.parameters()}

    def pack(tensor):
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            saved[place] = tensor.detach()
        return tensor.detach()  # the tensor itself would hold its own graph

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)
    return y, list(saved.values())


def fresh(module):
    """A copy with its gradients and buffers its own."""
    return copy.deepcopy(module)
