"""Linear and bilinear maps, whose inputs are saved quantized for the weight's gradient (ActNN, Chen et al., ICML 2021)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fewbit.config import DEFAULT_BITS, GROUP_SIZE
from fewbit.runtime.format import sums
from fewbit.runtime.interop.autocast import with_torch_casts
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.interop.tensor_kinds import PLAIN_CLASSES, check_tensors, overrides_functions
from fewbit.runtime.parallel import shards
from fewbit.runtime.probes import gradient_errors
from fewbit.runtime.quantizers import computed, copies
from fewbit.runtime.quantizers.quantizer import Quantizer, quantizer_of
from fewbit.runtime.saved.saving_function import SavingFunction, is_differentiated

__all__ = ["bilinear", "linear"]


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.linear and save the input quantized.

    The gradients of input and bias are exact. The weight's gradient is exact in expectation (ActNN, section 3.3). If
    the weight needs no gradient, the input is not saved.

    Args:
        input: (*, in_features), float32, float64, float16 or bfloat16. For n elements `4 * bits * ceil(n / 32)` bytes
            are saved, and 4 bytes for every `group_size` elements.
        weight: (out_features, in_features).
        bias: (out_features,), or None.
        bits: bits per saved element, 1 to 8.
        group_size: the number of elements in a group (docs/concepts/quantizer.md), a multiple of 32.
        quantizer: the kind of quantized copies, "rotated" or "uniform", or None for the usual kind
            (docs/concepts/quantizer.md). A Quantizer may be given instead; then `bits` and `group_size` are ignored.

    Returns:
        (*, out_features).

    Raises:
        InputError: `bits` or `group_size` is invalid.
    """
    if type(quantizer) is not Quantizer:
        quantizer = quantizer_of(bits, group_size, quantizer)
    is_plain = type(input) in PLAIN_CLASSES and type(weight) in PLAIN_CLASSES
    if not is_plain or not (bias is None or type(bias) in PLAIN_CLASSES):
        check_tensors(input, weight, bias)
    usual = weight.ndim == 2 and (bias is None or bias.ndim == 1) and input.ndim > 0
    if is_plain:
        if usual and is_differentiated(input, weight, bias):
            return _Linear.apply(input, weight, bias, quantizer)
        return torch_functional.linear(input, weight, bias)
    if usual and shards.runs_on_shards(input):
        y = shards.linear(partial(linear, quantizer=quantizer), input, weight, bias)
        return torch_functional.linear(input, weight, bias) if y is None else y
    if usual and _is_frozen_and_quantized(weight) and is_differentiated(input, bias):
        return _LinearOfQuantizedWeight.apply(input, weight, bias)
    if not usual or not is_differentiated(input, weight, bias):
        return torch_functional.linear(input, weight, bias)
    return _Linear.apply(input, weight, bias, quantizer)


