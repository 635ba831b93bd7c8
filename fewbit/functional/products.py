"""Products of two activations, with both kept quantized."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from fewbit.config import GROUP_SIZE
from fewbit.runtime.interop.autocast import as_torch_casts
from fewbit.runtime.quantizers.quantizer import (
    DEFAULT_BITS,
    Quantizer,
    is_differentiated,
    quantizer_of,
)
from fewbit.runtime.saved.single_backward import once_differentiable

__all__ = ["matmul", "mul"]


def matmul(
    input: Tensor,
    other: Tensor,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """torch.matmul; each factor is kept in `bits` bits an element, for the other's gradient.

    input, other: two dimensions or more, broadcast as in torch; floating. Both gradients are exact in
    expectation, as each is linear in the other factor. A leaf, such as a parameter, is kept as it is, and
    where only one factor needs a gradient torch's own runs. quantizer: in place of bits and group_size.
    """
    quantizer = quantizer or quantizer_of(bits, group_size)
    both = input.requires_grad and other.requires_grad
    if not both or not is_differentiated(input, other) or min(input.dim(), other.dim()) < 2:
        return torch.matmul(input, other)
    return _Matmul.apply(input, other, quantizer)


def mul(
    input: Tensor,
    other: Tensor,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """input * other; kept as in `matmul`. input, other: floating, broadcast as in torch."""
    quantizer = quantizer or quantizer_of(bits, group_size)
    if not (input.requires_grad and other.requires_grad and is_differentiated(input, other)):
        return torch.mul(input, other)
    return _Mul.apply(input, other, quantizer)


class _Product(Function):
    """What both have: the factors, quantized unless they exist anyway."""

    @staticmethod
    def save(ctx, y, a, b, quantizer):
        ctx.sizes = a.shape, b.shape
        ctx.dtypes = a.dtype, b.dtype
        ctx.specs, kept = [], []
        for factor in (a, b):
            if factor.is_leaf:
                ctx.specs.append((None, 1))
                kept.append(factor)
                continue
            saved = quantizer.quantize(factor)
            ctx.specs.append((saved.spec, len(saved.tensors)))
            y = saved.tie(y)
            kept.extend(saved.tensors)
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    def factors(ctx, dtype):
        kept, factors = ctx.saved_tensors, []
        for spec, count in ctx.specs:
            factor = kept[0].to(dtype) if spec is None else spec.dequantize(kept[:count], dtype)
            factors.append(factor)
            kept = kept[count:]
        return factors

    @staticmethod
    def summed(ctx, grad_a, grad_b):
        """Gradients in the factors' own shapes and dtypes."""
        grads = []
        for grad, size, dtype in zip((grad_a, grad_b), ctx.sizes, ctx.dtypes, strict=True):
            grads.append(grad.sum_to_size(size).to(dtype))
        return *grads, None


class _Matmul(_Product):
    @staticmethod
    def forward(ctx, a, b, quantizer):
        with as_torch_casts():
            y = torch.matmul(a, b)
        return _Product.save(ctx, y, a, b, quantizer)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b = _Product.factors(ctx, grad.dtype)
        return _Product.summed(
            ctx,
            grad @ b.transpose(-2, -1),
            a.transpose(-2, -1) @ grad,
        )


class _Mul(_Product):
    @staticmethod
    def forward(ctx, a, b, quantizer):
        return _Product.save(ctx, a * b, a, b, quantizer)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b = _Product.factors(ctx, grad.dtype)
        return _Product.summed(ctx, grad * b, grad * a)
