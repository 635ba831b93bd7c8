"""The named results of a backend's functions that return several things."""

from __future__ import annotations

from typing import NamedTuple

import torch


class QuantizedGroups(NamedTuple):
    """The result of a backend's `quantize`.

    Attributes:
        packed: the packed codes of the elements, int32.
        ranges: (groups, 2) bfloat16, the two numbers of each group; (groups, 3) if minimums or means are float32. A
            rotated copy has two more rows, with its seed.
        spread: the smallest and the largest element in float32, as two numbers or 0-D tensors. None from the CUDA
            kernels, because the host would have to wait for these numbers.
    """

    packed: torch.Tensor
    ranges: torch.Tensor
    spread: tuple | None


class QuantizedForward(NamedTuple):
    """The result of a backend's `forward_quantized`.

    Attributes:
        codes: the packed codes of the activation's input x, int32, which the activation saves.
        result: f(x) quantized, which the layer after the activation saves.
    """

    codes: torch.Tensor
    result: QuantizedGroups
