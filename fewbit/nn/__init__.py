"""Modules with torch.nn's arguments, and those of the functions that they compute, that save fewer bytes for the backward pass.

In training mode they call `fewbit.functional`, in evaluation mode torch's own functions.
"""

from torch import nn

from fewbit.nn.activations import *  # noqa: F403
from fewbit.nn.attention import *  # noqa: F403
from fewbit.nn.convolution import *  # noqa: F403
from fewbit.nn.dropout import *  # noqa: F403
from fewbit.nn.embedding import *  # noqa: F403
from fewbit.nn.gated import *  # noqa: F403
from fewbit.nn.linear import *  # noqa: F403
from fewbit.nn.losses import *  # noqa: F403
from fewbit.nn.normalization import *  # noqa: F403
from fewbit.nn.pooling import *  # noqa: F403
from fewbit.nn.preactivation import *  # noqa: F403
from fewbit.nn.prelu import *  # noqa: F403
from fewbit.nn.softmax import *  # noqa: F403

__all__ = [
    name
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, nn.Module)
]
