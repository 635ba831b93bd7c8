"""Modules with torch.nn's signatures that keep a few bits for the backward pass."""

from fewbit.nn.activations import *  # noqa: F403
from fewbit.nn.activations import __all__  # noqa: F401
