"""Functions with torch.nn.functional's signatures that save a few bits for the backward pass.

Each file has the functions of one kind of layer and their autograd Functions. This folder may import `fewbit.runtime`. It
defines no modules; `fewbit.nn` does.
"""

# By name and after its module each, as some functions are called like the module that they come from.
from fewbit.functional import activations
from fewbit.functional.activations import *  # noqa: F403
from fewbit.functional.attention import scaled_dot_product_attention
from fewbit.functional.bilinear import bilinear
from fewbit.functional.convolution import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from fewbit.functional.dropout import (
    alpha_dropout,
    dropout,
    dropout1d,
    dropout2d,
    dropout3d,
    feature_alpha_dropout,
)
from fewbit.functional.embedding import embedding
from fewbit.functional.gated import geglu, reglu, swiglu
from fewbit.functional.interpolation import interpolate
from fewbit.functional.linear import linear
from fewbit.functional.normalization import (
    batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
    rms_norm,
)
from fewbit.functional.padding import pad
from fewbit.functional.pooling import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    adaptive_max_pool1d,
    adaptive_max_pool2d,
    adaptive_max_pool3d,
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    max_pool1d,
    max_pool2d,
    max_pool3d,
)
from fewbit.functional.prelu import prelu
from fewbit.functional.products import matmul, mul
from fewbit.functional.softmax import log_softmax, softmax

__all__ = [
    *activations.__all__,
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "alpha_dropout",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "batch_norm",
    "bilinear",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "embedding",
    "feature_alpha_dropout",
    "geglu",
    "group_norm",
    "instance_norm",
    "interpolate",
    "layer_norm",
    "linear",
    "log_softmax",
    "matmul",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "mul",
    "pad",
    "prelu",
    "reglu",
    "rms_norm",
    "scaled_dot_product_attention",
    "softmax",
    "swiglu",
]
