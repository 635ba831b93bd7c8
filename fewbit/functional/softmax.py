"""Softmax and its logarithm, whose probabilities are saved quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from fewbit.config import DEFAULT_BITS, GROUP_SIZE, UNIFORM
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.quantizers import copies
from fewbit.runtime.quantizers.quantizer import Quantizer, quantizer_of
from fewbit.runtime.quantizers.softmax_copies import quantize_softmax
from fewbit.runtime.saved.saving_function import SavingFunction, is_differentiated

__all__ = ["log_softmax", "softmax"]


def softmax(
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.softmax and save the result quantized.

    The gradient is biased (docs/concepts/layers.md#bias), because it contains products of rounding errors with themselves.
    Other arguments are those of torch's function and of `linear`.

    Args:
        input: a floating tensor of any shape.
        dim: as in torch. If it is None, torch chooses a dimension and warns.
        _stacklevel: the stack level of that warning, as in torch.
        dtype: the dtype of the result and of the computation, as in torch.
        quantizer: as in `linear`, but None stands for "uniform".

    Raises:
        InputError: `bits` or `group_size` is invalid.
    """
    quantizer = quantizer_of(bits, group_size, quantizer)
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
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.log_softmax and save the probabilities quantized.

    Arguments are as in `softmax`. The gradient, g - exp(y) sum(g), is linear in the saved exp(y), and so exact in expectation.
    """
    quantizer = quantizer_of(bits, group_size, quantizer)
    if not is_differentiated(input):
        return torch_functional.log_softmax(input, dim, _stacklevel + 1, dtype)
    if dim is None:
        dim = torch_functional._get_softmax_dim("log_softmax", input.dim(), _stacklevel)
    return _LogSoftmax.apply(input, dim, dtype, quantizer)


class _Softmax(SavingFunction):
    @staticmethod
    def forward(ctx, x, dim, dtype, quantizer):
        y = torch_functional.softmax(x, dim, dtype=dtype)
        saved = quantize_softmax(quantizer, y, ctx)
        ctx.dim = dim
        return copies.keep(ctx, y, y=saved)

    @staticmethod
    def backward(ctx, grad):
        y = copies.result_or_copy(ctx, "y", grad.dtype)
        grad = torch._softmax_backward_data(grad, y, ctx.dim, grad.dtype)
        return grad, None, None, None


class _LogSoftmax(SavingFunction):
    @staticmethod
    def forward(ctx, x, dim, dtype, quantizer):
        y = torch_functional.log_softmax(x, dim, dtype=dtype)
        saved = quantizer.quantize(y.exp(), shared=False, usual=UNIFORM)
        ctx.dim = dim
        return copies.keep(ctx, y, probabilities=saved)

    @staticmethod
    def backward(ctx, grad):
        total = grad.sum(ctx.dim, keepdim=True)
        # Not in place, because with batched gradients `total` has a batch dimension that the other factor lacks.
        product = copies.Kept(ctx).values("probabilities", grad.dtype) * total
        return torch.sub(grad, product), None, None, None
