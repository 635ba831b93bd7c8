"""Pooling that keeps of its input nothing, or the place of each maximum in its window.

Every function has the signature of torch.nn.functional's and its value. Their gradients are
torch's, to the bit. torch keeps the whole input, for its size alone, and for max-pooling an int64
an output as well.

Max-pooling, the adaptive one too, keeps for n outputs of windows of k elements, b = ceil(log2 k),

    0 bytes                     k = 1
    4 * b * ceil(n / 32)        k <= 256
    2 * n                       k <= 32768, else 4 * n

An adaptive window has as many elements as the longest along each dimension. Average pooling keeps
nothing. Inputs are floating, (N, C, ...) or (C, ...), channels-last or not. What torch refuses,
torch refuses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from fewbit.runtime.format import layout
from fewbit.runtime.format.windows import Windows
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.quantizers import integers
from fewbit.runtime.quantizers.quantizer import is_differentiated
from fewbit.runtime.saved.single_backward import once_differentiable

__all__ = [
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
]

_aten = torch.ops.aten


# -- max-pooling -----------------------------------------------------------------------------------


def max_pool1d(
    input: Tensor,
    kernel_size,
    stride=None,
    padding=0,
    dilation=1,
    ceil_mode: bool = False,
    return_indices: bool = False,
):
    """torch.nn.functional.max_pool1d. input: (N, C, L) or (C, L)."""
    arguments = kernel_size, stride, padding, dilation, ceil_mode
    return _max_pool(1, input, arguments, return_indices)


def max_pool2d(
    input: Tensor,
    kernel_size,
    stride=None,
    padding=0,
    dilation=1,
    ceil_mode: bool = False,
    return_indices: bool = False,
):
    """torch.nn.functional.max_pool2d. input: (N, C, H, W) or (C, H, W)."""
    arguments = kernel_size, stride, padding, dilation, ceil_mode
    return _max_pool(2, input, arguments, return_indices)


def max_pool3d(
    input: Tensor,
    kernel_size,
    stride=None,
    padding=0,
    dilation=1,
    ceil_mode: bool = False,
    return_indices: bool = False,
):
    """torch.nn.functional.max_pool3d. input: (N, C, D, H, W) or (C, D, H, W)."""
    arguments = kernel_size, stride, padding, dilation, ceil_mode
    return _max_pool(3, input, arguments, return_indices)


def adaptive_max_pool1d(input: Tensor, output_size, return_indices: bool = False):
    """torch.nn.functional.adaptive_max_pool1d. input: (N, C, L) or (C, L)."""
    return _max_pool(1, input, output_size, return_indices, adaptive=True)


def adaptive_max_pool2d(input: Tensor, output_size, return_indices: bool = False):
    """torch.nn.functional.adaptive_max_pool2d. input: (N, C, H, W) or (C, H, W)."""
    return _max_pool(2, input, output_size, return_indices, adaptive=True)


def adaptive_max_pool3d(input: Tensor, output_size, return_indices: bool = False):
    """torch.nn.functional.adaptive_max_pool3d. input: (N, C, D, H, W) or (C, D, H, W)."""
    return _max_pool(3, input, output_size, return_indices, adaptive=True)


_MAX = {
    1: torch_functional.max_pool1d,
    2: torch_functional.max_pool2d,
    3: torch_functional.max_pool3d,
}
_ADAPTIVE_MAX = {
    1: torch_functional.adaptive_max_pool1d,
    2: torch_functional.adaptive_max_pool2d,
    3: torch_functional.adaptive_max_pool3d,
}


def _torch_max(dims, x, arguments, return_indices, adaptive):
    if adaptive:
        return _ADAPTIVE_MAX[dims](x, arguments, return_indices=return_indices)
    kernel_size, stride, padding, dilation, ceil_mode = arguments
    return _MAX[dims](
        x, kernel_size, stride, padding, dilation, ceil_mode, return_indices=return_indices
    )


def _max_pool(dims, x, arguments, return_indices, adaptive=False):
    if not is_differentiated(x) or (not adaptive and _may_be_empty(dims, x, arguments[3])):
        return _torch_max(dims, x, arguments, return_indices, adaptive)
    if dims == 3 and not adaptive and not return_indices:
        x = _in_float32(x)
    y, indices = _MaxPool.apply(x, dims, arguments, adaptive)
    return (y, indices) if return_indices else y


def _in_float32(x):
    """x as the CPU's autocast passes it to max_pool3d, but not where indices are asked for."""
    if x.device.type == "cpu" and x.dtype.itemsize == 2 and torch.is_autocast_enabled("cpu"):
        return x.to(torch.float32)
    return x


