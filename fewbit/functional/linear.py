"""`linear` with a quantized input kept for the weight's gradient."""

from __future__ import annotations

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

__all__ = ["linear"]


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """torch.nn.functional.linear; the input is kept in `bits` bits an element, for the weight's gradient.

    input: (*, in_features), float32, float64, float16 or bfloat16. weight: (out_features, in_features).
    bias: (out_features,). Returns (*, out_features). quantizer: in place of bits and group_size.

    The gradients of the input and the bias are exact; that of the weight is exact in expectation (ActNN,
    section 3.3). Nothing of the input is kept where the weight needs no gradient. Raises InputError for bits or
    group_size that there are not.
    """
    quantizer = quantizer or quantizer_of(bits, group_size)
    usual = weight.dim() == 2 and (bias is None or bias.dim() == 1) and input.dim() > 0
    if not usual or not is_differentiated(input, weight, bias):
        return torch_functional.linear(input, weight, bias)
    return _Linear.apply(input, weight, bias, quantizer)


class _Linear(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, quantizer):
        with as_torch_casts():
            y = layout.unviewed(torch_functional.linear(x, weight, bias))
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        kept = ()
        if needs_weight:
            saved = quantizer.quantize_or_reuse(x)
            kept, ctx.spec, y = saved.tensors, saved.spec, saved.tie(y)
        ctx.save_for_backward(weight if needs_x else None, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, *kept = ctx.saved_tensors
        dtype_x, dtype_weight, dtype_bias = ctx.dtypes
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = (grad @ weight.to(grad.dtype)).to(dtype_x)
        rows = sums.rows(grad)
        if needs_weight:
            x = ctx.spec.dequantize(kept, grad.dtype)
            grad_weight = (rows.t() @ sums.rows(x)).to(dtype_weight)
        if needs_bias:
            grad_bias = rows.sum(0).to(dtype_bias)
        return grad_x, grad_weight, grad_bias, None
