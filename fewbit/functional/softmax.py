"""Softmax and its logarithm with the probabilities quantized.

The gradient of softmax multiplies its result y with itself, so with y^ = y + e in its place it is
not exact in expectation. With g the gradient of y,

    grad_j = y_j (g_j - sum_i g_i y_i)
    grad^_j - grad_j = e_j (g_j - sum_i g_i y_i) - y_j sum_i g_i e_i - e_j sum_i g_i e_i

The e_i are independent and their means are 0: of the last term's products only that with i = j is
left, and

    E[grad^_j] - grad_j = -g_j Var[e_j]

elementwise, where Var[e_j] = f (1 - f) step^2 for an element that lies the fraction f of a step
above a level; at most step^2 / 4, with step = (range of the group) / (2^bits - 1).

That of log_softmax is linear in exp(y), grad = g - exp(y) sum(g): it keeps that, and is exact in
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
    """torch.nn.functional.softmax; its result is kept in `bits` bits an element.

    input: any shape, floating. dtype: of the result, and of the computation. quantizer: in place of
    bits and group_size. The gradient has the bias that this module's documentation gives. Raises
    InputError for bits or group_size that there are not.
    """
    quantizer = quantizer or quantizer_of(bits, group_size)
    if not is_differentiated(input):
        return torch_functional.softmax(input, dim, _stacklevel + 1, dtype)
    dim = _dim("softmax", input, dim, _stacklevel)
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
    """torch.nn.functional.log_softmax; the probabilities are kept in `bits` bits an element.

    Arguments as in `softmax`. The gradient is exact in expectation.
    """
    quantizer = quantizer or quantizer_of(bits, group_size)
    if not is_differentiated(input):
        return torch_functional.log_softmax(input, dim, _stacklevel + 1, dtype)
    dim = _dim("log_softmax", input, dim, _stacklevel)
    return _LogSoftmax.apply(input, dim, dtype, quantizer)


def _dim(name, x, dim, stacklevel):
    """The dimension, which torch chooses with a warning where none is given."""
    if dim is None:
        return torch_functional._get_softmax_dim(name, x.dim(), stacklevel + 1)
    return dim


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
        y = ctx.spec.dequantize(ctx.saved_tensors, grad.dtype)
        total = grad.sum(ctx.dim, keepdim=True)
        return torch.sub(grad, y.mul_(total)).to(ctx.dtype), None, None, None
