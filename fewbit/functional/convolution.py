"""Convolutions, whose inputs are saved quantized for the weight's gradient (ActNN, Chen et al., ICML 2021)."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from fewbit.config import DEFAULT_BITS, GROUP_SIZE
from fewbit.runtime.format import sums
from fewbit.runtime.format.windows import per_dim
from fewbit.runtime.interop.autocast import with_torch_casts
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.probes import gradient_errors
from fewbit.runtime.quantizers import copies
from fewbit.runtime.quantizers.quantizer import Quantizer, quantizer_of
from fewbit.runtime.saved.saving_function import SavingFunction, is_differentiated

__all__ = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
]


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.conv1d and save the input quantized.

    The gradients of input and bias are exact. The weight's gradient is exact in expectation (ActNN, long version,
    appendix B.1). If the weight needs no gradient, the input is not saved. Other arguments are those of torch's function
    and of `linear`.

    Args:
        input: (N, C, L) or (C, L), float32, float64, float16 or bfloat16. Saved as in `linear`.
        weight: (out, C / groups, kernel).
        bias: (out,), or None.

    Returns:
        (N, out, L') or (out, L').

    Raises:
        InputError: `bits` or `group_size` is invalid.
    """
    settings = stride, padding, dilation, False, 0, groups
    return _convolve(1, input, weight, bias, settings, quantizer_of(bits, group_size, quantizer))


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.conv2d of (N, C, H, W) or (C, H, W), and save the input as in `conv1d`."""
    settings = stride, padding, dilation, False, 0, groups
    return _convolve(2, input, weight, bias, settings, quantizer_of(bits, group_size, quantizer))


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.conv3d of (N, C, D, H, W) or (C, D, H, W), and save the input as in `conv1d`."""
    settings = stride, padding, dilation, False, 0, groups
    return _convolve(3, input, weight, bias, settings, quantizer_of(bits, group_size, quantizer))


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.conv_transpose1d with a weight (C, out / groups, kernel), and save the input as in `conv1d`."""
    settings = stride, padding, dilation, True, output_padding, groups
    return _convolve(1, input, weight, bias, settings, quantizer_of(bits, group_size, quantizer))


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.conv_transpose2d with a weight (C, out / groups, kH, kW), and save the input as in `conv1d`."""
    settings = stride, padding, dilation, True, output_padding, groups
    return _convolve(2, input, weight, bias, settings, quantizer_of(bits, group_size, quantizer))


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.conv_transpose3d with a weight (C, out / groups, kD, kH, kW), and save the input as in `conv1d`."""
    settings = stride, padding, dilation, True, output_padding, groups
    return _convolve(3, input, weight, bias, settings, quantizer_of(bits, group_size, quantizer))


def _convolve(dims, x, weight, bias, settings, quantizer):
    stride, padding, dilation, transposed, output_padding, groups = settings
    is_text = isinstance(padding, str)
    served = is_differentiated(x, weight, bias) and x.ndim in (dims + 1, dims + 2)
    if is_text:
        same = padding == "same" and set(per_dim(stride, dims)) == {1}
        served = served and not transposed and (padding == "valid" or same)
    if not served:
        return _by_torch(dims, x, weight, bias, *settings)
    stride, dilation = per_dim(stride, dims), per_dim(dilation, dims)
    output_padding = per_dim(output_padding, dims)
    if is_text:
        x, padding = _padded(x, weight, padding, dilation)
    settings = stride, per_dim(padding, dims), dilation, transposed, output_padding, groups
    if x.ndim == weight.ndim:
        return _Convolution.apply(x, weight, bias, settings, quantizer)
    # torch, too, treats an unbatched input as a batch of one sample.
    return _Convolution.apply(x.unsqueeze(0), weight, bias, settings, quantizer).squeeze(0)


def _padded(x, weight, padding: str, dilation):
    """Pad the ends of x if "same" pads more there than at the starts; return x and the remaining padding of both ends."""
    if padding == "valid":
        return x, (0,) * len(dilation)
    total = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
    extra = [amount % 2 for amount in total]
    if any(extra):
        x = torch_functional.pad(x, [n for one in reversed(extra) for n in (0, one)])
    return x, tuple(amount // 2 for amount in total)


def _by_torch(dims, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """Compute a convolution with torch's function for `dims` dimensions, because autocast ignores torch.convolution."""
    if transposed:
        function = getattr(torch_functional, f"conv_transpose{dims}d")
        return function(x, weight, bias, stride, padding, output_padding, groups, dilation)
    function = getattr(torch_functional, f"conv{dims}d")
    return function(x, weight, bias, stride, padding, dilation, groups)


class _Convolution(SavingFunction):
    @staticmethod
    def forward(ctx, x, weight, bias, settings, quantizer):
        y = with_torch_casts(_by_torch, weight.ndim - 2, x, weight, bias, *settings)
        ctx.settings = settings
        ctx.size = tuple(x.shape)
        ctx.has_bias = bias is not None
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        saved = quantizer.quantize_input(x, (1 - x.ndim,), needs_x) if needs_weight else None
        # The weight's gradient needs the weight too, for its shape.
        return copies.keep(ctx, y, weight=weight, x=saved)

    @staticmethod
    def backward(ctx, grad):
        kept = copies.Kept(ctx)
        needs = ctx.needs_input_grad[:3]
        if not (needs[0] or needs[1]):
            return None, None, sums.over_channels(grad), None, None
        if needs[1]:
            x = kept.values("x", grad.dtype)
        else:
            x = grad.new_zeros(()).expand(ctx.size)  # only its shape matters
        bias_size = [grad.shape[1]] if ctx.has_bias else None
        grads = torch.ops.aten.convolution_backward(
            grad, x, kept.tensor("weight", grad.dtype), bias_size, *ctx.settings, needs
        )
        return *grads, None, None

    @staticmethod
    def gradient_errors(ctx, kept, grad, results, errors):
        """Return the error in docs/concepts/theory/ac_gc.md, sections 4 and 5."""
        stride, _, dilation, transposed, _, groups = ctx.settings
        taps = kept.tensor("weight").shape[2:]
        reads = math.prod(taps)
        if transposed:
            of_dims = zip(taps, stride, dilation, ctx.size[2:], strict=True)
            reads = math.prod(most_reads(*of_dim) for of_dim in of_dims)
        numbers = gradient_errors.by_rows(grad, errors, groups), *gradient_errors.scales2(kept)
        finish = partial(weight_cost, reads, ctx.size[1])
        return [gradient_errors.ErrorOfGradient(1, numbers, finish)]


def weight_cost(reads: int, channels: int, entries, _) -> gradient_errors.Cost:
    """Return the cost of the weight's gradient: D = reads * sum over channels of |g of the channel's group|^2 dx^2.

    `reads` elements of the filter meet one element of the input. `entries` are |g|^2 of each group, then the result of
    `gradient_errors.scales2`, if there is a norm.
    """
    grad2, *scales2 = entries
    scales = scales2[0] if scales2 and len(scales2[0]) == channels else None
    if scales is None:
        scales = [gradient_errors.mean_scale2(scales2)] * channels
    per_group = channels // len(grad2)
    by_channel = [scale * grad2[i // per_group] for i, scale in enumerate(scales)]
    return gradient_errors.Cost((reads * sum(by_channel)) ** 0.5, channels=by_channel)


def most_reads(taps: int, stride: int, dilation: int, steps: int) -> int:
    """Return how often at most a filter of `taps` elements reads one element, in one dimension of `steps` positions."""
    return min(-(-taps * math.gcd(stride, dilation) // stride), steps)