def bilinear(
    input1: Tensor,
    input2: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.bilinear and save both inputs quantized.

    The bias's gradient is exact. The others are exact in expectation, because each is linear in each dequantized input,
    and the inputs are rounded independently. An input is saved if the other input or the weight needs a gradient. Other
    arguments and errors are those of `linear`.

    Args:
        input1: (*, I), floating.
        input2: (*, J), floating.
        weight: (K, I, J).
        bias: (K,), or None.

    Returns:
        (*, K).
    """
    quantizer = quantizer_of(bits, group_size, quantizer)
    if not is_differentiated(input1, input2, weight, bias):
        return torch_functional.bilinear(input1, input2, weight, bias)
    return _Bilinear.apply(input1, input2, weight, bias, quantizer)


class _Linear(SavingFunction):
    @staticmethod
    def forward(ctx, x, weight, bias, quantizer):
        # torch forbids writing to a view that a Function returns; `data` is no view.
        y = with_torch_casts(torch_functional.linear, x, weight, bias).data
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        saved = quantizer.quantize_input(x, (-1,), needs_x) if needs_weight else None
        y = copies.keep(ctx, y, weight=weight if needs_x else None, x=saved)
        if quantizer.recomputes_linear:
            saved = saved or computed.copy_of(quantizer, x)  # which another layer may have made
            if saved is not None:
                parameters = [parameter for parameter in (weight, bias) if parameter is not None]
                of = saved, *map(copies.unquantized, parameters)
                computed.share_linear(quantizer, ctx, y, _again, *of)
        return y

    @staticmethod
    def backward(ctx, grad):
        kept = copies.Kept(ctx)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows, grad_x, grad_weight = sums.rows(grad), None, None
        if needs_x:
            weight = kept.tensor("weight", grad.dtype)
            grad_x = rows.mm(weight).view(*grad.shape[:-1], weight.shape[1])
        if needs_weight:
            grad_weight = rows.t().mm(sums.rows(kept.values("x", grad.dtype)))
        return grad_x, grad_weight, rows.sum(0) if needs_bias else None, None

    @staticmethod
    def gradient_errors(ctx, kept, grad, results, errors):
        """Return the error in docs/concepts/theory/ac_gc.md, section 3."""
        numbers = gradient_errors.by_rows(grad, errors), *gradient_errors.scales2(kept)
        finish = partial(_weight_cost, results[1].shape[-1])
        return [gradient_errors.ErrorOfGradient(1, numbers, finish)]


def _weight_cost(features, entries, _):
    (grad2,), *scales2 = entries
    return gradient_errors.Cost((grad2 * features * gradient_errors.mean_scale2(scales2)) ** 0.5)


def _again(x, weight, bias=None):
    bias = None if bias is None else bias.to(x.dtype)
    return torch_functional.linear(x, weight.to(x.dtype), bias)


_SETTINGS_OF_INPUTS = {
    "Int8Tensor": ("act_quant_kwargs", "act_pre_scale"),
    "IntxUnpackedToInt8Tensor": ("activation_quantization",),
}
"""{class of torchao: attributes that are None if the layer's input stays unquantized}.

A layer with such a weight computes with weight.dequantize(), a dense tensor that torch would save.
"""


def _is_frozen_and_quantized(weight) -> bool:
    """Return whether the weight is a tensor of torchao that the backward pass can dequantize again."""
    if weight.requires_grad or not overrides_functions(weight) or torch.compiler.is_compiling():
        return False
    names = _SETTINGS_OF_INPUTS.get(type(weight).__name__)
    return names is not None and all(getattr(weight, name, None) is None for name in names)


class _LinearOfQuantizedWeight(SavingFunction):
    @staticmethod
    def forward(ctx, x, weight, bias):
        y = with_torch_casts(torch_functional.linear, x, weight, bias)
        return copies.keep(ctx, y, weight=weight if ctx.needs_input_grad[0] else None)

    @staticmethod
    def backward(ctx, grad):
        weight = copies.Kept(ctx).tensor("weight")
        needs_x, _, needs_bias = ctx.needs_input_grad
        grad_x = grad @ weight.dequantize().to(grad.dtype) if needs_x else None
        return grad_x, None, sums.rows(grad).sum(0) if needs_bias else None


class _Bilinear(SavingFunction):
    @staticmethod
    def forward(ctx, x1, x2, weight, bias, quantizer):
        y = with_torch_casts(torch_functional.bilinear, x1, x2, weight, bias).data
        needs_1, needs_2, needs_weight, *_ = ctx.needs_input_grad
        ctx.sizes = tuple(x1.shape), tuple(x2.shape)
        first = quantizer.quantize(x1, features=(-1,)) if needs_2 or needs_weight else None
        second = (
            quantizer.quantize_independent(x2, x1, features=(-1,))
            if needs_1 or needs_weight
            else None
        )
        weight = weight if needs_1 or needs_2 else None
        return copies.keep(ctx, y, weight=weight, x1=first, x2=second)

    @staticmethod
    def backward(ctx, grad):
        kept = copies.Kept(ctx)
        x1, x2 = kept.values("x1", grad.dtype), kept.values("x2", grad.dtype)
        weight = kept.tensor("weight")
        needs_1, needs_2, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = sums.rows(grad)
        x1, x2 = (x if x is None else sums.rows(x) for x in (x1, x2))
        grad1 = grad2 = grad_weight = grad_bias = None
        if weight is not None:
            weight = weight.to(grad.dtype)
        # As in torch, the result is the product of input1 as (N, 1, I, 1), the weight as (1, K, I, J) and input2 as
        # (N, 1, 1, J), summed over I and J.
        if needs_1:
            grad1 = torch._trilinear(rows, weight, x2, (2, 3), (0,), (1, 2), (1, 3))
            grad1 = grad1.reshape(ctx.sizes[0])
        if needs_2:
            grad2 = torch._trilinear(x1, weight, rows, (1, 3), (0,), (2, 3), (1, 2))
            grad2 = grad2.reshape(ctx.sizes[1])
        if needs_weight:
            grad_weight = torch._trilinear(x1, rows, x2, (1, 3), (2, 3), (1, 2), (0,))
        if needs_bias:
            grad_bias = rows.sum(0)
        return grad1, grad2, grad_weight, grad_bias, None
