"""PReLU, and RReLU in training, which save the sign of each element of the input in 1 bit."""

from __future__ import annotations

import torch
from torch import Tensor

from fewbit.config import DEFAULT_BITS, GROUP_SIZE, UNIFORM
from fewbit.runtime.format import sums
from fewbit.runtime.interop.autocast import with_torch_casts
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.interop.random_replay import replayed, state_of
from fewbit.runtime.probes import gradient_errors
from fewbit.runtime.quantizers import copies, integers
from fewbit.runtime.quantizers.quantizer import Quantizer, quantizer_of
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec, RearrangedSpec
from fewbit.runtime.saved.saving_function import SavingFunction, is_differentiated, refuse_batches

__all__ = ["prelu"]

_rrelu = torch.ops.aten.rrelu_with_noise
_rrelu_ = torch.ops.aten.rrelu_with_noise_


def prelu(
    input: Tensor,
    weight: Tensor,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.prelu and save the input's signs and negative part.

    The signs of n elements take `4 * ceil(n / 32)` bytes, and the input's gradient equals torch's to the bit. If the
    weight needs a gradient, min(input, 0) is saved quantized; its gradient is exact in expectation. Other arguments and
    errors are those of `linear`.

    Args:
        input: (N, C, ...), floating.
        weight: (1,) or (C,), the slopes for negative elements.
    """
    quantizer = quantizer_of(bits, group_size, quantizer)
    if not is_differentiated(input, weight):
        return torch_functional.prelu(input, weight)
    return _PReLU.apply(input, weight, quantizer)


class _PReLU(SavingFunction):
    @staticmethod
    def forward(ctx, x, weight, quantizer):
        y = with_torch_casts(torch_functional.prelu, x, weight)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.shape = tuple(weight.shape)
        cast = x.to(y.dtype)
        sign = integers.pack(cast > 0, 2) if needs_x else None
        negative = quantizer.quantize(cast.clamp(max=0), shared=False) if needs_weight else None
        weight = weight if needs_x else None
        return copies.keep(ctx, y, weight=weight, sign=sign, negative=negative)

    @staticmethod
    def backward(ctx, grad):
        kept = copies.Kept(ctx)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = grad_weight = positive = None
        if needs_x:
            positive = kept.values("sign")
            # For the view, Inductor makes C++ code that does not compile. The comparison costs little, because it is
            # fused.
            is_traced = torch.compiler.is_compiling()
            positive = positive > 0 if is_traced else positive.view(torch.bool)
            slope = _broadcast(kept.tensor("weight", grad.dtype), grad)
            grad_x = torch.where(positive, grad, slope * grad)
        if needs_weight:
            product = kept.values("negative", grad.dtype) * grad
            if positive is not None:
                # Products of positive inputs are 0 in the mean over the rounding. Setting them to 0 removes their
                # noise.
                product = product.masked_fill_(positive, 0)
            is_one = ctx.shape in ((), (1,))
            total = product.sum() if is_one else sums.over_channels(product)
            grad_weight = total.reshape(ctx.shape)
        return grad_x, grad_weight, None

    observed = "negative"

    @staticmethod
    def gradient_errors(ctx, kept, grad, results, errors):
        """Return the error of the weight's gradient, the sum of g min(x, 0).

        With g at the negative elements, D = |g|^2 dx^2 in a rotated copy. In a uniform copy, and that of a slot codec,
        only negative elements have errors, and D is multiplied by (elements) / (negative elements).
        """
        dims = tuple(range(grad.dim()))
        has_signs = ctx.needs_input_grad[0]
        spec, _ = kept.copy("negative")
        spec = spec.inner if isinstance(spec, RearrangedSpec) else spec
        is_rotated = isinstance(spec, QuantizedTensorSpec) and spec.kind != UNIFORM
        cost = gradient_errors.weight_cost
        if is_rotated and not has_signs:
            numbers = gradient_errors.squares(grad, dims).flatten()
            return [gradient_errors.ErrorOfGradient(1, (numbers,), cost)]
        if has_signs:
            is_negative = ~kept.values("sign").view(torch.bool)
        else:
            is_negative = kept.values("negative") < 0
        grad2 = gradient_errors.squares(grad * is_negative, dims).sum()
        if not is_rotated:
            grad2 = grad2 / is_negative.sum().clamp(min=1) * grad.numel()
        return [gradient_errors.ErrorOfGradient(1, (grad2[None],), cost)]


def _broadcast(weight, x):
    if weight.numel() == 1:
        return weight.reshape(())
    return weight.reshape(-1, *[1] * (x.dim() - 2))


class RandomSlopes(SavingFunction):
    """torch's RReLU in training, which saves signs and the state of torch's random generator, and draws the slopes again."""

    @staticmethod
    def forward(ctx, x, lower, upper, inplace):
        # torch compares in the same way: it draws a slope for 0, but not for NaN.
        saved = integers.pack(~(x <= 0), 2)
        ctx.bounds = lower, upper
        ctx.like = {"size": x.shape, "dtype": x.dtype, "device": x.device}
        copies.keep(ctx, x, positive=saved, state=state_of(x))
        if inplace:
            ctx.mark_dirty(x)
        slopes = torch.empty(**ctx.like)
        return (_rrelu_ if inplace else _rrelu)(x, slopes, *ctx.bounds, True)

    @staticmethod
    def backward(ctx, grad):
        refuse_batches("rrelu in training", (grad,), transforms_only=True)
        kept = copies.Kept(ctx)
        # Contiguous, because torch draws and reads slopes in logical order.
        sign, slopes = torch.empty(**ctx.like), torch.empty(**ctx.like)
        sign.copy_(kept.values("positive")).mul_(2).sub_(1)
        with replayed(sign, kept.tensor("state")):
            _rrelu_(sign, slopes, *ctx.bounds, True)
        return grad * slopes, None, None, None
