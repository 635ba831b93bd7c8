"""Activation modules by name."""

from __future__ import annotations

from functools import partial

from torch import nn

# In place, as in torchvision, so that the input is not saved beside the output.
relu = partial(nn.ReLU, inplace=True)
silu = nn.SiLU

FACTORIES = {
    "relu": relu,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "silu": silu,
    "selu": nn.SELU,
    "elu": nn.ELU,
    "mish": nn.Mish,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "hardswish": nn.Hardswish,
    "leaky_relu": nn.LeakyReLU,
}
_OTHERS = (nn.MultiheadAttention, nn.Softmax, nn.Softmin, nn.Softmax2d, nn.LogSoftmax)


def is_activation(module: nn.Module) -> bool:
    """Return whether a module is an elementwise nonlinearity of torch or transformers."""
    homes = ("torch.nn.modules.activation", "transformers.activations")
    return type(module).__module__ in homes and not isinstance(module, _OTHERS)
