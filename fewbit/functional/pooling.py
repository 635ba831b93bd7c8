"""Pooling, with torch's signatures, results and gradients to the bit, which saves only the position of each maximum in its window, or nothing.

docs/reference/api/functional.md has the sizes. Inputs are floating, (N, C, ...) or (C, ...). An adaptive window counts as the product of
the greatest lengths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbit.runtime.format import layout
from fewbit.runtime.format.windows import Windows, per_dim
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.quantizers import copies, integers
from fewbit.runtime.saved.saving_function import SavingFunction, is_differentiated

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


# -- max-pooling -----------------------------------------------------------------------------------


def max_pool1d(
    input: Tensor,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | Any:
    """Compute torch.nn.functional.max_pool1d."""
    arguments = kernel_size, stride, padding, dilation, ceil_mode
    return _max_pool(1, input, arguments, return_indices)


def max_pool2d(
    input: Tensor,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | Any:
    """Compute torch.nn.functional.max_pool2d."""
    arguments = kernel_size, stride, padding, dilation, ceil_mode
    return _max_pool(2, input, arguments, return_indices)


def max_pool3d(
    input: Tensor,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | Any:
    """Compute torch.nn.functional.max_pool3d."""
    arguments = kernel_size, stride, padding, dilation, ceil_mode
    return _max_pool(3, input, arguments, return_indices)


def adaptive_max_pool1d(
    input: Tensor, output_size: int | tuple[int, ...], return_indices: bool = False
) -> Tensor | Any:
    """Compute torch.nn.functional.adaptive_max_pool1d."""
    return _max_pool(1, input, output_size, return_indices, adaptive=True)


def adaptive_max_pool2d(
    input: Tensor, output_size: int | tuple[int, ...], return_indices: bool = False
) -> Tensor | Any:
    """Compute torch.nn.functional.adaptive_max_pool2d."""
    return _max_pool(2, input, output_size, return_indices, adaptive=True)


def adaptive_max_pool3d(
    input: Tensor, output_size: int | tuple[int, ...], return_indices: bool = False
) -> Tensor | Any:
    """Compute torch.nn.functional.adaptive_max_pool3d."""
    return _max_pool(3, input, output_size, return_indices, adaptive=True)


def _torch_max(dims, x, arguments, return_indices, adaptive):
    if adaptive:
        function = _of_torch("adaptive_max_pool", dims)
        return function(x, arguments, return_indices=return_indices)
    return _of_torch("max_pool", dims)(x, *arguments, return_indices=return_indices)


def _of_torch(name: str, dims: int):
    return getattr(torch_functional, f"{name}{dims}d")


def _max_pool(dims, x, arguments, return_indices, adaptive=False):
    if not is_differentiated(x) or (not adaptive and _may_be_empty(dims, x, arguments[3])):
        return _torch_max(dims, x, arguments, return_indices, adaptive)
    if dims == 3 and not adaptive and not return_indices:
        x = _in_float32(x)
    y, indices = _MaxPoolFunction.apply(x, dims, arguments, adaptive)
    return (y, indices) if return_indices else y


def _in_float32(x):
    """Return x in the dtype in which the CPU's autocast passes it to max_pool3d if no indices are returned."""
    if x.device.type == "cpu" and x.dtype.itemsize == 2 and torch.is_autocast_enabled("cpu"):
        return x.to(torch.float32)
    return x


def _may_be_empty(dims, x, dilation) -> bool:
    """Return whether a dilated window may contain no element of the input, so that torch's index is not valid."""
    if x.dim() not in (dims + 1, dims + 2):
        return True  # torch raises an error
    return any(n < step for n, step in zip(x.shape[-dims:], per_dim(dilation, dims), strict=True))


class _MaxPoolFunction(SavingFunction):
    """Max-pooling, which saves the position of each maximum in its window."""

    @staticmethod
    def forward(ctx, x, dims, arguments, adaptive):
        y, indices = (y.data for y in _torch_max(dims, x, arguments, True, adaptive))
        size, out = tuple(x.shape[-dims:]), tuple(y.shape[-dims:])
        if adaptive:
            ctx.windows, ctx.arguments = Windows.adaptive(size, out), None
        else:
            kernel, stride, padding, dilation, ceil_mode = arguments
            kernel, padding, dilation = (per_dim(n, dims) for n in (kernel, padding, dilation))
            stride = per_dim(stride, dims) if stride not in (None, (), []) else kernel
            ctx.windows = Windows(size, out, kernel, dilation, stride, padding)
            ctx.arguments = kernel, stride, padding, dilation, ceil_mode
        ctx.out, saved = tuple(y.shape), None
        if ctx.windows.count > 1:
            saved = integers.pack(ctx.windows.positions(indices), ctx.windows.count)
        ctx.source = _Source.of(x, dims)
        y = copies.keep(ctx, y, positions=saved)
        ctx.mark_non_differentiable(indices)
        if not torch.compiler.is_compiling():
            # Otherwise the backward pass would fill zeros for the gradient of the indices, which get none.
            ctx.set_materialize_grads(False)
        return y, indices

    @staticmethod
    def backward(ctx, grad, _):
        if grad is None:  # a layer after this one returned no gradient
            return None, None, None, None
        copy = copies.Kept(ctx).copy("positions")
        if copy is None:
            indices = ctx.windows.only(ctx.out, grad.device)
        else:
            spec, tensors = copy
            indices = ctx.windows.indices(spec.flat(tensors), spec.size, spec.stride)
        if ctx.arguments is None:
            grad = ctx.source.gradient("adaptive_max_pool{}d_backward", grad, indices)
        else:
            *windows, ceil_mode = ctx.arguments
            windows = _as_2d(ctx.source.dims, *windows)
            name = "max_pool{}d_with_indices_backward"
            grad = ctx.source.gradient(name, grad, *windows, ceil_mode, indices)
        return grad, None, None, None


