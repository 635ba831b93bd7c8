"""Modules with torch.nn's signatures that keep a few bits for the backward pass."""

from fewbit.nn import activations, convolution, linear, normalization
from fewbit.nn.activations import *  # noqa: F403
from fewbit.nn.convolution import *  # noqa: F403
from fewbit.nn.linear import *  # noqa: F403
from fewbit.nn.normalization import *  # noqa: F403

__all__ = [
    *activations.__all__,
    *convolution.__all__,
    *linear.__all__,
    *normalization.__all__,
]
