"""Batch, instance and synchronized batch norm, whose normalized input is saved quantized."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.autograd import Function
from torch.nn.modules._functions import SyncBatchNorm as TorchSyncBatchNorm

from fewbit.config import DEFAULT_BITS, GROUP_SIZE
from fewbit.functional.layer_norm import (
    contiguous,
    is_served,
    per_channel,
    quantizer_for,
    save_and_share,
    shape_of_channels,
    weighted,
)
from fewbit.runtime.format import layout, sums
from fewbit.runtime.format.channels import Statistics
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.probes import gradient_errors
from fewbit.runtime.quantizers import copies
from fewbit.runtime.quantizers.normalized import (
    batch_norm_gradients,
    constant_like,
    dequantize_copies,
    input_gradient,
    save_copies,
)
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.saved.saving_function import SavingFunction, is_differentiated

__all__ = ["batch_norm", "instance_norm"]


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
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.batch_norm and save the normalized input quantized.

    The gradients are as exact as those of `layer_norm`. If `training` is False, nothing is quantized, and the input is
    saved only if the weight needs a gradient. Other arguments are those of torch's function and of `layer_norm`.

    Args:
        input: (N, C, *), floating. Saved as in `linear`, with a reciprocal standard deviation for each channel.
        running_mean: (C,), or None, like `running_var`, `weight` and `bias`.

    Raises:
        InputError: `bits`, `group_size` or `copies` is invalid.
    """
    quantizer = quantizer_for(quantizer, bits, group_size, copies)
    vectors = running_mean, running_var, *contiguous(weight, bias)
    served = is_served(input, weight, bias) and input.ndim >= 2
    # If the running statistics need a gradient, torch's own function raises an error.
    if not served or _are_differentiated(running_mean, running_var):
        return torch_functional.batch_norm(input, *vectors, training, momentum, eps)
    if not training:
        if weight is not None and weight.requires_grad:
            return torch_functional.batch_norm(input, *vectors, False, momentum, eps)
        return _FrozenBatchNorm.apply(input, *vectors, eps)
    torch_functional._verify_batch_size(input.shape)
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
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.instance_norm of an input (N, C, *) and save the normalized input quantized.

    As in torch, this is the batch norm of one sample with N * C channels. Arguments and the exactness of the gradients are as in `batch_norm`.
    """
    quantizer = quantizer_for(quantizer, bits, group_size, copies)
    vectors = running_mean, running_var, weight, bias
    served = use_input_stats and is_served(input, weight, bias) and input.dim() > 2
    # If the running statistics need a gradient, torch's own function raises an error.
    if not served or _are_differentiated(running_mean, running_var):
        return torch_functional.instance_norm(input, *vectors, use_input_stats, momentum, eps)
    torch_functional._verify_spatial_size(input.size())
    n, c = input.shape[:2]
    mean, var, weight, bias = (None if vector is None else vector.repeat(n) for vector in vectors)
    if input.dtype.itemsize > 2:  # torch accepts running statistics of any dtype here
        mean, var = (None if stat is None else stat.to(input.dtype) for stat in (mean, var))
    x = input.contiguous()
    view = 1, n * c, *x.shape[2:]
    y = _train_batch_norm(x, view, mean, var, weight, bias, momentum, eps, copies, quantizer)
    for running, repeated in ((running_mean, mean), (running_var, var)):
        if running is not None:
            running.detach().copy_(repeated.view(n, c).mean(0))
    return y.view(input.shape)


def _are_differentiated(*vectors) -> bool:
    for vector in vectors:
        if vector is not None and vector.requires_grad:
            return True
    return False


def _train_batch_norm(x, view, mean, var, weight, bias, momentum, eps, copies, quantizer):
    if not torch.compiler.is_compiling():
        arguments = view, mean, var, weight, bias, momentum, eps, copies, quantizer
        return _BatchNormFunction.apply(x, *arguments)[0]
    # Dynamo would put a symbolic eps into the graph of the Function, where the statistics below could not use it.
    eps = torch.fx.experimental.symbolic_shapes.guard_scalar(eps)
    # A compiler cannot trace in-place changes inside a Function, so the running statistics are updated below.
    arguments = view, None, None, weight, bias, momentum, eps, copies, quantizer
    y, batch_mean, rstd = _BatchNormFunction.apply(x, *arguments)
    if mean is not None:
        count = x.numel() / batch_mean.numel()
        batch_var = (1.0 / rstd.square() - eps) * (count / (count - 1))
        mean.lerp_(batch_mean.to(mean.dtype), momentum)
        var.lerp_(batch_var.to(var.dtype), momentum)
    return y


class _BatchNormFunction(SavingFunction):
    @staticmethod
    def forward(
        ctx,
        x,
        view,
        running_mean,
        running_var,
        weight,
        bias,
        momentum,
        eps,
        number_of_copies,
        quantizer,
    ):
        vectors = weight, bias, running_mean, running_var
        viewed = _as(x, view)
        reserve, ctx.implementation = None, None
        if torch.compiler.is_compiling():
            y, mean, rstd = torch.native_batch_norm(viewed, *vectors, True, momentum, eps)
        else:
            # Otherwise each backward pass would fill zeros for the gradients of mean and rstd, which get none.
            ctx.set_materialize_grads(False)
            cudnn = torch.backends.cudnn.enabled
            y, mean, rstd, reserve, ctx.implementation = torch._batch_norm_impl_index(
                viewed, *vectors, True, momentum, eps, cudnn
            )
        ctx.view, ctx.eps, ctx.dtype = view, eps, x.dtype
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[4]:
            if view == x.shape:
                ctx.inner = _channel_stride(x)
                statistics = Statistics(mean, rstd, ctx.inner, shape_of_channels(x.dim()))
                settings = weight, bias, number_of_copies, quantizer
                saved = save_and_share(x, y, statistics, *settings, channels=1)
            else:  # an instance norm has a mean for each channel of each sample
                ctx.inner = math.prod(x.shape[2:])
                shape = *x.shape[:2], *[1] * (x.dim() - 2)
                statistics = Statistics(mean, rstd, ctx.inner, shape)
                saved = save_copies(x, statistics, number_of_copies, quantizer)
            others = {"rstd": rstd, "weight": weight, "reserve": reserve}
            y = copies.keep(ctx, y, **others, x=saved[0], x2=saved[1])
        ctx.mark_non_differentiable(mean, rstd)
        return y, mean, rstd

    @staticmethod
    def backward(ctx, grad, *_):
        if grad is None:  # a layer after this one returned no gradient
            return (None,) * 10
        needs_x, _, _, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if needs_x or needs_weight:
            kept = copies.Kept(ctx)
            rstd, weight = kept.tensor("rstd"), kept.tensor("weight")
            grads, is_eager = None, ctx.implementation is not None
            (spec, tensors), has_one_copy = kept.copy("x"), kept.copy("x2") is None
            if is_eager and has_one_copy and grad.dtype == ctx.dtype and ctx.view == spec.size:
                of = spec, tensors, ctx.inner
                grads = batch_norm_gradients(*of, grad, rstd, weight, needs_x)
            if grads is None:
                grads = _dequantized_gradients(ctx, grad, kept, rstd, weight, has_one_copy)
            grad_x, grad_weight, grad_bias = grads
            if needs_x and ctx.view != spec.size:
                grad_x = grad_x.reshape(spec.size)
            grad_x = grad_x if needs_x else None
            grad_weight = grad_weight if needs_weight else None
            grad_bias = grad_bias if needs_bias else None
        elif needs_bias:
            grad_bias = sums.over_channels(grad)
        return grad_x, None, None, None, grad_weight, grad_bias, None, None, None, None

    @staticmethod
    def gradient_errors(ctx, kept, grad, results, errors):
        """Return the errors in docs/concepts/theory/ac_gc.md, section 6."""
        rstd, weight, (spec, _) = kept.tensor("rstd"), kept.tensor("weight"), kept.copy("x")
        dims = [dim for dim in range(grad.dim()) if dim != 1]
        samples, channels, *_ = spec.size
        # An instance norm repeats the weight for each sample.
        is_whole = ctx.view == spec.size
        numbers = gradient_errors.by_rows(
            grad.reshape(spec.size), errors, channels if is_whole else 1
        )
        of_weight = (numbers,), gradient_errors.weight_cost, 1 if is_whole else samples
        found = [gradient_errors.ErrorOfGradient(4, *of_weight)]
        if ctx.needs_input_grad[0]:
            x = kept.values("x").reshape(ctx.view)
            g = gradient_errors.product(grad, per_channel(weight, grad.dim()), x)
            rstd = per_channel(rstd, grad.dim())
            found.append(gradient_errors.of_norm_input(x, g, rstd, dims, is_whole))
        return found


def _dequantized_gradients(ctx, grad, kept, rstd, weight, has_one_copy: bool):
    needs_x, _, _, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    x = kept.values("x", ctx.dtype)
    mask = [needs_x and has_one_copy, needs_weight, needs_bias]
    scale, zeros, ones = _as_normalized(weight, rstd)
    statistics = scale, None, None, zeros, ones, True, ctx.eps, mask
    if ctx.implementation is None:
        grads = torch.ops.aten.native_batch_norm_backward(grad, _as(x, ctx.view), *statistics)
    else:
        grads = torch.ops.aten._batch_norm_impl_index_backward(
            ctx.implementation, _as(x, ctx.view), grad, *statistics, kept.tensor("reserve")
        )
    if not needs_x or has_one_copy:
        return grads
    g = weighted(grad, per_channel(weight, grad.dim()))
    dims = [dim for dim in range(grad.dim()) if dim != 1]
    first, second = (_as(x, ctx.view) for x in dequantize_copies(kept))
    grad_x = input_gradient(g, first, second, per_channel(rstd, grad.dim()), dims)
    return grad_x, *grads[1:]


def _as_normalized(weight, rstd):
    """Return (weight * rstd, means, reciprocal standard deviations), for torch's backward functions and the normalized input."""
    if rstd.dtype.itemsize < 4:
        rstd = rstd.to(torch.float32)
    scale = weighted(rstd, weight)
    return scale, constant_like(scale, 0.0), constant_like(scale, 1.0)