# -- average pooling -------------------------------------------------------------------------------


def avg_pool1d(
    input: Tensor,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """Compute torch.nn.functional.avg_pool1d."""
    arguments = kernel_size, stride, padding, ceil_mode, count_include_pad
    return _avg_pool(1, input, arguments)


def avg_pool2d(
    input: Tensor,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Compute torch.nn.functional.avg_pool2d."""
    arguments = kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    return _avg_pool(2, input, arguments)


def avg_pool3d(
    input: Tensor,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Compute torch.nn.functional.avg_pool3d."""
    arguments = kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    return _avg_pool(3, input, arguments)


def _torch_avg(dims, x, arguments, adaptive):
    if adaptive:
        return _of_torch("adaptive_avg_pool", dims)(x, arguments)
    kernel_size, stride, *rest = arguments
    # The builtin functions do not accept None as strides.
    stride = kernel_size if stride is None else stride
    return _of_torch("avg_pool", dims)(x, kernel_size, stride, *rest)


def _avg_pool(dims, x, arguments, adaptive=False):
    # If the result has one element per channel, torch computes a mean, for which it saves nothing.
    if not is_differentiated(x) or (adaptive and _is_mean(dims, x, arguments)):
        return _torch_avg(dims, x, arguments, adaptive)
    return _AvgPoolFunction.apply(x, dims, arguments, adaptive)


class _AvgPoolFunction(SavingFunction):
    @staticmethod
    def forward(ctx, x, dims, arguments, adaptive):
        y = _torch_avg(dims, x, arguments, adaptive).data
        ctx.source, ctx.backward_of = _Source.of(x, dims), ("_adaptive_avg_pool{}d_backward",)
        if not adaptive:
            kernel, stride, padding, ceil_mode, count_include_pad, *divisor = arguments
            kernel = per_dim(kernel, dims)
            stride = per_dim(stride, dims) if stride not in (None, (), []) else kernel
            windows = _as_2d(dims, kernel, stride, per_dim(padding, dims))
            rest = ceil_mode, count_include_pad, *(divisor or (None,))
            ctx.backward_of = "avg_pool{}d_backward", *windows, *rest
        return y

    @staticmethod
    def backward(ctx, grad):
        name, *arguments = ctx.backward_of
        return ctx.source.gradient(name, grad, *arguments), None, None, None


def adaptive_avg_pool1d(input: Tensor, output_size: int | tuple[int, ...]) -> Tensor:
    """Compute torch.nn.functional.adaptive_avg_pool1d."""
    return _avg_pool(1, input, output_size, adaptive=True)


def adaptive_avg_pool2d(input: Tensor, output_size: int | tuple[int, ...]) -> Tensor:
    """Compute torch.nn.functional.adaptive_avg_pool2d."""
    return _avg_pool(2, input, output_size, adaptive=True)


def adaptive_avg_pool3d(input: Tensor, output_size: int | tuple[int, ...]) -> Tensor:
    """Compute torch.nn.functional.adaptive_avg_pool3d."""
    return _avg_pool(3, input, output_size, adaptive=True)


def _is_mean(dims, x, output_size) -> bool:
    if not isinstance(output_size, tuple | list):
        return output_size == 1
    sizes = zip(output_size, x.shape[-dims:], strict=False)
    return all((size if wanted is None else wanted) == 1 for wanted, size in sizes)


# -- gradients by torch's own ops ------------------------------------------------------------------


class _Source(NamedTuple):
    dims: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x, dims: int):
        size = tuple(x.shape)
        stride = tuple(x.stride() if layout.is_channels_last(x) else layout.contiguous_stride(size))
        return cls(dims, size, stride, x.dtype)

    def gradient(self, name: str, grad, *arguments):
        """Return torch's op `name`, which contains {} for the number of dimensions, of (grad, input, *arguments)."""
        backward = getattr(torch.ops.aten, name.format(max(self.dims, 2)))
        if self.dims > 1:
            return self._call(backward, grad, arguments, self.size, self.stride).to(self.dtype)
        grad, *arguments = (
            value.unsqueeze(-2) if isinstance(value, Tensor) else value
            for value in (grad, *arguments)
        )
        (*leading, length), (*outer, inner) = self.size, self.stride
        size, stride = (*leading, 1, length), (*outer, outer[-1], inner)
        return self._call(backward, grad, arguments, size, stride).squeeze(-2).to(self.dtype)

    def _call(self, backward, grad, arguments, size, stride):
        kind = {"dtype": grad.dtype, "device": grad.device}
        if is_plain(grad) and self.dims < 3 and hasattr(backward, "grad_input"):
            # The op reads only the input's size and strides, so the result, which is not written to yet, is passed as
            # the input. In three dimensions torch assumes that a result passed by the caller is contiguous.
            result = torch.empty_strided(size, stride, **kind)
            return backward.grad_input(grad, result, *arguments, grad_input=result)
        if is_plain(grad) and stride != layout.contiguous_stride(size):
            return backward(grad, torch.empty_strided(size, stride, **kind), *arguments)
        return backward(grad, torch.empty((), **kind).expand(size), *arguments)


def _as_2d(dims: int, *windows):
    if dims > 1:
        return windows
    return tuple((other, *one) for other, one in zip((1, 1, 0, 1), windows, strict=False))
