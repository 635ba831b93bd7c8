"""Where the windows of a pooling lie, and where in its window an element does.

torch's max-pooling returns the flat index of each maximum in its plane, an int64. The same index is
the number of the window, which its place in the result says, and the position within it, a number
below the window's size: that is what is kept.

Some of torch's kernels for channels-last tensors return an index outside a window that is all -inf.
No position is that, so both directions clamp: the index of such a window comes out somewhere in the
plane.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch


class Windows(NamedTuple):
    """The windows of one plane; every field has one entry a spatial dimension.

    size: of the plane. out: of the result. stride, padding: of fixed windows; None for adaptive
    ones, which start at floor(o * size / out). extent: the (longest) window's elements. dilation:
    their distance.
    """

    size: tuple[int, ...]
    out: tuple[int, ...]
    extent: tuple[int, ...]
    dilation: tuple[int, ...]
    stride: tuple[int, ...] | None
    padding: tuple[int, ...] | None

    @classmethod
    def fixed(cls, size, out, kernel, stride, padding, dilation) -> Windows:
        """Those of MaxPool."""
        return cls(size, out, kernel, dilation, stride, padding)

    @classmethod
    def adaptive(cls, size, out) -> Windows:
        """Those of AdaptiveMaxPool: from floor(o * size / out) up to ceil((o + 1) * size / out)."""
        extent = tuple(map(_longest, size, out))
        return cls(size, out, extent, (1,) * len(size), None, None)

    @property
    def count(self) -> int:
        """Positions in a window."""
        return prod(self.extent)

    def positions(self, indices: torch.Tensor) -> torch.Tensor:
        """indices: (..., *out), torch's. Returns each one's row-major position in its window."""
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
        return position.clamp_(0, self.count - 1)

    def indices(self, positions: torch.Tensor, size, stride) -> torch.Tensor:
        """torch's indices, int64, of that size and stride; positions: (n,), in storage order."""
        table, first = self._tables(positions)
        found = table.index_select(0, positions.to(torch.int32))
        return found.as_strided(size, stride).add_(first).clamp_(0, prod(self.size) - 1)

    def only(self, size, device) -> torch.Tensor:
        """The indices, of that size, where every window has one element."""
        first = self._tables(torch.empty(0, device=device))[1]
        return first.expand(size).contiguous()

    def _starts(self, dim: int, like: torch.Tensor) -> torch.Tensor:
        """Where each window starts along a dimension, to be added to a tensor (..., *out)."""
        starts = torch.arange(self.out[dim], device=like.device)
        if self.stride is None:
            starts = torch.div(starts * self.size[dim], self.out[dim], rounding_mode="trunc")
        else:
            starts = starts * self.stride[dim] - self.padding[dim]
        after = len(self.out) - 1 - dim
        return starts.to(like.dtype).view(-1, *[1] * after)

    def _tables(self, like) -> tuple[torch.Tensor, torch.Tensor]:
        """(count,) what a position adds to an index; (*out) the index where each window starts."""
        table = first = torch.zeros((), dtype=torch.int64, device=like.device)
        for dim in range(len(self.size)):
            after = len(self.size) - 1 - dim
            step = prod(self.size[dim + 1 :])
            place = torch.arange(self.extent[dim], device=like.device) * self.dilation[dim]
            table = table + (place * step).view(-1, *[1] * after)
            first = first + self._starts(dim, table) * step
        return table.reshape(-1), first


def _longest(size: int, out: int) -> int:
    """Elements of the longest of `out` adaptive windows along a dimension of that size."""
    return max([1, *(-(-(o + 1) * size // out) - o * size // out for o in range(out))])
