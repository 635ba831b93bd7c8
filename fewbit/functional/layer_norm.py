"""Layer, root-mean-square and group norm, whose normalized input x~ = (x - mean) / s is saved quantized.

All channels and rows of x~ have the same scale, so elements of several of them can be quantized in one group
(docs/decisions/0007). The bias of the input's gradient, and how two copies remove it, are in docs/concepts/layers.md
(ActNN, Chen et al., ICML 2021, long version, appendix B.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from fewbit.config import DEFAULT_BITS, GROUP_SIZE, check_copies
from fewbit.runtime.format import sums
from fewbit.runtime.format.channels import Statistics
from fewbit.runtime.interop.autocast import in_float32
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.interop.tensor_kinds import (
    PLAIN_CLASSES,
    check_tensors,
    is_batched,
    is_plain,
)
from fewbit.runtime.parallel import shards
from fewbit.runtime.probes import gradient_errors
from fewbit.runtime.quantizers import copies, fixed_point_copies
from fewbit.runtime.quantizers.normalized import (
    constant_like,
    dequantize_copies,
    dequantize_scaled,
    input_gradient,
    save_copies,
    share_result,
)
from fewbit.runtime.quantizers.quantizer import Quantizer, quantizer_of
from fewbit.runtime.saved.saving_function import SavingFunction, is_differentiated

__all__ = ["group_norm", "layer_norm", "rms_norm"]

_RMS_NORM_IS_CAST = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")
"""True if autocast makes torch's rms_norm compute in float32 on CUDA. In torch 2.11 it does not."""
_HAS_RMS_NORM_BACKWARD = torch._C._dispatch_has_kernel_for_dispatch_key(
    "aten::_fused_rms_norm_backward", "CUDA"
)
"""True if torch computes the backward of RMS norm on CUDA in one operation."""


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    copies: int = 1,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.layer_norm and save the normalized input quantized.

    The gradient of `bias` is exact, and that of `weight` exact in expectation. The gradient of `input` is exact in
    expectation only with `copies=2`, and otherwise biased (docs/concepts/layers.md#bias). Other arguments are those of
    torch's function and of `linear`.

    Args:
        input: (*, *normalized_shape), floating. Saved as in `linear`, with a reciprocal standard deviation for each
            row.
        weight: a tensor of the shape `normalized_shape`, or None, like `bias`.
        copies: 1 or 2, the number of quantized copies that are saved.

    Raises:
        InputError: `bits`, `group_size` or `copies` is invalid.
    """
    quantizer = quantizer_for(quantizer, bits, group_size, copies)
    shape = _shape(normalized_shape)
    if type(input) not in PLAIN_CLASSES and shards.runs_on_shards(input):
        local = partial(layer_norm, eps=eps, copies=copies, quantizer=quantizer)
        y = shards.norm(
            lambda x, *vectors: local(x, shape, *vectors), input, len(shape), weight, bias
        )
        if y is not None:
            return y
    if not is_served(input, weight, bias):
        return torch_functional.layer_norm(input, normalized_shape, weight, bias, eps)
    weight, bias = contiguous(weight, bias)
    return _LayerNorm.apply(input, shape, weight, bias, eps, copies, quantizer)


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    copies: int = 1,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.rms_norm and save the input divided by its root mean square, quantized.

    A reciprocal root mean square is saved for each row. Arguments and the exactness of gradients are as in `layer_norm`.
    """
    quantizer = quantizer_for(quantizer, bits, group_size, copies)
    shape = _shape(normalized_shape)
    # torch's kernel does not check these shapes.
    check_tensors(input, weight)
    if type(input) not in PLAIN_CLASSES and shards.runs_on_shards(input):
        local = partial(rms_norm, eps=eps, copies=copies, quantizer=quantizer)
        y = shards.norm(lambda x, vector: local(x, shape, vector), input, len(shape), weight)
        if y is not None:
            return y
    fits = input.shape[-len(shape) :] == shape and (weight is None or weight.shape == shape)
    if not fits or not is_served(input, weight):
        return torch_functional.rms_norm(input, normalized_shape, weight, eps)
    x, weight = input, *contiguous(weight)
    if _RMS_NORM_IS_CAST:
        x, weight = map(in_float32, (x, weight))
    return RMSNormFunction.apply(x, shape, weight, eps, None, 0.0, copies, quantizer)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    copies: int = 1,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.group_norm of an input (N, C, *) and save the normalized input quantized.

    A reciprocal standard deviation is saved for each sample and group of channels. `weight` and `bias` are (C,) or
    None. Other arguments and the exactness of gradients are as in `layer_norm`.
    """
    quantizer = quantizer_for(quantizer, bits, group_size, copies)
    served = is_served(input, weight, bias) and input.dim() >= 2
    # If num_groups is not positive or does not divide C, torch's own function raises an error.
    if not served or num_groups <= 0 or input.shape[1] % num_groups:
        if weight is None and bias is not None:
            weight = torch.ones_like(bias)  # torch's backward pass needs a weight
        return torch_functional.group_norm(input, num_groups, weight, bias, eps)
    n, c, *spatial = input.shape
    torch_functional._verify_batch_size([n * c // num_groups, num_groups, *spatial])
    x, weight, bias = map(in_float32, (input, *contiguous(weight, bias)))
    return _GroupNorm.apply(x, num_groups, weight, bias, eps, copies, quantizer)


def quantizer_for(quantizer, bits, group_size, copies) -> Quantizer:
    """Return `quantizer`, or `Quantizer(bits, group_size)` for None. Raise InputError if an argument is invalid."""
    if type(copies) is not int or copies != 1:
        check_copies(copies)
    return quantizer if type(quantizer) is Quantizer else quantizer_of(bits, group_size, quantizer)


def is_served(input, *vectors) -> bool:
    """Return whether a gradient is needed and the input has elements. Otherwise torch's own function runs."""
    if not is_differentiated(input, *vectors):
        return False
    if not torch.compiler.is_compiling():
        return 0 not in input.shape
    # A compiler cannot branch on sizes that it does not know.
    return torch.fx.experimental.symbolic_shapes.guard_or_true(input.numel() > 0)


def contiguous(*vectors) -> tuple[Tensor | None, ...]:
    """Return the vectors in contiguous memory, because torch's kernels ignore strides; None remains None."""
    for vector in vectors:
        if vector is not None and not vector.is_contiguous():
            return tuple([None if each is None else each.contiguous() for each in vectors])
    return vectors


def _shape(normalized_shape) -> tuple[int, ...]:
    if type(normalized_shape) is tuple:
        return normalized_shape
    whole = isinstance(normalized_shape, int)
    return (normalized_shape,) if whole else tuple(normalized_shape)


def weighted(grad, weight):
    return grad if weight is None else grad * weight


def per_channel(vector, dims: int):
    """Reshape a vector (C,) so that it broadcasts to (N, C, ...) with `dims` dimensions; None remains None."""
    return None if vector is None else vector.view(shape_of_channels(dims))


def shape_of_channels(dims: int) -> tuple[int, ...]:
    """Return the shape in which a vector (C,) broadcasts to (N, C, ...) with `dims` dimensions."""
    return 1, -1, *[1] * (dims - 2)


def save_and_share(x, y, statistics, weight, bias, copies, quantizer, channels=None, features=None):
    """Quantize the normalized input of a norm, and let later layers use this copy in place of the norm's result y.

    `channels` is the dimension of y along which weight and bias extend; None for y's last dimensions. Returns the
    SavedTensors of the first copy, and those of the second copy or None.
    """
    rstd = statistics.rstd
    if quantizer.fuse and fixed_point_copies.can_save_fixed_point(x, rstd, weight, bias, copies):
        fixed = fixed_point_copies.save_fixed_point(
            quantizer, x, y, statistics, weight, bias, channels
        )
        return fixed, None
    first, second = save_copies(x, statistics, copies, quantizer, features)
    # Statistics in 16 bits change x~ by more than the rounding of y does, so the copy cannot replace y.
    if rstd.dtype.itemsize > 2:
        share_result(quantizer, y, first, weight, bias, statistics.shape)
    return first, second


def _last(shape) -> tuple[int, ...]:
    return tuple(range(-len(shape), 0))


class _LayerNorm(SavingFunction):
    @staticmethod
    def forward(ctx, x, shape, weight, bias, eps, number_of_copies, quantizer):
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.shape = shape
        needs_x, _, needs_weight, *_ = ctx.needs_input_grad
        if not (needs_x or needs_weight):
            return y
        ctx.inner = math.prod(shape) if x.is_contiguous() else None
        statistics = Statistics(mean, rstd, ctx.inner)
        settings = weight, bias, number_of_copies, quantizer
        saved = save_and_share(x, y, statistics, *settings, features=_last(shape))
        return copies.keep(ctx, y, rstd=rstd, weight=weight, x=saved[0], x2=saved[1])

    @staticmethod
    def backward(ctx, grad):
        needs_x, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if needs_x or needs_weight:
            kept = copies.Kept(ctx)
            rstd, weight = kept.tensor("rstd"), kept.tensor("weight")
            x = dequantize_scaled(kept, rstd, ctx.inner, grad.dtype)
            scale = weight
            if weight is not None and weight.dtype.itemsize < grad.dtype.itemsize:
                scale = weight.to(grad.dtype)  # as autocast did in the forward pass
            has_one_copy = kept.copy("x2") is None
            mask = needs_x and has_one_copy, needs_weight, needs_bias and scale is not None
            # torch reads only the shape, the dtype and the device of the bias, and the weight has the same.
            grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
                grad, x, ctx.shape, constant_like(rstd, 0.0), rstd, scale, scale, mask
            )
            if needs_x and not has_one_copy:
                g = weighted(grad, weight).to(rstd.dtype)
                grad_x = input_gradient(g, *dequantize_copies(kept), rstd, _last(ctx.shape))
        if needs_bias and grad_bias is None:
            grad_bias = sums.over_rows(grad, len(ctx.shape))
        return grad_x, None, grad_weight, grad_bias, None, None, None

    @staticmethod
    def gradient_errors(ctx, kept, grad, results, errors):
        """Return the errors in docs/concepts/theory/ac_gc.md, section 6."""
        return gradient_errors.of_norm(ctx, kept, grad, errors, kept.tensor("weight"))


