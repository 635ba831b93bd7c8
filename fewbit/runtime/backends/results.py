"""The result of a backend's `forward_quantized`."""

from __future__ import annotations

from typing import NamedTuple

import torch


class QuantizedForward(NamedTuple):
    """The saved tensors of an activation's input x and of its result f(x).

    Attributes:
        codes: the packed codes of x, int32.
        packed, ranges: the copy of f(x) for the layer after the activation, see `reference.quantize`.
    """

    codes: torch.Tensor
    packed: torch.Tensor
    ranges: torch.Tensor