def _as(x, view):
    """Return x viewed in another shape; x itself if it has the shape: a view may change strides of dimensions of size 1."""
    return x if x.shape == view else x.view(view)


def _channel_stride(x) -> int | None:
    """Return how many consecutive elements, in storage order, have the same channel; None for other memory formats."""
    if x.is_contiguous():
        return math.prod(x.shape[2:])
    return 1 if x.is_contiguous(memory_format=suggest_memory_format(x)) else None


class _FrozenBatchNorm(Function):
    """Batch norm with running statistics and a frozen weight, which does not save the input."""

    @staticmethod
    def forward(ctx, x, running_mean, running_var, weight, bias, eps):
        ctx.eps = eps
        ctx.bias_dtype = bias.dtype if ctx.needs_input_grad[4] else None
        needed = (running_var, weight) if ctx.needs_input_grad[0] else (None, None)
        ctx.save_for_backward(*needed)
        vectors = running_mean, running_var, weight, bias
        return torch_functional.batch_norm(x, *vectors, False, 0.0, eps)

    @staticmethod
    def backward(ctx, grad):
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            running_var, weight = ctx.saved_tensors
            factor = weighted(torch.rsqrt(running_var + ctx.eps), weight)
            grad_x = grad * per_channel(factor, grad.dim()).to(grad.dtype)
        if ctx.needs_input_grad[4]:
            grad_bias = sums.over_channels(grad).to(ctx.bias_dtype)
        return grad_x, None, None, None, grad_bias, None