def _may_be_empty(dims, x, dilation) -> bool:
    """Whether a dilated window may step over the whole input; torch's index of it lies nowhere."""
    if x.dim() not in (dims + 1, dims + 2):
        return True  # torch refuses it
    return any(n < step for n, step in zip(x.shape[-dims:], _each(dilation, dims), strict=True))


class _MaxPool(Function):
    """(torch's result, torch's indices) with the positions of the maxima kept."""

    @staticmethod
    def forward(ctx, x, dims, arguments, adaptive):
        y, indices = map(layout.unviewed, _torch_max(dims, x, arguments, True, adaptive))
        size, out = tuple(x.shape[-dims:]), tuple(y.shape[-dims:])
        if adaptive:
            ctx.windows, ctx.arguments = Windows.adaptive(size, out), None
        else:
            kernel, stride, padding, dilation, ceil_mode = arguments
            kernel, padding, dilation = (_each(each, dims) for each in (kernel, padding, dilation))
            stride = _each(stride, dims) if stride not in (None, (), []) else kernel
            ctx.windows = Windows.fixed(size, out, kernel, stride, padding, dilation)
            ctx.arguments = kernel, stride, padding, dilation, ceil_mode
        kept = ()
        ctx.spec = ctx.out = None
        if ctx.windows.count == 1:
            ctx.out = tuple(y.shape)
        else:
            saved = integers.pack(ctx.windows.positions(indices), ctx.windows.count)
            kept, ctx.spec, y = saved.tensors, saved.spec, saved.tie(y)
        ctx.source = _Source.of(x)
        ctx.dims = dims
        ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(indices)
        return y, indices

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        if ctx.spec is None:
            indices = ctx.windows.only(ctx.out, grad.device)
        else:
            positions = ctx.spec.flat(ctx.saved_tensors)
            indices = ctx.windows.indices(positions, ctx.spec.size, ctx.spec.stride)
        if ctx.arguments is None:
            backward = _aten.adaptive_max_pool3d_backward
            if ctx.dims < 3:
                backward = _aten.adaptive_max_pool2d_backward
            return ctx.source.gradient(ctx.dims, backward, grad, indices), None, None, None
        *places, ceil_mode = ctx.arguments
        backward = _aten.max_pool3d_with_indices_backward
        if ctx.dims < 3:
            backward = _aten.max_pool2d_with_indices_backward
        places = _as_2d(ctx.dims, *places)
        grad = ctx.source.gradient(ctx.dims, backward, grad, *places, ceil_mode, indices)
        return grad, None, None, None


# -- average pooling -------------------------------------------------------------------------------


