"""Softmax and its logarithm, whose probabilities are saved quantized.

The gradient of softmax multiplies its result y with itself. With y^ = y + e in place of y it is not exact in expectation.
With the gradient g of y,

    grad_j = y_j (g_j - sum_i g_i y_i)
    grad^_j - grad_j = e_j (g_j - sum_i g_i y_i) - y_j sum_i g_i e_i - e_j sum_i g_i e_i

The e_i are independent and have mean 0. In expectation only the product with i = j of the last term remains:

    E[grad^_j] - grad_j = -g_j Var[e_j]

elementwise. Var[e_j] = f (1 - f) step^2 for an element that lies a fraction f of a step above a level, and is at most
step^2 / 4. The step is (range of the group) / (2^bits - 1).

The gradient of log_softmax, g - exp(y) sum(g), is linear in exp(y). exp(y) is saved, and the gradient is exact in
expectation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from fewbit.config import GROUP_SIZE
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.quantizers.quantizer import (
    DEFAULT_BITS,
    Quantizer,
    is_differentiated,
    quantizer_of,
)
from fewbit.runtime.saved.single_backward import once_differentiable

__all__ = ["log_softmax", "softmax"]


def softmax(
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """Compute torch.nn.functional.softmax and save the result quantized.

    The module's docstring has the gradient's bias.

    Args:
        input: any shape, floating.
        dim: as in torch. If it is None, torch chooses a dimension and warns.
        _stacklevel: of that warning, as in torch.
        dtype: of the result and the computation, as in torch.
        bits: 1 to 8, of an element of the copy.
        group_size: the number of elements that share a minimum and a range, a multiple of 32.
        quantizer: makes the copy in place of one of `bits` and `group_size`.

    Returns:
        The size of the input.

    Raises:
        InputError: for other bits or group sizes.
    """
    quantizer = quantizer or quantizer_of(bits, group_size)
    if not is_differentiated(input):
        return torch_functional.softmax(input, dim, _stacklevel + 1, dtype)
    if dim is None:
        dim = torch_functional._get_softmax_dim("softmax", input.dim(), _stacklevel)
    return _Softmax.apply(input, dim, dtype, quantizer)


def log_softmax(
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """Compute torch.nn.functional.log_softmax and save the probabilities quantized.

    Arguments are as in `softmax`. The gradient is exact in expectation.
    """
    quantizer = quantizer or quantizer_of(bits, group_size)
    if not is_differentiated(input):
        return torch_functional.log_softmax(input, dim, _stacklevel + 1, dtype)
    if dim is None:
        dim = torch_functional._get_softmax_dim("log_softmax", input.dim(), _stacklevel)
    return _LogSoftmax.apply(input, dim, dtype, quantizer)


class _Softmax(Function):
    @staticmethod
    def forward(ctx, x, dim, dtype, quantizer):
        y = torch_functional.softmax(x, dim, dtype=dtype)
        saved = quantizer.quantize(y)
        ctx.spec, ctx.dim, ctx.dtype = saved.spec, dim, x.dtype
        ctx.save_for_backward(*saved.tensors)
        return saved.tie(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        y = ctx.spec.dequantize(ctx.saved_tensors, grad.dtype)
        grad = torch._softmax_backward_data(grad, y, ctx.dim, grad.dtype)
        return grad.to(ctx.dtype), None, None, None


class _LogSoftmax(Function):
    @staticmethod
    def forward(ctx, x, dim, dtype, quantizer):
        y = torch_functional.log_softmax(x, dim, dtype=dtype)
        saved = quantizer.quantize(y.exp(), shared=False)
        ctx.spec, ctx.dim, ctx.dtype = saved.spec, dim, x.dtype
        ctx.save_for_backward(*saved.tensors)
        return saved.tie(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        total = grad.sum(ctx.dim, keepdim=True)
        # Not in place, because only one factor has a batch dimension if gradients are batched.
        product = ctx.spec.dequantize(ctx.saved_tensors, grad.dtype) * total
        return torch.sub(grad, product).to(ctx.dtype), None, None, None
