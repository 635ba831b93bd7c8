"""The indices of max-pooling, saved as positions within windows, which follow from the place in the result.

For a window that is all -inf, some of torch's kernels return an index outside of it, so positions are clamped.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch


class Windows(NamedTuple):
    """The windows of one input plane. Every field has one entry for each spatial dimension.

    Args:
        size, out: the sizes of the plane and of the result.
        extent: the number of elements of the longest window.
        dilation: the distance between neighboring elements of a window.
        stride, padding: those of fixed windows; None for adaptive windows.
    """

    size: tuple[int, ...]
    out: tuple[int, ...]
    extent: tuple[int, ...]
    dilation: tuple[int, ...]
    stride: tuple[int, ...] | None
    padding: tuple[int, ...] | None

    @classmethod
    def adaptive(cls, size, out) -> Windows:
        """Return the windows of an AdaptiveMaxPool layer, from floor(o * size / out) to ceil((o + 1) * size / out)."""
        extent = tuple(map(_longest, size, out))
        return cls(size, out, extent, (1,) * len(size), None, None)

    @property
    def count(self) -> int:
        return prod(self.extent)

    def positions(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the position of each of torch's indices within its window, row by row."""
        if prod(self.size) < 1 << 31:
            indices = indices.to(torch.int32)
        position, scale, rest = 0, 1, indices
        for dim in reversed(range(len(self.size))):
            at = rest
            if dim:
                rest = torch.div(at, self.size[dim], rounding_mode="trunc")
                at = at - rest * self.size[dim]
            place = at - self._starts(dim, indices)
            if self.dilation[dim] != 1:
                place = torch.div(place, self.dilation[dim], rounding_mode="trunc")
            position = position + place * scale
            scale *= self.extent[dim]
        return position.clamp(0, self.count - 1)

    def indices(self, positions: torch.Tensor, size, stride) -> torch.Tensor:
        """Return torch's indices for (n,) positions in storage order of the result."""
        table, first = self._tables(positions)
        found = table.index_select(0, positions.to(torch.int32))
        return found.as_strided(size, stride).add_(first).clamp_(0, prod(self.size) - 1)

    def only(self, size, device) -> torch.Tensor:
        """Return torch's indices for windows of one element each."""
        first = self._tables(torch.empty(0, device=device))[1]
        return first.expand(size).contiguous()

    def _starts(self, dim: int, like: torch.Tensor) -> torch.Tensor:
        """Return the start of each window along a dimension, which broadcasts to (..., *out)."""
        starts = torch.arange(self.out[dim], device=like.device)
        if self.stride is None:
            starts = torch.div(starts * self.size[dim], self.out[dim], rounding_mode="trunc")
        else:
            starts = starts * self.stride[dim] - self.padding[dim]
        after = len(self.out) - 1 - dim
        return starts.to(like.dtype).view(-1, *[1] * after)

    def _tables(self, like) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what each position adds to the index of its window's start, (count,), and these indices, (*out)."""
        table = first = torch.zeros((), dtype=torch.int64, device=like.device)
        for dim in range(len(self.size)):
            after = len(self.size) - 1 - dim
            step = prod(self.size[dim + 1 :])
            place = torch.arange(self.extent[dim], device=like.device) * self.dilation[dim]
            table = table + (place * step).view(-1, *[1] * after)
            first = first + self._starts(dim, table) * step
        return table.reshape(-1), first


def _longest(size: int, out: int) -> int:
    """Return the length of the longest of `out` adaptive windows."""
    return max([1, *(-(-(o + 1) * size // out) - o * size // out for o in range(out))])


def per_dim(value, dims: int) -> tuple[int, ...]:
    """Return an argument such as the size of a window as one number for each of `dims` dimensions."""
    if type(value) is tuple and value[dims - 1 :]:  # as the modules pass it
        return value
    if not isinstance(value, list | tuple):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)