def avg_pool1d(
    input: Tensor,
    kernel_size,
    stride=None,
    padding=0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """torch.nn.functional.avg_pool1d. input: (N, C, L) or (C, L)."""
    arguments = kernel_size, stride, padding, ceil_mode, count_include_pad
    return _avg_pool(1, input, arguments)


def avg_pool2d(
    input: Tensor,
    kernel_size,
    stride=None,
    padding=0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """torch.nn.functional.avg_pool2d. input: (N, C, H, W) or (C, H, W)."""
    arguments = kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    return _avg_pool(2, input, arguments)


def avg_pool3d(
    input: Tensor,
    kernel_size,
    stride=None,
    padding=0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """torch.nn.functional.avg_pool3d. input: (N, C, D, H, W) or (C, D, H, W)."""
    arguments = kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    return _avg_pool(3, input, arguments)


_AVG = {
    1: torch_functional.avg_pool1d,
    2: torch_functional.avg_pool2d,
    3: torch_functional.avg_pool3d,
}


def _torch_avg(dims, x, arguments):
    kernel_size, stride, *rest = arguments
    # The builtin functions take no None for a tuple of strides.
    return _AVG[dims](x, kernel_size, kernel_size if stride is None else stride, *rest)


def _avg_pool(dims, x, arguments):
    if not is_differentiated(x):
        return _torch_avg(dims, x, arguments)
    return _AvgPool.apply(x, dims, arguments)


class _AvgPool(Function):
    @staticmethod
    def forward(ctx, x, dims, arguments):
        y = layout.unviewed(_torch_avg(dims, x, arguments))
        kernel, stride, padding, ceil_mode, count_include_pad, *divisor = arguments
        kernel = _each(kernel, dims)
        stride = _each(stride, dims) if stride not in (None, (), []) else kernel
        places = _as_2d(dims, kernel, stride, _each(padding, dims), fill=(1, 1, 0))
        ctx.arguments = *places, ceil_mode, count_include_pad, *(divisor or (None,))
        ctx.source = _Source.of(x)
        ctx.dims = dims
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        backward = _aten.avg_pool2d_backward if ctx.dims < 3 else _aten.avg_pool3d_backward
        return ctx.source.gradient(ctx.dims, backward, grad, *ctx.arguments), None, None


def adaptive_avg_pool1d(input: Tensor, output_size) -> Tensor:
    """torch.nn.functional.adaptive_avg_pool1d. input: (N, C, L) or (C, L)."""
    return _adaptive_avg_pool(1, input, output_size)


def adaptive_avg_pool2d(input: Tensor, output_size) -> Tensor:
    """torch.nn.functional.adaptive_avg_pool2d. input: (N, C, H, W) or (C, H, W)."""
    return _adaptive_avg_pool(2, input, output_size)


def adaptive_avg_pool3d(input: Tensor, output_size) -> Tensor:
    """torch.nn.functional.adaptive_avg_pool3d. input: (N, C, D, H, W) or (C, D, H, W)."""
    return _adaptive_avg_pool(3, input, output_size)


_ADAPTIVE_AVG = {
    1: torch_functional.adaptive_avg_pool1d,
    2: torch_functional.adaptive_avg_pool2d,
    3: torch_functional.adaptive_avg_pool3d,
}


def _adaptive_avg_pool(dims, x, output_size):
    # To one element torch takes the mean, whose backward pass keeps nothing.
    if not is_differentiated(x) or _is_mean(dims, x, output_size):
        return _ADAPTIVE_AVG[dims](x, output_size)
    return _AdaptiveAvgPool.apply(x, dims, output_size)


def _is_mean(dims, x, output_size) -> bool:
    if not isinstance(output_size, tuple | list):
        return output_size == 1
    sizes = zip(output_size, x.shape[-dims:], strict=False)
    return all((size if wanted is None else wanted) == 1 for wanted, size in sizes)


class _AdaptiveAvgPool(Function):
    @staticmethod
    def forward(ctx, x, dims, output_size):
        ctx.source = _Source.of(x)
        ctx.dims = dims
        return layout.unviewed(_ADAPTIVE_AVG[dims](x, output_size))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        backward = _aten._adaptive_avg_pool3d_backward
        if ctx.dims < 3:
            backward = _aten._adaptive_avg_pool2d_backward
        return ctx.source.gradient(ctx.dims, backward, grad), None, None


# -- gradients by torch's own ----------------------------------------------------------------------


class _Source(NamedTuple):
    """The size, memory format and dtype of an input: all that its gradient depends on."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x):
        size = tuple(x.shape)
        stride = tuple(x.stride() if _is_channels_last(x) else layout.contiguous_stride(size))
        return cls(size, stride, x.dtype)

    def gradient(self, dims, backward, grad, *arguments):
        """backward(grad, the input, *arguments), without the input."""
        if dims == 1:
            grad, *arguments = (
                each.unsqueeze(-2) if isinstance(each, Tensor) else each
                for each in (grad, *arguments)
            )
        result = self._call(dims, backward, grad, arguments)
        return (result.squeeze(-2) if dims == 1 else result).to(self.dtype)

    def _call(self, dims, backward, grad, arguments):
        kind = {"dtype": grad.dtype, "device": grad.device}
        size, stride = self.size, self.stride
        if dims == 1:
            size, stride = (*size[:-1], 1, size[-1]), (*stride[:-1], stride[-2], stride[-1])
        if is_plain(grad) and dims < 3 and hasattr(backward, "grad_input"):
            # The result, not yet written to, has the size and strides of the input: it stands in
            # for it. (In three dimensions torch takes a given result for a contiguous one.)
            result = torch.empty_strided(size, stride, **kind)
            return backward.grad_input(grad, result, *arguments, grad_input=result)
        if is_plain(grad) and stride != layout.contiguous_stride(size):
            return backward(grad, torch.empty_strided(size, stride, **kind), *arguments)
        return backward(grad, torch.empty((), **kind).expand(size), *arguments)


def _is_channels_last(x) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.dim() not in formats or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=formats[x.dim()])


def _each(value, dims: int) -> tuple[int, ...]:
    """One number a dimension, as torch takes one for all."""
    if not isinstance(value, tuple | list):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)


def _as_2d(dims: int, *arguments, fill=(1, 1, 0, 1)):
    """kernel, stride, padding (, dilation), those of one dimension as torch runs them in two."""
    if dims > 1:
        return arguments
    return tuple((other, *argument) for other, argument in zip(fill, arguments, strict=True))
