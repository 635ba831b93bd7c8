"""Softmax and its logarithm, whose probabilities are saved quantized.

The result y of softmax is saved with random rounding, as y^ = y + e, in which e is the rounding error. Let g be the
gradient of y, grad the exact gradient of the input, and grad^ the gradient that is computed from y^:

    grad_j = y_j (g_j - sum_i g_i y_i)
    grad^_j - grad_j = e_j (g_j - sum_i g_i y_i) - y_j sum_i g_i e_i - e_j sum_i g_i e_i

Copies are uniform, unless the caller chooses another kind. The e_i are then independent and have mean 0. Take the mean over the rounding: the first two terms of the error vanish, and
of the sum in the last term only the summand with i = j remains. So

    E[grad^_j] - grad_j = -g_j Var[e_j]

This difference is called the bias of the gradient. Var[e_j] = f (1 - f) step^2, which is at most step^2 / 4. Here step
is the distance between the two neighboring levels to which y_j can be rounded, and f is the distance from y_j to the
lower one, divided by step. Elements that are quantized together have step = (maximum - minimum) / (2^bits - 1). In a
rotated copy, the errors of elements have a covariance too, and the bias is -sum_i Cov[e_j, e_i] g_i.

For y = log_softmax(x) with the gradient g of y, the gradient of x is g - exp(y) sum(g). The probabilities exp(y) are
saved quantized. The gradient is linear in exp(y), and therefore exact in expectation: its mean over the rounding is
exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbit.config import DEFAULT_BITS, GROUP_SIZE, UNIFORM
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.quantizers import copies
from fewbit.runtime.quantizers.quantizer import (
    Quantizer,
    is_differentiated,
    quantizer_of,
)
from fewbit.runtime.quantizers.softmax_copies import quantize_softmax
from fewbit.runtime.saved.single_backward import SavingFunction

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

    The mean of the gradient over the random rounding differs from the exact gradient; the docstring of
    `fewbit/functional/softmax.py` says by how much.

    Args:
        input: a floating tensor of any shape.
        dim: as in torch. If it is None, torch chooses a dimension and warns.
        _stacklevel: the stack level of that warning, as in torch.
        dtype: the dtype of the result and of the computation, as in torch.
        bits: bits per saved element, 1 to 8.
        group_size: the number of elements in a group (docs/concepts/quantizer.md), a multiple of 32.
        quantizer: the kind of quantized copies, "rotated" or "uniform", or None for the usual kind
            (docs/concepts/quantizer.md).
            A Quantizer may be given instead; then `bits` and `group_size` are ignored.

    Returns:
        A tensor of the input's size.

    Raises:
        InputError: `bits` or `group_size` is invalid.
    """
    quantizer = quantizer_of(bits, group_size, quantizer)
    if not is_differentiated(input):
        return torch_functional.softmax(input, dim, _stacklevel + 1, dtype)
    if dim is None:
        dim = torch_functional._get_softmax_dim("softmax", input.dim(), _stacklevel)
    return _Softmax.call(input, dim, dtype, quantizer)


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

    Arguments are as in `softmax`. The gradient is exact in expectation: its mean over the random rounding is exact.
    """
    quantizer = quantizer_of(bits, group_size, quantizer)
    if not is_differentiated(input):
        return torch_functional.log_softmax(input, dim, _stacklevel + 1, dtype)
    if dim is None:
        dim = torch_functional._get_softmax_dim("log_softmax", input.dim(), _stacklevel)
    return _LogSoftmax.call(input, dim, dtype, quantizer)


class _Softmax(SavingFunction):
    @staticmethod
    def forward(ctx, x, dim, dtype, quantizer):
        y = torch_functional.softmax(x, dim, dtype=dtype)
        saved = quantize_softmax(quantizer, y)
        ctx.dim = dim
        return copies.keep(ctx, y, y=saved)

    @staticmethod
    def backward(ctx, grad):
        y = copies.Kept(ctx).values("y", grad.dtype)
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
