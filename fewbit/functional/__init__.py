"""Functions with torch.nn.functional's signatures that keep a few bits for the backward pass."""

# By name and after its module each, as some functions are called like the module that they come from.
from fewbit.functional import activations
from fewbit.functional.activations import *  # noqa: F403
from fewbit.functional.convolution import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from fewbit.functional.linear import linear
from fewbit.functional.normalization import (
    batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
    rms_norm,
)
from fewbit.functional.padding import pad
from fewbit.functional.products import matmul, mul

__all__ = [
    *activations.__all__,
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "batch_norm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "linear",
    "matmul",
    "mul",
    "pad",
    "rms_norm",
]
