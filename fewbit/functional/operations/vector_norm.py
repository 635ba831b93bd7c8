"""`vector_norm`, the Euclidean length of vectors, and `normalize`, which divides vectors by it."""

from __future__ import annotations

import torch
from torch import Tensor

from fewbit.functional.products import is_in_memory
from fewbit.runtime.interop import clamp
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.quantizers import copies
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.saved.saving_function import SavingFunction, is_differentiated


def vector_norm(
    input: Tensor,
    ord: float = 2,
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    quantizer: Quantizer,
) -> Tensor:
    """Compute torch.linalg.vector_norm, and save the unit vectors quantized if the length is Euclidean.

    The gradient of x, g x / n for the length n, is exact in expectation. torch's own function runs for another `ord`
    than 2, and if `dtype` or `out` is given.
    """
    is_usual = ord == 2 and dtype is None and out is None and input.is_floating_point()
    if not is_usual or not is_differentiated(input) or is_in_memory(input):
        return torch.linalg.vector_norm(input, ord, dim, keepdim, dtype=dtype, out=out)
    # An empty tuple stands for all dimensions too.
    dims = dim if isinstance(dim, int) or dim else tuple(range(input.dim()))
    length = _Length.apply(input, dims, quantizer)
    return length if keepdim else length.squeeze(dims)


def norm(
    input: Tensor,
    p: float | str | None = "fro",
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    quantizer: Quantizer,
) -> Tensor:
    """Compute torch.norm with `vector_norm`, if the length is Euclidean."""
    if p not in (2, "fro") or dtype is not None:
        return torch.norm(input, p, dim, keepdim, dtype=dtype)
    return vector_norm(input, 2, dim, keepdim, quantizer=quantizer)


def normalize(
    input: Tensor,
    p: float = 2.0,
    dim: int | tuple[int, ...] = 1,
    eps: float = 1e-12,
    out: Tensor | None = None,
    *,
    quantizer: Quantizer,
) -> Tensor:
    """Compute torch.nn.functional.normalize, and save the result quantized and the lengths exactly.

    The gradient of x, (g - y (g . y)) / n for the result y = x / n, is biased as that of a norm layer with one copy.
    torch's own function runs for another `p` than 2, and if `out` is given.
    """
    if p != 2 or out is not None or not is_differentiated(input):
        return torch_functional.normalize(input, p, dim, eps, out)
    return _Normalize.apply(input, dim, eps, quantizer)


class _Length(SavingFunction):
    @staticmethod
    def forward(ctx, x, dims, quantizer):
        y = torch.linalg.vector_norm(x, 2, dims, True)
        # The gradient of a vector of zeros is 0, as in torch.
        direction = (x / y).masked_fill(y == 0, 0)
        return copies.keep(ctx, y, direction=quantizer.quantize(direction, shared=False))

    @staticmethod
    def backward(ctx, grad):
        return grad * copies.Kept(ctx).values("direction", grad.dtype), None, None


class _Normalize(SavingFunction):
    @staticmethod
    def forward(ctx, x, dim, eps, quantizer):
        # The steps of torch's function, so that the result is the same to the bit.
        length = torch.linalg.vector_norm(x, 2, dim, True)
        bound = length.clamp_min(eps)
        y = x / bound.expand_as(x)
        ctx.dim = dim
        is_free = clamp.is_inside(length, eps, None)
        return copies.keep(ctx, y, bound=bound, is_free=is_free, y=quantizer.quantize(y))

    @staticmethod
    def backward(ctx, grad):
        kept = copies.Kept(ctx)
        y = kept.values("y", grad.dtype)
        along = (grad * y).sum(ctx.dim, keepdim=True)
        # A length below eps is replaced by eps, on which x has no influence.
        grad = (grad - y * (along * kept.tensor("is_free"))) / kept.tensor("bound")
        return grad, None, None, None
