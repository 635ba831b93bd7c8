"""Functions with torch.nn.functional's signatures that keep a few bits for the backward pass."""

from fewbit.functional.activations import *  # noqa: F403
from fewbit.functional.activations import __all__  # noqa: F401
