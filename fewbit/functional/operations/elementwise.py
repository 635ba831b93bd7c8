"""Operations on elements, such as `square` and `clamp`, which torch's own functions compute, and which save fewer bytes.

The gradients of `square`, `exp` and `erf` are linear in what is saved quantized, and therefore exact in expectation.
Those of `clamp`, `maximum`, `minimum` and `gather` equal torch's to the bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fewbit.config import UNIFORM
from fewbit.functional.products import in_shapes, is_in_memory
from fewbit.runtime.interop.checkpoint import in_checkpoint
from fewbit.runtime.interop.clamp import is_inside
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.quantizers import copies, integers
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.saved.saving_function import SavingFunction, is_differentiated


def square(input: Tensor, *, quantizer: Quantizer) -> Tensor:
    """Compute torch.square and save the input quantized."""
    if not is_differentiated(input) or is_in_memory(input) or not input.is_floating_point():
        return torch.square(input)
    return _Square.apply(input, quantizer)


def pow(input: Tensor, exponent, *, quantizer: Quantizer) -> Tensor:
    """Compute torch.pow, with `square` if the exponent is 2."""
    if isinstance(exponent, int | float) and exponent == 2:
        return square(input, quantizer=quantizer)
    return torch.pow(input, exponent)


def exp(input: Tensor, *, quantizer: Quantizer) -> Tensor:
    """Compute torch.exp and save the result quantized, if no element is above 1; otherwise unquantized.

    Results of at most 1 are decays or differences from a maximum, mostly close to 0, which a uniform copy restores almost exactly. The result
    stays unquantized on a GPU, where the host would wait for the largest element, and in a checkpointed region, whose recomputation may find
    another one.
    """
    if not is_differentiated(input) or not input.is_floating_point():
        return torch.exp(input)
    return _Exp.apply(input, quantizer)


def erf(input: Tensor, *, quantizer: Quantizer) -> Tensor:
    """Compute torch.erf and save the derivative quantized."""
    if not is_differentiated(input) or not input.is_floating_point():
        return torch.erf(input)
    return _Erf.apply(input, quantizer)


def clamp(input: Tensor, min=None, max=None) -> Tensor:
    """Compute torch.clamp, and save 1 bit per element if the ends are numbers."""
    ends = [end for end in (min, max) if end is not None]
    are_numbers = ends and all(isinstance(end, int | float) for end in ends)
    if not (are_numbers and is_differentiated(input) and input.is_floating_point()):
        return torch.clamp(input, min, max)
    return _Clamp.apply(input, min, max)


def maximum(input: Tensor, other: Tensor) -> Tensor:
    """Compute torch.maximum, and save in 2 bits per element which of the two is larger."""
    return _extreme(torch.maximum, input, other)


def minimum(input: Tensor, other: Tensor) -> Tensor:
    """Compute torch.minimum, and save in 2 bits per element which of the two is smaller."""
    return _extreme(torch.minimum, input, other)


def _extreme(function, *inputs) -> Tensor:
    are_floating = all(isinstance(x, Tensor) and x.is_floating_point() for x in inputs)
    if not (are_floating and is_differentiated(*inputs)):
        return function(*inputs)
    return _Largest.apply(*inputs, function)


def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """Compute torch.gather, and save the index in the narrowest dtype, and of the input only its size.

    torch's own function runs if `sparse_grad` is true.
    """
    if sparse_grad or not is_differentiated(input):
        return torch.gather(input, dim, index, sparse_grad=sparse_grad)
    return _Gather.apply(input, dim, index)


class _Square(SavingFunction):
    @staticmethod
    def forward(ctx, x, quantizer):
        return copies.keep(ctx, torch.square(x), x=quantizer.quantize(x))

    @staticmethod
    def backward(ctx, grad):
        return 2 * copies.Kept(ctx).values("x", grad.dtype) * grad, None


class _Exp(SavingFunction):
    @staticmethod
    def forward(ctx, x, quantizer):
        y = torch.exp(x)
        can_read = is_plain(y) and y.device.type == "cpu" and not in_checkpoint()
        is_small = can_read and y.numel() and bool((y <= 1).all())
        saved = quantizer.quantize(y, usual=UNIFORM) if is_small else copies.unquantized(y)
        if is_small:
            copies.want_result(ctx, quantizer.context, y)
        return copies.keep(ctx, y, y=saved)

    @staticmethod
    def backward(ctx, grad):
        return grad * copies.result_or_copy(ctx, "y", grad.dtype), None


class _Erf(SavingFunction):
    @staticmethod
    def forward(ctx, x, quantizer):
        derivative = torch.exp(-x.square()) * (2 / math.sqrt(math.pi))
        saved = quantizer.quantize(derivative, shared=False, usual=UNIFORM)
        return copies.keep(ctx, torch.erf(x), derivative=saved)

    @staticmethod
    def backward(ctx, grad):
        return grad * copies.Kept(ctx).values("derivative", grad.dtype), None


class _Clamp(SavingFunction):
    @staticmethod
    def forward(ctx, x, least, greatest):
        saved = integers.pack(is_inside(x, least, greatest), 2)
        return copies.keep(ctx, torch.clamp(x, least, greatest), inside=saved)

    @staticmethod
    def backward(ctx, grad):
        inside = copies.Kept(ctx).values("inside").bool()
        return torch.where(inside, grad, 0), None, None


class _Largest(SavingFunction):
    @staticmethod
    def forward(ctx, x, other, function):
        y = function(x, other)
        less, more = (x < other, x > other)[:: 1 if function is torch.maximum else -1]
        # 0: `other` is the result; 1: both are equal; 2: x is the result; 3: one is NaN, and both get torch's gradient.
        less, same, more = (each.to(torch.uint8) for each in (less, x == other, more))
        choice = 3 - 3 * less - 2 * same - more
        ctx.inputs = [(each.shape, each.dtype) for each in (x, other)]
        return copies.keep(ctx, y, choice=integers.pack(choice, 4))

    @staticmethod
    def backward(ctx, grad):
        choice = copies.Kept(ctx).values("choice")
        grads = torch.where(choice == 0, 0, grad), torch.where(choice == 2, 0, grad)
        shared = (torch.where(choice == 1, each / 2, each) for each in grads)
        return *in_shapes(shared, ctx.inputs), None


class _Gather(SavingFunction):
    @staticmethod
    def forward(ctx, x, dim, index):
        y = torch.gather(x, dim, index)
        ctx.dim, ctx.size, ctx.index_size = dim, x.shape, index.shape
        # The index of many heads or samples is often an expanded one.
        for axis, stride in enumerate(index.stride()):
            if stride == 0 and index.shape[axis] > 1:
                index = index.narrow(axis, 0, 1)
        count = x.shape[dim] if x.dim() else 1
        return copies.keep(ctx, y, index=integers.narrow(index, count))

    @staticmethod
    def backward(ctx, grad):
        index = copies.Kept(ctx).values("index").expand(ctx.index_size)
        others = set(range(len(ctx.size))) - {ctx.dim % max(len(ctx.size), 1)}
        if any(ctx.index_size[axis] < ctx.size[axis] for axis in others):
            # On the CPU, torch takes an expanded index for one that covers all other dimensions, and scatters wrongly.
            index = index.contiguous()
        return grad.new_zeros(ctx.size).scatter_add_(ctx.dim, index, grad), None, None
