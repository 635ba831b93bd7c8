"""PReLU with the sign of its input in 1 bit and the rest of it quantized."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from fewbit.config import GROUP_SIZE
from fewbit.functional import sums
from fewbit.runtime.interop.autocast import as_torch_casts
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.quantizers import integers
from fewbit.runtime.quantizers.quantizer import (
    DEFAULT_BITS,
    Quantizer,
    is_differentiated,
    quantizer_of,
)
from fewbit.runtime.saved.single_backward import once_differentiable

__all__ = ["prelu"]


def prelu(
    input: Tensor,
    weight: Tensor,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """torch.nn.functional.prelu; input > 0 is kept in 1 bit, min(input, 0) in `bits` bits.

    input: (N, C, ...), floating; weight: (1,) or (C,), the slopes. quantizer: in place of bits and
    group_size.

    The sign is kept where the input needs a gradient: ``4 * ceil(n / 32)`` bytes, and the gradient
    is torch's, to the bit. min(input, 0) is kept where the weight needs one, which is then exact in
    expectation: it is linear in what is kept. Raises InputError for bits or group_size that there
    are not.
    """
    quantizer = quantizer or quantizer_of(bits, group_size)
    if not is_differentiated(input, weight):
        return torch_functional.prelu(input, weight)
    return _PReLU.apply(input, weight, quantizer)


class _PReLU(Function):
    @staticmethod
    def forward(ctx, x, weight, quantizer):
        with as_torch_casts():
            y = torch_functional.prelu(x, weight)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.dtypes = x.dtype, weight.dtype
        ctx.shape = tuple(weight.shape)
        seen = x.to(y.dtype)
        sign = kept = ()
        if needs_x:
            saved = integers.pack(seen > 0, 2)
            sign, ctx.sign, y = saved.tensors, saved.spec, saved.tie(y)
        if needs_weight:
            saved = quantizer.quantize(seen.clamp(max=0), shared=False)
            kept, ctx.spec, y = saved.tensors, saved.spec, saved.tie(y)
        ctx.save_for_backward(weight if needs_x else None, *sign, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, *kept = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = grad_weight = positive = None
        if needs_x:
            sign, *kept = kept
            positive = ctx.sign.dequantize((sign,))
            # Inductor makes C++ code of the view that does not compile; it fuses the comparison.
            is_traced = torch.compiler.is_compiling()
            positive = positive > 0 if is_traced else positive.view(torch.bool)
            slope = _beside(weight.to(grad.dtype), grad)
            grad_x = torch.where(positive, grad, slope * grad).to(ctx.dtypes[0])
        if needs_weight:
            product = ctx.spec.dequantize(kept, grad.dtype) * grad
            if positive is not None:
                # These elements are 0 in expectation; known to be 0, they add no noise.
                product = product.masked_fill_(positive, 0)
            is_one = ctx.shape in ((), (1,))
            total = product.sum() if is_one else sums.over_channels(product)
            grad_weight = total.reshape(ctx.shape).to(ctx.dtypes[1])
        return grad_x, grad_weight, None


def _beside(weight, x):
    """The slopes in a shape that broadcasts with x: one for all, or one a channel (dimension 1)."""
    if weight.numel() == 1:
        return weight.reshape(())
    return weight.reshape(-1, *[1] * (x.dim() - 2))
