"""Normalization with the normalized input kept quantized.

x~ = (x - mean) / s is what is quantized, s being the deviation, not x itself: all channels or rows then have
the same scale and share the ranges of groups well, whatever their offset (docs/decisions/0007). With g the
gradient times the weight and N what a mean is taken over (ActNN, long version, appendix B.2):

    grad = (g - mean(g) - x~ mean(x~ g)) / s

This multiplies two things made from the restored x~^, so it is not linear in it: weight and bias have
gradients that are exact in expectation, the input's is off by

    E[grad^] - grad = -g Var[x~^] / (N s)

elementwise, where Var[x~^] is what rounding adds: f (1 - f) step^2 for an element that lies the fraction f of a
step above a level. `copies=2` keeps two independent copies, which makes the product exact in expectation
at twice the memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.autograd import Function

from fewbit.config import GROUP_SIZE, check_copies
from fewbit.functional import sums
from fewbit.runtime.interop.autocast import in_float32
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.quantizers import preactivation
from fewbit.runtime.quantizers.normalized import (
    dequantize_copies,
    dequantize_scaled,
    input_gradient,
    save_copies,
    share_result,
)
from fewbit.runtime.quantizers.quantizer import (
    DEFAULT_BITS,
    Quantizer,
    is_differentiated,
    quantizer_of,
)
from fewbit.runtime.saved.single_backward import once_differentiable

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"]


def layer_norm(
    input: Tensor,
    normalized_shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    copies: int = 1,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """torch.nn.functional.layer_norm; kept: the input in `bits` bits an element, a mean and a deviation a row.

    input: (*, *normalized_shape), floating; weight, bias: normalized_shape. copies: 2 for an input gradient
    that is exact in expectation. quantizer: in place of bits and group_size. The gradients of weight and
    bias are exact in expectation, that of the input as the module says. Raises InputError for bits, group_size or
    copies that there are not.
    """
    quantizer = _checked(quantizer, bits, group_size, copies)
    if not _is_served(input, weight, bias):
        return torch_functional.layer_norm(input, normalized_shape, weight, bias, eps)
    shape = _shape(normalized_shape)
    weight, bias = _contiguous(weight, bias)
    return _LayerNorm.apply(input, shape, weight, bias, eps, copies, quantizer)


def rms_norm(
    input: Tensor,
    normalized_shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    copies: int = 1,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """torch.nn.functional.rms_norm; kept as in `layer_norm`, without the mean.

    The bias of the input's gradient is the module's formula with the root mean square in place of s.
    """
    quantizer = _checked(quantizer, bits, group_size, copies)
    shape = _shape(normalized_shape)
    # torch's kernel checks neither.
    fits = input.shape[-len(shape) :] == shape and (weight is None or weight.shape == shape)
    if not fits or not _is_served(input, weight):
        return torch_functional.rms_norm(input, normalized_shape, weight, eps)
    x, weight = map(in_float32, (input, *_contiguous(weight)))
    return _RMSNorm.apply(x, shape, weight, eps, copies, quantizer)


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
    quantizer: Quantizer | None = None,
) -> Tensor:
    """torch.nn.functional.group_norm; kept as in `layer_norm`. input: (N, C, *); weight, bias: (C,)."""
    quantizer = _checked(quantizer, bits, group_size, copies)
    served = _is_served(input, weight, bias) and input.dim() >= 2
    if not served or num_groups <= 0 or input.shape[1] % num_groups:  # the last two raise in torch
        if weight is None and bias is not None:
            weight = torch.ones_like(bias)  # torch's backward needs a weight
        return torch_functional.group_norm(input, num_groups, weight, bias, eps)
    n, c, *spatial = input.shape
    torch_functional._verify_batch_size([n * c // num_groups, num_groups, *spatial])
    x, weight, bias = map(in_float32, (input, *_contiguous(weight, bias)))
    return _GroupNorm.apply(x, num_groups, weight, bias, eps, copies, quantizer)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    copies: int = 1,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """torch.nn.functional.batch_norm; kept as in `layer_norm`, with a mean and a deviation a channel.

    input: (N, C, *); the vectors: (C,). With training=False nothing is quantized, and nothing of the input is
    kept unless weight needs a gradient.
    """
    quantizer = _checked(quantizer, bits, group_size, copies)
    vectors = running_mean, running_var, *_contiguous(weight, bias)
    served = _is_served(input, weight, bias) and input.dim() >= 2
    if not served or _are_differentiated(running_mean, running_var):  # torch raises for the last
        return torch_functional.batch_norm(input, *vectors, training, momentum, eps)
    if not training:
        if weight is not None and weight.requires_grad:
            return torch_functional.batch_norm(input, *vectors, False, momentum, eps)
        return _FrozenBatchNorm.apply(input, *vectors, eps)
    torch_functional._verify_batch_size(input.size())
    return _train_batch_norm(input, input.shape, *vectors, momentum, eps, copies, quantizer)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    copies: int = 1,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """torch.nn.functional.instance_norm; kept as in `layer_norm`, with statistics a sample and channel.

    input: (N, C, *). As in torch it is the batch norm of one sample with N C channels.
    """
    quantizer = _checked(quantizer, bits, group_size, copies)
    vectors = running_mean, running_var, weight, bias
    served = use_input_stats and _is_served(input, weight, bias) and input.dim() > 2
    if not served or _are_differentiated(running_mean, running_var):  # torch raises for the last
        return torch_functional.instance_norm(input, *vectors, use_input_stats, momentum, eps)
    torch_functional._verify_spatial_size(input.size())
    n, c = input.shape[:2]
    mean, var, weight, bias = (None if each is None else each.repeat(n) for each in vectors)
    if input.dtype.itemsize > 2:  # torch accepts running statistics of any dtype here
        mean, var = (None if each is None else each.to(input.dtype) for each in (mean, var))
    x = input.contiguous()
    view = 1, n * c, *x.shape[2:]
    y = _train_batch_norm(x, view, mean, var, weight, bias, momentum, eps, copies, quantizer)
    for running, repeated in ((running_mean, mean), (running_var, var)):
        if running is not None:
            running.detach().copy_(repeated.view(n, c).mean(0))
    return y.view(input.shape)


def _checked(quantizer, bits, group_size, copies) -> Quantizer:
    check_copies(copies)
    return quantizer or quantizer_of(bits, group_size)


def _is_served(input, *vectors) -> bool:
    """Return whether the input needs to be quantized. An empty batch does not: torch saves nothing of an empty input."""
    return is_differentiated(input, *vectors) and _has_elements(input)


def _has_elements(input) -> bool:
    """Return whether the input has elements; True for sizes that a compiler does not know, which it cannot branch on."""
    if not torch.compiler.is_compiling():
        return input.numel() > 0
    symbolic = torch.fx.experimental.symbolic_shapes
    if hasattr(symbolic, "guard_or_true"):
        return symbolic.guard_or_true(input.numel() > 0)
    return symbolic.guard_size_oblivious(input.numel() > 0)  # torch < 2.8


def _are_differentiated(*vectors) -> bool:
    return any(vector is not None and vector.requires_grad for vector in vectors)


def _contiguous(*vectors) -> tuple[Tensor | None, ...]:
    """Return contiguous weights and biases, because torch's native kernels ignore their strides."""
    return tuple(None if vector is None else vector.contiguous() for vector in vectors)