def _fused_rms_norm(x, shape, weight, eps):
    kernel = torch.ops.aten._fused_rms_norm
    if weight is None or weight.dtype == x.dtype:
        return kernel(x, shape, weight, eps)
    computed = torch.promote_types(x.dtype, torch.float32)
    if eps is None:
        eps = torch.finfo(computed).eps
    wider = torch.promote_types(computed, weight.dtype)
    y, rstd = kernel(x.to(wider), shape, weight.to(wider), eps)
    return y.to(x.dtype), rstd.to(computed)


def _is_fused(grad, weight) -> bool:
    """Return whether torch's kernel, which needs one dtype, computes the backward of RMS norm."""
    is_cuda = _HAS_RMS_NORM_BACKWARD and grad.is_cuda and is_plain(grad)
    return is_cuda and (weight is None or weight.dtype == grad.dtype)


class RMSNormFunction(SavingFunction):
    """RMS norm with the weight plus `offset`, computed by torch, or by `compute`, a function such as `Form.forward` of transformers' norms."""

    @staticmethod
    def forward(ctx, x, shape, weight, eps, compute, offset, number_of_copies, quantizer):
        scale = _shifted(weight, offset) if offset else weight
        y, rstd = compute(x, scale, eps) if compute else _fused_rms_norm(x, shape, weight, eps)
        ctx.shape, ctx.dims = shape, _last(shape)
        ctx.offset, ctx.is_torchs = offset, compute is None
        ctx.inner = math.prod(shape) if x.is_contiguous() else None
        settings = number_of_copies, quantizer, ctx.dims
        first, second = save_copies(x, Statistics(None, rstd, ctx.inner), *settings)
        share_result(quantizer, y, first, scale, None)
        rstd, weight = (rstd, weight) if ctx.needs_input_grad[0] else (None, None)
        return copies.keep(ctx, y, rstd=rstd, weight=weight, x=first, x2=second)

    @staticmethod
    def backward(ctx, grad):
        kept = copies.Kept(ctx)
        rstd, weight = kept.tensor("rstd"), kept.tensor("weight")
        needs_x, _, needs_weight, *_ = ctx.needs_input_grad
        has_one_copy = kept.copy("x2") is None
        if ctx.is_torchs and needs_x and has_one_copy and _is_fused(grad, weight):
            x = dequantize_scaled(kept, rstd, ctx.inner, grad.dtype)
            grad_x, grad_weight = torch.ops.aten._fused_rms_norm_backward(
                grad.contiguous(), x, ctx.shape, rstd, weight, (True, needs_weight)
            )
            return grad_x, None, grad_weight, None, None, None, None, None
        first, second = dequantize_copies(kept)
        grad, grad_x, grad_weight = grad.to(first.dtype), None, None
        if needs_x:
            g = weighted(grad, _shifted(weight, ctx.offset) if ctx.offset else weight)
            grad_x = input_gradient(g, first, second, rstd, ctx.dims, centered=False)
        if needs_weight:
            grad_weight = sums.over_rows(grad * first, len(ctx.shape))
        return grad_x, None, grad_weight, None, None, None, None, None

    @staticmethod
    def gradient_errors(ctx, kept, grad, results, errors):
        """Return the errors in docs/concepts/theory/ac_gc.md, section 6."""
        scale = _shifted(kept.tensor("weight"), ctx.offset)
        return gradient_errors.of_norm(ctx, kept, grad, errors, scale)