def sync_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    momentum: float,
    process_group,
    *,
    quantizer: Quantizer,
) -> Tensor:
    """Compute torch.nn.SyncBatchNorm in training, in a group of two processes or more.

    The normalized input is saved quantized, with a reciprocal standard deviation for each channel and the number of elements of each process.
    Gradients are as exact as those of `batch_norm` with `copies=1`. The input is (N, C, *); other tensors are (C,) or None.
    """
    vectors = weight, bias, running_mean, running_var
    if not is_differentiated(input, weight, bias):
        # Even without gradients the processes synchronize their statistics.
        size = process_group.size()
        return TorchSyncBatchNorm.apply(input, *vectors, eps, momentum, process_group, size)
    return _SyncBatchNorm.apply(input, *vectors, eps, momentum, process_group, quantizer)


class _SyncContext:
    """A replacement for the autograd context, with the one method that torch's SyncBatchNorm calls in forward."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


class _SyncBatchNorm(SavingFunction):
    backward_has_collectives = True

    @staticmethod
    def forward(
        ctx, x, weight, bias, running_mean, running_var, eps, momentum, process_group, quantizer
    ):
        context = _SyncContext()
        vectors = weight, bias, running_mean, running_var
        y = TorchSyncBatchNorm.forward(
            context, x, *vectors, eps, momentum, process_group, process_group.size()
        )
        _, weight, mean, rstd, count = context.saved_tensors
        ctx.process_group = process_group
        saved = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            statistics = Statistics(mean, rstd, None, shape_of_channels(x.dim()))
            saved = quantizer.quantize_normalized(x, statistics)
        ctx.size, ctx.dtype = tuple(x.shape), x.dtype
        return copies.keep(ctx, y, weight=weight, rstd=rstd, count=count, x=saved)

    @staticmethod
    def backward(ctx, grad):
        kept, context = copies.Kept(ctx), _SyncContext()
        # If only the bias needs a gradient, only the input's shape matters.
        x = grad.new_zeros(()).expand(ctx.size)
        if kept.copy("x") is not None:
            x = kept.values("x", ctx.dtype)
            # torch's layer, too, makes inputs contiguous that are not channels-last.
            x = x if layout.is_channels_last(x) else x.contiguous()
        scale = _as_normalized(kept.tensor("weight"), kept.tensor("rstd"))
        context.saved_tensors = x, *scale, kept.tensor("count")
        context.process_group, context.needs_input_grad = ctx.process_group, ctx.needs_input_grad
        return TorchSyncBatchNorm.backward(context, grad)
