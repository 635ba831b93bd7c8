"""Interpolation that keeps nothing but sizes."""

from __future__ import annotations

from torch import Tensor

from fewbit.functional.pooling import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
)
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.quantizers.quantizer import is_differentiated

__all__ = ["interpolate"]

_AREA = {3: adaptive_avg_pool1d, 4: adaptive_avg_pool2d, 5: adaptive_avg_pool3d}


def interpolate(
    input: Tensor,
    size=None,
    scale_factor=None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """torch.nn.functional.interpolate, and its gradient, to the bit.

    input: (N, C, L), (N, C, H, W) or (N, C, D, H, W). Keeps nothing. torch's own keeps nothing
    either, but for the mode "area", adaptive average pooling, where it keeps the input. What torch
    refuses, torch refuses.
    """
    arguments = size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
    area = mode == "area" and align_corners is None and not antialias
    one_of_them = (size is None) != (scale_factor is None)
    if not area or not one_of_them or input.dim() not in _AREA or not is_differentiated(input):
        return torch_functional.interpolate(input, *arguments)
    asked = scale_factor if size is None else size
    dims = input.dim() - 2
    if isinstance(asked, tuple | list):
        if len(asked) != dims:
            return torch_functional.interpolate(input, *arguments)
    else:
        asked = [asked] * dims
    if size is None:
        asked = [int(n * scale) for n, scale in zip(input.shape[2:], asked, strict=True)]
    elif recompute_scale_factor:
        return torch_functional.interpolate(input, *arguments)
    return _AREA[input.dim()](input, asked)