def _shifted(weight, offset: float):
    """Return weight + offset; None without a weight. In the hot path, norms without an offset save the call."""
    return offset + weight.float() if offset and weight is not None else weight


class _GroupNorm(SavingFunction):
    @staticmethod
    def forward(ctx, x, num_groups, weight, bias, eps, number_of_copies, quantizer):
        n, c = x.shape[:2]
        ctx.sizes = n, c, x.numel() // (n * c), num_groups
        # torch's own function calls the op with the same memory formats.
        on_cpu = x.device.type == "cpu"
        format = suggest_memory_format(x) if on_cpu else torch.contiguous_format
        y, mean, rstd = torch.native_group_norm(
            x.contiguous(memory_format=format), weight, bias, *ctx.sizes, eps
        )
        ctx.format = format
        needs_x, _, needs_weight, *_ = ctx.needs_input_grad
        if not (needs_x or needs_weight):
            return y
        # A policy may choose a codec of images, which needs the input in its own shape.
        has_policy = quantizer.context is not None and quantizer.context.policy is not None
        ctx.by_group = x.is_contiguous() and is_plain(x) and not has_policy
        rows = x.view(n, num_groups, -1) if ctx.by_group else x
        ctx.inner = math.prod(rows.shape[2:]) if x.is_contiguous() else None
        if ctx.by_group:
            statistics = Statistics(mean, rstd, ctx.inner, (n, num_groups, 1))
        else:
            placed = (_placed(ctx, stat, x.dim()) for stat in (mean, rstd))
            statistics = Statistics(*placed, ctx.inner)
        first, second = save_copies(rows, statistics, number_of_copies, quantizer)
        return copies.keep(ctx, y, rstd=rstd, weight=weight, x=first, x2=second)

    @staticmethod
    def backward(ctx, grad):
        needs_x, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if needs_x or needs_weight:
            kept = copies.Kept(ctx)
            rstd, weight = kept.tensor("rstd"), kept.tensor("weight")
            placed = _placed(ctx, rstd, grad.dim())
            x = dequantize_scaled(kept, placed, ctx.inner, grad.dtype)
            x = x.view(grad.shape) if ctx.by_group else x
            format = torch.contiguous_format if is_batched(grad) else ctx.format
            # If the input's gradient is not requested, torch's channels-last kernel writes to address 0.
            mask = True, needs_weight, needs_bias and weight is not None
            grad_x, grad_weight, grad_bias = torch.ops.aten.native_group_norm_backward(
                grad.contiguous(memory_format=format),
                x.contiguous(memory_format=format),
                constant_like(rstd, 0.0),
                rstd,
                weight,
                *ctx.sizes,
                mask,
            )
            if needs_x and kept.copy("x2") is not None:
                values = dequantize_copies(kept)
                grad_x = _group_gradient(ctx.sizes, grad, *values, rstd, weight)
                grad_x = grad_x.contiguous(memory_format=format)
            grad_x = grad_x if needs_x else None
        if needs_bias and grad_bias is None:
            grad_bias = sums.over_channels(grad)
        return grad_x, None, grad_weight, grad_bias, None, None, None

    @staticmethod
    def gradient_errors(ctx, kept, grad, results, errors):
        weight = per_channel(kept.tensor("weight"), grad.dim())
        return gradient_errors.of_norm(ctx, kept, grad, errors, weight)


def _placed(ctx, statistic, dims):
    """Return a statistic (N, groups) so that it broadcasts to the quantized tensor: the input, or (N, groups, elements)."""
    n, c, _, num_groups = ctx.sizes
    statistic = statistic.view(n, num_groups, 1)
    if ctx.by_group:
        return statistic
    repeated = statistic.expand(n, num_groups, c // num_groups)
    return repeated.reshape(n, c, *[1] * (dims - 2))


def _group_gradient(sizes, grad, first, second, rstd, weight):
    n, c, spatial, num_groups = sizes
    grad = weighted(grad, per_channel(weight, grad.dim()))
    shape = n, num_groups, (c // num_groups) * spatial
    g, first, second = (x.reshape(shape).to(rstd.dtype) for x in (grad, first, second))
    return input_gradient(g, first, second, rstd.view(n, num_groups, 1), (2,)).view(grad.shape)
