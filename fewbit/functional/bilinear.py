"""`bilinear` with both inputs quantized."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from fewbit.config import GROUP_SIZE
from fewbit.functional import sums
from fewbit.runtime.format import layout
from fewbit.runtime.interop.autocast import as_torch_casts
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.quantizers.quantizer import (
    DEFAULT_BITS,
    Quantizer,
    is_differentiated,
    quantizer_of,
)
from fewbit.runtime.saved.single_backward import once_differentiable

__all__ = ["bilinear"]


def bilinear(
    input1: Tensor,
    input2: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """torch.nn.functional.bilinear; both inputs are kept in `bits` bits an element.

    input1: (*, I), input2: (*, J), floating. weight: (K, I, J), bias: (K,). Returns (*, K).
    quantizer: in place of bits and group_size.

    The gradient of the bias is exact, the others are exact in expectation: that of an input is
    linear in the other input, that of the weight in each of the two, which are rounded
    independently of each other, also where they are one tensor. input1 is kept where input2 or the
    weight needs a gradient, input2 where input1 or the weight does. Raises InputError for bits or
    group_size that there are not.
    """
    quantizer = quantizer or quantizer_of(bits, group_size)
    if not is_differentiated(input1, input2, weight, bias):
        return torch_functional.bilinear(input1, input2, weight, bias)
    return _Bilinear.apply(input1, input2, weight, bias, quantizer)


class _Bilinear(Function):
    @staticmethod
    def forward(ctx, x1, x2, weight, bias, quantizer):
        with as_torch_casts():
            y = layout.unviewed(torch_functional.bilinear(x1, x2, weight, bias))
        needs_1, needs_2, needs_weight, *_ = ctx.needs_input_grad
        ctx.dtypes = x1.dtype, x2.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.sizes = tuple(x1.shape), tuple(x2.shape)
        kept = [weight if needs_1 or needs_2 else None]
        ctx.spec1 = ctx.spec2 = None
        if needs_2 or needs_weight:
            saved = quantizer.quantize(x1)
            ctx.spec1, y = saved.spec, saved.tie(y)
            kept += saved.tensors
        ctx.of_x1 = len(kept) - 1
        if needs_1 or needs_weight:
            saved = quantizer.quantize_independent(x2, x1)
            ctx.spec2, y = saved.spec, saved.tie(y)
            kept += saved.tensors
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, *kept = ctx.saved_tensors
        needs_1, needs_2, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dtype1, dtype2, dtype_weight, dtype_bias = ctx.dtypes
        rows = sums.rows(grad)
        x1 = x2 = grad1 = grad2 = grad_weight = grad_bias = None
        if ctx.spec1 is not None:
            x1 = sums.rows(ctx.spec1.dequantize(kept[: ctx.of_x1], grad.dtype))
        if ctx.spec2 is not None:
            x2 = sums.rows(ctx.spec2.dequantize(kept[ctx.of_x1 :], grad.dtype))
        if weight is not None:
            weight = weight.to(grad.dtype)
        # As torch: the result is the sum over I and J of three tensors,
        # (N, 1, I, 1), (1, K, I, J) and (N, 1, 1, J).
        if needs_1:
            grad1 = torch._trilinear(rows, weight, x2, (2, 3), (0,), (1, 2), (1, 3))
            grad1 = grad1.reshape(ctx.sizes[0]).to(dtype1)
        if needs_2:
            grad2 = torch._trilinear(x1, weight, rows, (1, 3), (0,), (2, 3), (1, 2))
            grad2 = grad2.reshape(ctx.sizes[1]).to(dtype2)
        if needs_weight:
            grad_weight = torch._trilinear(x1, rows, x2, (1, 3), (2, 3), (1, 2), (0,))
            grad_weight = grad_weight.to(dtype_weight)
        if needs_bias:
            grad_bias = rows.sum(0).to(dtype_bias)
        return grad1, grad2, grad_weight, grad_bias, None
