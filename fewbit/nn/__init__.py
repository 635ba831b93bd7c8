"""Modules with torch.nn's signatures that save a few bits for the backward pass.

In training they call `fewbit.functional`, in eval mode torch's own functions. This folder may import `fewbit.functional`
and `fewbit.runtime`. It does not know how models are converted.
"""

from fewbit.nn import (
    activations,
    attention,
    bilinear,
    convolution,
    dropout,
    gated,
    linear,
    normalization,
    pooling,
    preactivation,
    prelu,
    softmax,
    upsampling,
)
from fewbit.nn import embedding as sparse
from fewbit.nn.activations import *  # noqa: F403
from fewbit.nn.attention import *  # noqa: F403
from fewbit.nn.bilinear import *  # noqa: F403
from fewbit.nn.convolution import *  # noqa: F403
from fewbit.nn.dropout import *  # noqa: F403
from fewbit.nn.embedding import *  # noqa: F403
from fewbit.nn.gated import *  # noqa: F403
from fewbit.nn.linear import *  # noqa: F403
from fewbit.nn.normalization import *  # noqa: F403
from fewbit.nn.pooling import *  # noqa: F403
from fewbit.nn.preactivation import *  # noqa: F403
from fewbit.nn.prelu import *  # noqa: F403
from fewbit.nn.softmax import *  # noqa: F403
from fewbit.nn.upsampling import *  # noqa: F403

__all__ = [
    *activations.__all__,
    *attention.__all__,
    *bilinear.__all__,
    *convolution.__all__,
    *dropout.__all__,
    *gated.__all__,
    *linear.__all__,
    *normalization.__all__,
    *pooling.__all__,
    *preactivation.__all__,
    *prelu.__all__,
    *softmax.__all__,
    *sparse.__all__,
    *upsampling.__all__,
]
