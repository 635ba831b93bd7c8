"""The named results of a backend's functions that return several things."""

from __future__ import annotations

from typing import NamedTuple

import torch


class QuantizedGroups(NamedTuple):
    """The result of `quantize`.

    Attributes:
        packed: the packed codes, int32.
        ranges: (groups, 2) bfloat16, the minimum and the range of each group; (groups, 3) if minimums are float32.
        spread: the smallest and the largest element in float32, as two numbers or 0-D tensors. None from the CUDA
            kernels, because the host would have to wait for these numbers.
    """

    packed: torch.Tensor
    ranges: torch.Tensor
    spread: tuple | None


class QuantizedForward(NamedTuple):
    """The result of `forward_quantized`.

    Attributes:
        codes: the packed codes of x, which the activation saves.
        result: f(x) quantized, which the layer after the activation saves.
    """

    codes: torch.Tensor
    result: QuantizedGroups
