"""Padding and interpolation, which save sizes but no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fewbit.functional import pooling
from fewbit.runtime.format import layout
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.interop.tensor_kinds import check_tensors, is_eager
from fewbit.runtime.quantizers import computed
from fewbit.runtime.saved.saving_function import SavingFunction, is_differentiated
from fewbit.runtime.saved.sharing import place_of

__all__ = ["interpolate", "pad"]

_BACKWARD = {
    (mode, dims): getattr(torch.ops.aten, f"{name}_pad{dims}d_backward")
    for mode, name in {"reflect": "reflection", "replicate": "replication"}.items()
    for dims in (1, 2, 3)
}


def pad(
    input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    """Compute torch.nn.functional.pad and save no tensor; torch saves the whole input in the modes "reflect" and "replicate"."""
    if not is_differentiated(input):
        return torch_functional.pad(input, pad, mode, value)
    if (mode, len(pad) // 2) in _BACKWARD:
        y = _Pad.apply(input, tuple(pad), mode)
    else:
        y = torch_functional.pad(input, pad, mode, value)
    if is_eager(input):
        # Layers that would save y compute it from a copy of the input.
        found = computed.copies_of(input)
        if found is not None:
            found.share(y, place_of(y), partial(_padded, tuple(pad), mode, value))
    return y


def _padded(pad, mode, value, x):
    return torch_functional.pad(x, pad, mode, value)


class _Pad(SavingFunction):
    @staticmethod
    def forward(ctx, x, pad, mode):
        ctx.place, ctx.arguments = (x.shape, layout.dense_stride(x)), (pad, mode)
        return torch_functional.pad(x, pad, mode)

    @staticmethod
    def backward(ctx, grad):
        pad, mode = ctx.arguments
        # The op reads only the shape and the memory format of the input.
        like_input = torch.empty_strided(*ctx.place, dtype=grad.dtype, device=grad.device)
        return _BACKWARD[mode, len(pad) // 2](grad, like_input, pad), None, None


def interpolate(
    input: Tensor,
    size: int | tuple[int, ...] | None = None,
    scale_factor: float | tuple[float, ...] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Compute torch.nn.functional.interpolate of (N, C, L), (N, C, H, W) or (N, C, D, H, W) and save no tensor.

    In the mode "area", torch saves the whole input.
    """
    arguments = size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
    check_tensors(input)
    dims = input.dim() - 2
    requested = scale_factor if size is None else size
    if not isinstance(requested, tuple | list):
        requested = [requested] * dims
    # torch itself reports calls that it does not allow.
    allowed = (
        (size is None) != (scale_factor is None)
        and align_corners is None
        and not antialias
        and not (recompute_scale_factor and size is not None)
        and len(requested) == dims
    )
    served = mode == "area" and dims in (1, 2, 3) and is_differentiated(input)
    if not served or not allowed:
        return torch_functional.interpolate(input, *arguments)
    if size is None:
        pairs = zip(input.shape[2:], requested, strict=True)
        requested = [int(length * scale) for length, scale in pairs]
    return getattr(pooling, f"adaptive_avg_pool{dims}d")(input, requested)
