"""Entries "layer": every layer of fewbit.nn by itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch

from recorded import api

SEED = 11
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Layer:
    """A layer and the shapes of its inputs.

    Attributes:
        name: of a class of fewbit.nn.
        arguments: positional arguments of the class; torch modules are made by calling them.
        shape: of the input.
        options: keyword arguments of the class.
        inputs: how many inputs of that shape.
        tokens: the number of words if the input is made of token numbers.
        last: whether the input has its channels last in memory.
    """

    name: str
    arguments: tuple = ()
    shape: tuple = (6, 40)
    options: dict = field(default_factory=dict)
    inputs: int = 1
    tokens: int = 0
    last: bool = False

    @property
    def key(self) -> str:
        """The name of the layer with what tells it from others of its class."""
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        arguments = "()" if any(map(callable, self.arguments)) else str(self.arguments)
        last = ", channels last" if self.last else ""
        return f"{self.name}{arguments}{options}{last} {self.shape}"


IMAGE = (3, 4, 9, 10)
VOLUME = (2, 4, 4, 5, 6)
SIGNAL = (3, 4, 30)
QUANTIZED = [
    Layer("Linear", (70, 9), (5, 70)),
    Layer("Linear", (300, 9), (2, 5, 300), {"bias": False}),
    Layer("Bilinear", (40, 40, 7), inputs=2),
    Layer("Conv1d", (4, 6, 3), SIGNAL, {"padding": "same", "padding_mode": "reflect"}),
    Layer("Conv2d", (4, 6, 3), IMAGE, {"stride": 2, "padding": 1}),
    Layer("Conv2d", (4, 8, (2, 3)), IMAGE, {"dilation": (2, 1), "groups": 2, "bias": False}),
    Layer("Conv2d", (4, 4, (2, 4)), IMAGE, {"padding": "same"}),
    Layer("Conv3d", (4, 4, 2), VOLUME),
    Layer("ConvTranspose1d", (4, 6, 3), SIGNAL, {"stride": 2, "output_padding": 1}),
    Layer("ConvTranspose2d", (4, 6, 3), IMAGE, {"stride": 2, "padding": 1, "groups": 2}),
    Layer("ConvTranspose3d", (4, 4, 2), VOLUME),
    Layer("LayerNorm", (40,)),
    Layer("LayerNorm", ((9, 10),), IMAGE, {"copies": 2}),
    Layer("RMSNorm", (40,)),
    Layer("RMSNorm", (40,), (6, 40), {"copies": 2, "eps": 1e-3}),
    Layer("GroupNorm", (2, 4), IMAGE),
    Layer("GroupNorm", (2, 4), IMAGE, {"copies": 2}),
    Layer("BatchNorm1d", (40,)),
    Layer("BatchNorm1d", (4,), SIGNAL, {"momentum": None}),
    Layer("BatchNorm2d", (4,), IMAGE),
    Layer("BatchNorm2d", (4,), IMAGE, {"copies": 2, "track_running_stats": False}),
    Layer("BatchNorm3d", (4,), VOLUME),
    Layer("SyncBatchNorm", (4,), IMAGE),
    Layer("InstanceNorm1d", (4,), SIGNAL),
    Layer("InstanceNorm2d", (4,), IMAGE, {"affine": True, "track_running_stats": True}),
    Layer("InstanceNorm3d", (4,), VOLUME, {"copies": 2, "affine": True}),
    Layer("PReLU", (4,), IMAGE),
    Layer("Softmax", (-1,)),
    Layer("LogSoftmax", (1,), IMAGE),
    Layer("SwiGLU", inputs=2),
    Layer("GEGLU", ("tanh",), inputs=2),
    Layer("ReGLU", inputs=2),
    Layer("GLU", (1,), IMAGE),
    Layer("MultiheadAttention", (40, 4), (5, 3, 40), inputs=3),
    Layer("MultiheadAttention", (40, 4), (5, 3, 40), {"batch_first": True, "dropout": 0.1}, 3),
]
EXACT = [
    Layer("Dropout", (0.3,)),
    Layer("AlphaDropout", (0.3,)),
    Layer("FeatureAlphaDropout", (0.3,), IMAGE),
    Layer("Dropout1d", (0.3,), SIGNAL),
    Layer("Dropout2d", (0.3,), IMAGE),
    Layer("Dropout3d", (0.3,), VOLUME),
    Layer("MaxPool1d", (3,), SIGNAL),
    Layer("MaxPool2d", (3,), IMAGE, {"stride": 2, "padding": 1, "ceil_mode": True}),
    Layer("MaxPool2d", (2,), IMAGE, {"return_indices": True}),
    Layer("MaxPool3d", (2,), VOLUME),
    Layer("AvgPool1d", (3,), SIGNAL),
    Layer("AvgPool2d", (3,), IMAGE, {"stride": 2, "count_include_pad": False, "padding": 1}),
    Layer("AvgPool3d", (2,), VOLUME),
    Layer("AdaptiveMaxPool1d", (7,), SIGNAL),
    Layer("AdaptiveMaxPool2d", ((3, 4),), IMAGE),
    Layer("AdaptiveMaxPool3d", (2,), VOLUME),
    Layer("AdaptiveAvgPool1d", (7,), SIGNAL),
    Layer("AdaptiveAvgPool2d", ((3, 4),), IMAGE),
    Layer("AdaptiveAvgPool3d", (2,), VOLUME),
    Layer("Upsample", (), IMAGE, {"scale_factor": 2, "mode": "bilinear"}),
    Layer("UpsamplingNearest2d", ((12, 13),), IMAGE),
    Layer("UpsamplingBilinear2d", ((12, 13),), IMAGE),
    Layer("Embedding", (50, 8), (4, 9), tokens=50),
    Layer("Embedding", (300, 8), (4, 9), {"padding_idx": 3}, tokens=300),
]
ACTIVATIONS = [
    *(
        Layer(name)
        for name in (
            "CELU ClippedGELU ELU FastGELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Laplace LeakyReLU LogSigmoid "
            "Mish QuickGELU RReLU ReLU ReLU6 ReLUSquared SELU SiLU Sigmoid Softplus Softshrink Softsign SqrtSoftplus "
            "Tanh Tanhshrink"
        ).split()
    ),
    Layer("GELU", ("tanh",)),
    Layer("ELU", (), (6, 40), {"inplace": True}),
    Layer("ReLU", (), (6, 40), {"inplace": True}),
    Layer("LeakyReLU", (0.2,)),
    Layer("Threshold", (0.1, 20.0)),
    Layer("Hardtanh", (-0.3, 2.0)),
    Layer("Pointwise", (torch.atan,)),
    Layer("Pointwise", (torch.atan,), (6, 40), {"bits": 2}),
]
BLOCKS = {
    "batch norm, ReLU, convolution": (
        (partial(torch.nn.BatchNorm2d, 4), partial(torch.nn.Conv2d, 4, 6, 3)),
        IMAGE,
    ),
    "layer norm, LeakyReLU, linear": (
        (
            partial(torch.nn.LayerNorm, 40),
            partial(torch.nn.Linear, 40, 7),
            partial(torch.nn.LeakyReLU, 0.1),
        ),
        (6, 40),
    ),
    "batch norm, identity, linear": (
        (
            partial(torch.nn.BatchNorm1d, 40),
            partial(torch.nn.Linear, 40, 7),
            partial(torch.nn.Identity),
        ),
        (6, 40),
    ),
}


def entries():
    """Yield (key, function that returns the answers) for every layer, bits, dtype and layout."""
    yield "layers", lambda: {"names": " ".join(api.layer_names())}
    for layer in QUANTIZED:
        yield from _in_bits(layer, (1, 2, 4, 8))
    for layer in ACTIVATIONS:
        yield from _in_bits(layer, () if "bits" in layer.options else (1, 3, 8))
    for layer in EXACT:
        yield from _in_bits(layer, ())
    for name, (parts, shape) in BLOCKS.items():
        for bits in (1, 2, 4, 8):
            layer = Layer("PreActivation", parts, shape, {"bits": bits})
            yield f"layer/PreActivation {name}/{bits} bits", partial(_run, layer)


def _in_bits(layer, several):
    key = f"layer/{layer.key}"
    for bits in several:
        given = replace(layer, options={**layer.options, "bits": bits})
        yield f"{key}/{bits} bits", partial(_run, given)
    for name, dtype in DTYPES.items():
        yield f"{key}/{name}", partial(_run, layer, dtype)
    yield f"{key}/batch of 0", partial(_run, replace(layer, shape=(0, *layer.shape[1:])))
    yield f"{key}/evaluation", partial(_run, layer, is_training=False)
    yield f"{key}/offset", partial(_run, layer, offset=1000.0)
    if len(layer.shape) in (4, 5):
        yield f"{key}/channels last", partial(_run, replace(layer, last=True))


def _run(layer, dtype=torch.float32, is_training=True, offset=0.0) -> dict:
    """Run a layer forward and backward; return values, gradients and bytes."""
    torch.manual_seed(SEED)
    arguments = [
        argument() if isinstance(argument, partial) else argument for argument in layer.arguments
    ]
    module = api.layer(layer.name, *arguments, **layer.options)
    module = module.to(dtype).train(is_training)
    inputs = [_input(layer, dtype, offset) for _ in range(layer.inputs)]
    # An operation before the layer, so that an in-place layer gets no leaf.
    y = module(*(x * 1 for x in inputs))
    parts = y if isinstance(y, tuple) else (y,)
    found = {f"value {i}": part for i, part in enumerate(parts)}
    y = parts[0]
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=torch.float64).to(dtype).view(y.shape))
    for i, x in enumerate(inputs):
        found[f"gradient of input {i}"] = x.grad
    for name, parameter in module.named_parameters():
        found[f"gradient of {name}"] = parameter.grad
    for name, buffer in module.named_buffers():
        found[f"buffer {name}"] = buffer
    found["next draw"] = torch.rand(1)
    found["bytes"] = api.saved(module, *(x.detach() * 1 for x in inputs))["total"]
    return found


def _input(layer, dtype, offset):
    if layer.tokens:
        return torch.randint(layer.tokens, layer.shape)
    x = torch.randn(layer.shape, dtype=torch.float64).mul(2).add(offset).to(dtype)
    if layer.last:
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        x = x.contiguous(memory_format=last)
    return x.requires_grad_()
