"""Convolutions, plain and transposed, with quantized inputs kept for the weight's gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from fewbit.config import GROUP_SIZE
from fewbit.functional import sums
from fewbit.runtime.interop.autocast import as_torch_casts
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.quantizers.quantizer import (
    DEFAULT_BITS,
    Quantizer,
    is_differentiated,
    quantizer_of,
)
from fewbit.runtime.saved.single_backward import once_differentiable

__all__ = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
]

_CONV = {1: torch_functional.conv1d, 2: torch_functional.conv2d, 3: torch_functional.conv3d}
_CONV_TRANSPOSE = {
    1: torch_functional.conv_transpose1d,
    2: torch_functional.conv_transpose2d,
    3: torch_functional.conv_transpose3d,
}


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride=1,
    padding=0,
    dilation=1,
    groups: int = 1,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """torch.nn.functional.conv1d; the input is kept in `bits` bits an element, for the weight's gradient.

    input: (N, C, L) or (C, L), float32, float64, float16 or bfloat16; weight: (out, C / groups, kernel);
    bias: (out,). padding also "same" or "valid". quantizer: in place of bits and group_size.

    The gradients of the input and the bias are exact, that of the weight is exact in expectation (ActNN,
    long version, appendix B.1). Nothing of the input is kept where the weight needs no gradient. Raises
    InputError for bits or group_size that there are not.
    """
    quantizer = quantizer or quantizer_of(bits, group_size)
    return _conv(1, input, weight, bias, stride, padding, dilation, groups, quantizer)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride=1,
    padding=0,
    dilation=1,
    groups: int = 1,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """torch.nn.functional.conv2d, kept as in `conv1d`. input: (N, C, H, W) or (C, H, W)."""
    quantizer = quantizer or quantizer_of(bits, group_size)
    return _conv(2, input, weight, bias, stride, padding, dilation, groups, quantizer)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride=1,
    padding=0,
    dilation=1,
    groups: int = 1,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """torch.nn.functional.conv3d, kept as in `conv1d`. input: (N, C, D, H, W) or (C, D, H, W)."""
    quantizer = quantizer or quantizer_of(bits, group_size)
    return _conv(3, input, weight, bias, stride, padding, dilation, groups, quantizer)


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride=1,
    padding=0,
    output_padding=0,
    groups: int = 1,
    dilation=1,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """torch.nn.functional.conv_transpose1d, kept as in `conv1d`; weight: (C, out / groups, kernel)."""
    quantizer = quantizer or quantizer_of(bits, group_size)
    others = stride, padding, output_padding, groups, dilation
    return _conv_transpose(1, input, weight, bias, *others, quantizer)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride=1,
    padding=0,
    output_padding=0,
    groups: int = 1,
    dilation=1,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """torch.nn.functional.conv_transpose2d, kept as in `conv1d`; weight: (C, out / groups, kH, kW)."""
    quantizer = quantizer or quantizer_of(bits, group_size)
    others = stride, padding, output_padding, groups, dilation
    return _conv_transpose(2, input, weight, bias, *others, quantizer)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride=1,
    padding=0,
    output_padding=0,
    groups: int = 1,
    dilation=1,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """torch.nn.functional.conv_transpose3d, kept as in `conv1d`; weight: (C, out / groups, kD, kH, kW)."""
    quantizer = quantizer or quantizer_of(bits, group_size)
    others = stride, padding, output_padding, groups, dilation
    return _conv_transpose(3, input, weight, bias, *others, quantizer)


def _conv(dims, x, weight, bias, stride, padding, dilation, groups, quantizer):
    if not is_differentiated(x, weight, bias) or x.dim() not in (dims + 1, dims + 2):
        return _CONV[dims](x, weight, bias, stride, padding, dilation, groups)
    stride, dilation = _per_dim(stride, dims), _per_dim(dilation, dims)
    if isinstance(padding, str):
        if padding not in ("same", "valid") or (padding == "same" and set(stride) != {1}):
            return _CONV[dims](x, weight, bias, stride, padding, dilation, groups)  # torch refuses
        x, padding = _padded(x, weight, padding, dilation)
    settings = stride, _per_dim(padding, dims), dilation, False, (0,) * dims, groups
    return _apply(x, weight, bias, settings, quantizer)


def _conv_transpose(
    dims, x, weight, bias, stride, padding, output_padding, groups, dilation, quantizer
):
    if not is_differentiated(x, weight, bias) or x.dim() not in (dims + 1, dims + 2):
        arguments = stride, padding, output_padding, groups, dilation
        return _CONV_TRANSPOSE[dims](x, weight, bias, *arguments)
    each = [_per_dim(value, dims) for value in (stride, padding, dilation, output_padding)]
    settings = *each[:3], True, each[3], groups
    return _apply(x, weight, bias, settings, quantizer)


def _apply(x, weight, bias, settings, quantizer):
    if x.dim() == weight.dim():
        return _Convolution.apply(x, weight, bias, settings, quantizer)
    # torch adds the dimension of one sample too.
    return _Convolution.apply(x.unsqueeze(0), weight, bias, settings, quantizer).squeeze(0)


def _per_dim(value, dims: int) -> tuple[int, ...]:
    value = tuple(value) if isinstance(value, list | tuple) else (value,)
    return value * dims if len(value) == 1 else value


def _padded(x, weight, padding: str, dilation):
    """x and the padding left to do: "same" may need one more at the end than in front, as torch does it."""
    if padding == "valid":
        return x, (0,) * len(dilation)
    total = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
    front = tuple(each // 2 for each in total)
    extra = [each % 2 for each in total]
    if any(extra):
        x = torch_functional.pad(x, [n for each in reversed(extra) for n in (0, each)])
    return x, front


def _torchs_own(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """By the functions that autocast knows, not by torch.convolution."""
    dims = weight.dim() - 2
    if transposed:
        others = stride, padding, output_padding, groups, dilation
        return _CONV_TRANSPOSE[dims](x, weight, bias, *others)
    return _CONV[dims](x, weight, bias, stride, padding, dilation, groups)


class _Convolution(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, settings, quantizer):
        with as_torch_casts():
            y = _torchs_own(x, weight, bias, *settings)
        ctx.settings = settings
        ctx.size = tuple(x.shape)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        kept = ()
        if ctx.needs_input_grad[1]:
            saved = quantizer.quantize_or_reuse(x)
            kept, ctx.spec, y = saved.tensors, saved.spec, saved.tie(y)
        # Without an input gradient only the weight's shape matters.
        ctx.save_for_backward(weight, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, *kept = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if not (needs[0] or needs[1]):
            return None, None, sums.over_channels(grad).to(ctx.dtypes[2]), None, None
        if needs[1]:
            x = ctx.spec.dequantize(kept, grad.dtype)
        else:
            x = grad.new_zeros(()).expand(ctx.size)  # only its shape matters
        bias_size = None if ctx.dtypes[2] is None else [grad.shape[1]]
        grads = torch.ops.aten.convolution_backward(
            grad, x, weight.to(grad.dtype), bias_size, *ctx.settings, needs
        )
        grads = [
            each if each is None else each.to(dtype)
            for each, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return *grads, None, None