def _shape(normalized_shape) -> tuple[int, ...]:
    whole = isinstance(normalized_shape, int)
    return (normalized_shape,) if whole else tuple(normalized_shape)


def _weighted(grad, weight):
    return grad if weight is None else grad * weight


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx, x, shape, weight, bias, eps, copies, quantizer):
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.shape, ctx.dtype = shape, x.dtype
        needs_x, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        ctx.bias_dtype = bias.dtype if needs_bias else None
        kept = ()
        if needs_x or needs_weight:
            inner = math.prod(shape) if x.is_contiguous() else None
            if preactivation.can_save_fixed_point(quantizer, x, rstd, weight, bias, copies):
                fixed = preactivation.save_fixed_point(
                    quantizer, x, y, mean, rstd, inner, weight, bias, None
                )
                tensors, ctx.spec, ctx.inner = fixed.tensors, fixed.spec, inner
            else:
                saved, tensors = save_copies(ctx, x, mean, rstd, inner, copies, quantizer)
                # Statistics of 16 bits shift x~ by more than y's own rounding.
                if rstd.dtype.itemsize > 2:
                    share_result(quantizer, y, saved, weight, bias)
                y = saved.tie(y)
            kept = rstd, weight, *tensors
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        needs_x, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if needs_x or needs_weight:
            rstd, weight, *kept = ctx.saved_tensors
            mask = needs_x and len(kept) == ctx.spec.count, needs_weight, False
            x = dequantize_scaled(ctx, kept, rstd, grad.dtype)
            scale = weight
            if weight is not None and weight.dtype.itemsize < grad.dtype.itemsize:
                scale = weight.to(grad.dtype)  # as autocast had passed it to the forward
            grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
                grad, x, ctx.shape, torch.zeros_like(rstd), rstd, scale, None, mask
            )
            if needs_x and len(kept) > ctx.spec.count:
                dims = tuple(range(-len(ctx.shape), 0))
                g = _weighted(grad, weight).to(rstd.dtype)
                grad_x = input_gradient(g, *dequantize_copies(ctx, kept), rstd, dims)
            grad_x = None if grad_x is None else grad_x.to(ctx.dtype)
            grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        if needs_bias:
            grad_bias = sums.over_rows(grad, len(ctx.shape)).to(ctx.bias_dtype)
        return grad_x, None, grad_weight, grad_bias, None, None, None


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, shape, weight, eps, copies, quantizer):
        y, rstd = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
        ctx.shape, ctx.dtype = shape, x.dtype
        inner = math.prod(shape) if x.is_contiguous() else None
        saved, kept = save_copies(ctx, x, None, rstd, inner, copies, quantizer)
        share_result(quantizer, y, saved, weight, None)
        ctx.save_for_backward(rstd, weight, *kept)
        return saved.tie(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        rstd, weight, *kept = ctx.saved_tensors
        needs_x, _, needs_weight, *_ = ctx.needs_input_grad
        first, second = dequantize_copies(ctx, kept)
        grad = grad.to(rstd.dtype)
        grad_x = grad_weight = None
        if needs_x:
            dims = tuple(range(-len(ctx.shape), 0))
            g = _weighted(grad, weight)
            grad_x = input_gradient(g, first, second, rstd, dims, centered=False).to(ctx.dtype)
        if needs_weight:
            grad_weight = sums.over_rows(grad * first, len(ctx.shape)).to(weight.dtype)
        return grad_x, None, grad_weight, None, None, None


class _GroupNorm(Function):
    @staticmethod
    def forward(ctx, x, num_groups, weight, bias, eps, copies, quantizer):
        n, c = x.shape[:2]
        ctx.sizes = n, c, x.numel() // (n * c), num_groups
        # As torch's own function calls it.
        on_cpu = x.device.type == "cpu"
        format = suggest_memory_format(x) if on_cpu else torch.contiguous_format
        y, mean, rstd = torch.native_group_norm(
            x.contiguous(memory_format=format), weight, bias, *ctx.sizes, eps
        )
        ctx.format, ctx.dtype = format, x.dtype
        needs_x, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        ctx.bias_dtype = bias.dtype if needs_bias else None
        kept = ()
        if needs_x or needs_weight:
            placed = [_of_groups(each, ctx.sizes, x.dim()) for each in (mean, rstd)]
            inner = ctx.sizes[2] if x.is_contiguous() else None
            saved, tensors = save_copies(ctx, x, *placed, inner, copies, quantizer)
            y, kept = saved.tie(y), (rstd, weight, *tensors)
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        needs_x, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if needs_x or needs_weight:
            rstd, weight, *kept = ctx.saved_tensors
            placed = _of_groups(rstd, ctx.sizes, grad.dim())
            x = dequantize_scaled(ctx, kept, placed, grad.dtype)
            # Without the input's gradient torch's channels-last kernel writes to address 0.
            mask = True, needs_weight, False
            grad_x, grad_weight, _ = torch.ops.aten.native_group_norm_backward(
                grad.contiguous(memory_format=ctx.format),
                x.contiguous(memory_format=ctx.format),
                torch.zeros_like(rstd),
                rstd,
                weight,
                *ctx.sizes,
                mask,
            )
            if needs_x and len(kept) > ctx.spec.count:
                grad_x = _group_gradient(
                    ctx.sizes, grad, *dequantize_copies(ctx, kept), rstd, weight
                )
                grad_x = grad_x.contiguous(memory_format=ctx.format)
            grad_x = grad_x.to(ctx.dtype) if needs_x else None
            grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        if needs_bias:
            grad_bias = sums.over_channels(grad).to(ctx.bias_dtype)
        return grad_x, None, grad_weight, grad_bias, None, None, None


def _of_groups(statistic, sizes, dims):
    """(N, groups) as a value for each channel, of a shape that broadcasts to an input of `dims` dimensions."""
    n, c, _, num_groups = sizes
    each = statistic.view(n, num_groups, 1).expand(n, num_groups, c // num_groups)
    return each.reshape(n, c, *[1] * (dims - 2))


def _group_gradient(sizes, grad, first, second, rstd, weight):
    n, c, spatial, num_groups = sizes
    if weight is not None:
        grad = grad * weight.view(1, -1, *[1] * (grad.dim() - 2))
    shape = n, num_groups, (c // num_groups) * spatial
    g, first, second = (each.reshape(shape).to(rstd.dtype) for each in (grad, first, second))
    return input_gradient(g, first, second, rstd.view(n, num_groups, 1), (2,)).view(grad.shape)


def _train_batch_norm(x, view, mean, var, weight, bias, momentum, eps, copies, quantizer):
    """batch_norm of x seen as `view`, with the statistics of that; x is quantized as it comes."""
    if not torch.compiler.is_compiling():
        arguments = view, mean, var, weight, bias, momentum, eps, copies, quantizer
        return _BatchNorm.apply(x, *arguments)[0]
    # Dynamo places a symbolic eps in the graph that uses it first, which must not be that of the Function.
    eps = eps + 0.0
    # A compiler follows no in-place change inside a Function.
    arguments = view, None, None, weight, bias, momentum, eps, copies, quantizer
    y, batch_mean, rstd = _BatchNorm.apply(x, *arguments)
    if mean is not None:
        count = x.numel() / batch_mean.numel()
        batch_var = (1.0 / rstd.square() - eps) * (count / (count - 1))
        mean.lerp_(batch_mean.to(mean.dtype), momentum)
        var.lerp_(batch_var.to(var.dtype), momentum)
    return y


class _BatchNorm(Function):
    """(y, mean, 1 / deviation)."""

    @staticmethod
    def forward(
        ctx, x, view, running_mean, running_var, weight, bias, momentum, eps, copies, quantizer
    ):
        vectors = weight, bias, running_mean, running_var
        seen = _as(x, view)
        reserve, ctx.implementation = None, None
        if torch.compiler.is_compiling():
            y, mean, rstd = torch.native_batch_norm(seen, *vectors, True, momentum, eps)
        else:
            cudnn = torch.backends.cudnn.enabled
            y, mean, rstd, reserve, ctx.implementation = torch._batch_norm_impl_index(
                seen, *vectors, True, momentum, eps, cudnn
            )
        ctx.view, ctx.eps, ctx.dtype = view, eps, x.dtype
        needs_x, needs_weight, needs_bias = (ctx.needs_input_grad[i] for i in (0, 4, 5))
        ctx.bias_dtype = bias.dtype if needs_bias else None
        kept = ()
        if needs_x or needs_weight:
            placed = [_of_channels(each, view, x.shape) for each in (mean, rstd)]
            inner = _channel_stride(x) if view == x.shape else math.prod(x.shape[2:])
            fuses = preactivation.can_save_fixed_point(quantizer, x, rstd, weight, bias, copies)
            if fuses and view == x.shape:
                fixed = preactivation.save_fixed_point(
                    quantizer, x, y, *placed, inner, weight, bias, 1
                )
                tensors, ctx.spec, ctx.inner = fixed.tensors, fixed.spec, inner
            else:
                saved, tensors = save_copies(ctx, x, *placed, inner, copies, quantizer)
                if view == x.shape and rstd.dtype.itemsize > 2:
                    share_result(quantizer, y, saved, weight, bias, (1, -1, *[1] * (x.dim() - 2)))
                y = saved.tie(y)
            kept = rstd, weight, reserve, *tensors
        ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(mean, rstd)
        return y, mean, rstd

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        needs_x, needs_weight, needs_bias = (ctx.needs_input_grad[i] for i in (0, 4, 5))
        grad_x = grad_weight = grad_bias = None
        if needs_x or needs_weight:
            rstd, weight, reserve, *kept = ctx.saved_tensors
            size = ctx.spec.size
            x = dequantize_scaled(ctx, kept, _of_channels(rstd, ctx.view, size), ctx.dtype)
            mask = [needs_x and len(kept) == ctx.spec.count, needs_weight, False]
            means = torch.zeros_like(rstd)
            statistics = weight, None, None, means, rstd, True, ctx.eps, mask
            if ctx.implementation is None:
                grads = torch.ops.aten.native_batch_norm_backward(
                    grad, _as(x, ctx.view), *statistics
                )
            else:
                grads = torch.ops.aten._batch_norm_impl_index_backward(
                    ctx.implementation, _as(x, ctx.view), grad, *statistics, reserve
                )
            grad_x, grad_weight, _ = grads
            if needs_x and len(kept) > ctx.spec.count:
                shape = 1, -1, *[1] * (grad.dim() - 2)
                g = grad if weight is None else grad * weight.view(shape)
                dims = [dim for dim in range(grad.dim()) if dim != 1]
                first, second = (_as(each, ctx.view) for each in dequantize_copies(ctx, kept))
                grad_x = input_gradient(g, first, second, rstd.view(shape), dims)
            grad_x = grad_x.to(ctx.dtype).reshape(size) if needs_x else None
            grad_weight = grad_weight.to(weight.dtype) if needs_weight else None
        if needs_bias:
            grad_bias = sums.over_channels(grad).to(ctx.bias_dtype)
        return grad_x, None, None, None, grad_weight, grad_bias, None, None, None, None


def _as(x, view):
    """x seen as `view`; itself if it has that shape, as a view may change strides of dimensions of size 1."""
    return x if x.shape == view else x.view(view)


def _of_channels(statistic, view, shape):
    """A value a channel of `view`, of a shape that broadcasts to `shape`, of which view is a view."""
    placed = (1, -1) if view == shape else shape[:2]
    return statistic.view(*placed, *[1] * (len(shape) - 2))


def _channel_stride(x) -> int | None:
    """How many elements in storage order have the same channel in a row; None for other layouts."""
    if x.is_contiguous():
        return math.prod(x.shape[2:])
    return 1 if x.is_contiguous(memory_format=suggest_memory_format(x)) else None


class _FrozenBatchNorm(Function):
    """Batch norm with running statistics and a frozen weight: the gradient needs nothing of the input."""

    @staticmethod
    def forward(ctx, x, running_mean, running_var, weight, bias, eps):
        ctx.eps = eps
        ctx.bias_dtype = bias.dtype if ctx.needs_input_grad[4] else None
        ctx.save_for_backward(*((running_var, weight) if ctx.needs_input_grad[0] else ()))
        vectors = running_mean, running_var, weight, bias
        return torch_functional.batch_norm(x, *vectors, False, 0.0, eps)

    @staticmethod
    def backward(ctx, grad):
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            running_var, weight = ctx.saved_tensors
            factor = _weighted(torch.rsqrt(running_var + ctx.eps), weight)
            shape = 1, -1, *[1] * (grad.dim() - 2)
            grad_x = grad * factor.view(shape).to(grad.dtype)
        if ctx.needs_input_grad[4]:
            grad_bias = sums.over_channels(grad).to(ctx.bias_dtype)
        return grad_x, None, None, None, grad_bias, None
