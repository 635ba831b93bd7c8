"""Dropout, whose mask is saved in 1 bit for each element, `4 * ceil(n / 32)` bytes for n elements.

From the same state of torch's random generator, each function computes torch's result, leaves the generator in torch's
state, and has torch's gradients to the bit; in compiled code the compiler decides how numbers are drawn. If p is 0 or
1, torch's own function runs. `input` is floating, of any strides; the other arguments are torch's.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fewbit.runtime.format import layout
from fewbit.runtime.format.encoding import Encoding, mask_text
from fewbit.runtime.format.tensor_checks import FLOATING
from fewbit.runtime.interop.compiler_tracing import constant
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.interop.tensor_kinds import check_tensors, is_abstract, is_plain
from fewbit.runtime.ops import activation_ops, dense_ops, traced_copies
from fewbit.runtime.quantizers import computed
from fewbit.runtime.saved import offload
from fewbit.runtime.saved.saving_function import SavingFunction, is_differentiated, may_overwrite
from fewbit.runtime.saved.sharing import place_of

__all__ = [
    "alpha_dropout",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
]

_ALPHA = 1.7580993408473766
"""Minus the limit of selu at -inf, as in torch."""
_FUSED = ("cuda", "xpu")
"""Types of devices on which torch draws and applies the mask in one kernel."""


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Compute torch.nn.functional.dropout and save 1 bit per element."""
    return _dropout(torch_functional.dropout, input, p, training, inplace)


def dropout1d(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Compute torch.nn.functional.dropout1d of (N, C, L) or (C, L) and save 1 bit per channel."""
    check_tensors(input)
    features = input.dim() - 1 if input.dim() in (2, 3) else 0
    return _dropout(torch_functional.dropout1d, input, p, training, inplace, features)


def dropout2d(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Compute torch.nn.functional.dropout2d of (N, C, H, W) and save 1 bit per channel.

    For inputs of other shapes torch's own function runs, which warns.
    """
    check_tensors(input)
    features = 2 if input.dim() == 4 else 0
    return _dropout(torch_functional.dropout2d, input, p, training, inplace, features)


def dropout3d(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Compute torch.nn.functional.dropout3d of (N, C, D, H, W) or (C, D, H, W) and save 1 bit per channel."""
    check_tensors(input)
    features = input.dim() - 3 if input.dim() in (4, 5) else 0
    return _dropout(torch_functional.dropout3d, input, p, training, inplace, features)


def alpha_dropout(
    input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """Compute torch.nn.functional.alpha_dropout and save 1 bit per element."""
    return _dropout(torch_functional.alpha_dropout, input, p, training, inplace, kind="alpha")


def feature_alpha_dropout(
    input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """Compute torch.nn.functional.feature_alpha_dropout of (N, C, ...) and save 1 bit per channel."""
    check_tensors(input)
    features = 2 if input.dim() >= 2 else 0
    function = torch_functional.feature_alpha_dropout
    return _dropout(function, input, p, training, inplace, features, kind="alpha")


def _dropout(torchs_own, x, p, training, inplace, features=None, kind="plain") -> Tensor:
    if features == 0 or not _needs_mask(x, p, training, inplace):
        return torchs_own(x, p, training, inplace)
    if torch.compiler.is_compiling():
        # The saved encoding depends on p, so a symbolic p becomes a constant.
        p = torch.fx.experimental.symbolic_shapes.guard_scalar(p)
        y = _Dropout.apply(x, float(p), kind, features, False)
        return x.copy_(y) if inplace else y
    return _Dropout.apply(x, float(p), kind, features, inplace)


def _needs_mask(x, p, training, inplace) -> bool:
    if not training or not 0 < p < 1 or not is_differentiated(x):
        return False
    if x.dtype not in FLOATING or x.layout is not torch.strided or not x.numel():
        return False
    return not inplace or may_overwrite(x)


class _Dropout(SavingFunction):
    @staticmethod
    def forward(ctx, x, p, kind, features, inplace):
        plain = is_plain(x)
        is_simple = kind == "plain" and features is None
        found = computed.copies_of(x) if is_simple and (plain or is_abstract(x)) else None
        if is_simple and plain and not inplace and x.device.type in _FUSED:
            y, mask = torch.native_dropout(x, p, True)
            ctx.encoding = mask_text(1.0 / (1.0 - p))
            packed = dense_ops.pack_op(layout.storage_order(mask.view(torch.uint8)), 1)
        else:
            y, mask, packed = _drawn(x, p, kind, features, inplace, plain)
            ctx.encoding = mask_text(_factor(p, kind, x.dtype))
        if inplace:
            ctx.mark_dirty(x)
        ctx.stride = tuple(mask.stride())
        ctx.shape = None if features is None else tuple(mask.shape)
        if plain:
            offload.mark(packed)
        if found is not None:
            masked = partial(_masked, ctx.encoding, ctx.stride)
            found.share(y, place_of(y, int(inplace)), masked, packed)
        ctx.save_for_backward(packed)
        return y

    @staticmethod
    def backward(ctx, grad):
        (packed,) = ctx.saved_tensors
        if ctx.shape is None:
            grad = _masked(ctx.encoding, ctx.stride, grad, packed)
        else:
            ones = torch.ones(ctx.shape, dtype=grad.dtype, device=grad.device)
            grad = grad * _masked(ctx.encoding, ctx.stride, ones, packed)
        return grad, None, None, None, None


def _drawn(x, p, kind, features, inplace, plain):
    if features is None:
        noise = torch.empty_like(x)
    else:
        noise = x.new_empty((*x.shape[:features], *[1] * (x.dim() - features)))
    noise.bernoulli_(1 - p)
    one = None
    if plain:
        packed = activation_ops.encode(noise, Encoding.parse(mask_text(1.0)), None)
    else:
        packed, one = traced_copies.encode_kept_op(noise, mask_text(1.0), noise.stride())
        one = None if is_abstract(x) else one
    shift = None
    if kind == "alpha":
        a = _slope(p)
        shift = noise.add(-1).mul_(_ALPHA * a).add_(_ALPHA * a * p)
        noise.mul_(a)
    else:
        noise.div_(1 - p)
    y = x.mul_(noise) if inplace else x * noise
    if shift is not None:
        y.add_(shift)
    return y if one is None else traced_copies.tie(y, one), noise, packed


def _masked(encoding, stride, x, packed):
    if is_plain(x):
        return activation_ops.decode_mul(x, packed, Encoding.parse(encoding), stride)
    return activation_ops.decode_mul_op(x, packed, encoding, stride)


def _slope(p: float) -> float:
    return 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))


@constant
def _factor(p: float, kind: str, dtype: torch.dtype) -> float:
    """Return the factor of elements that are not dropped, rounded as torch rounds it."""
    return _rounded_factor(p, kind, dtype)


@lru_cache(maxsize=1024)
def _rounded_factor(p, kind, dtype):
    # In a mode for fake tensors, the number would have no value.
    with _disable_current_modes():
        one = torch.ones((), dtype=dtype)
        return (one.mul_(_slope(p)) if kind == "alpha" else one.div_(1 - p)).item()
