"""The channels of a tensor, which have a mean and a scale of their own in a rotated copy (docs/concepts/quantizer.md).

Element number e in storage order has channel e mod (number of channels). A *row* has one element of each channel.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch

from fewbit.runtime.format.layout import contiguous_stride, is_dense

LEAST_ROWS = 256
"""The least number of elements per channel with which channels have means and scales."""
MOST_ROWS = 256
"""The largest number of rows from which the means and scales are estimated."""
BLOCK = 256
"""The number of channels whose variances are averaged."""


class Normalization(NamedTuple):
    """The change of a tensor's elements before they are quantized: first (x - mean) * rstd, then the channels.

    Attributes:
        mean: a 1-D contiguous float32 vector, or None.
        rstd: a vector like `mean`, or None if the elements are not normalized.
        inner: element number e, in storage order, has entry (e div inner) mod (number of entries) of the vectors.
        channels: (count, 2) bfloat16, the mean m and the scale s of each channel, or None. An element v becomes (v - m)
            / s, computed as a product with 1 / s in float32.
    """

    mean: torch.Tensor | None = None
    rstd: torch.Tensor | None = None
    inner: int = 1
    channels: torch.Tensor | None = None


class Statistics(NamedTuple):
    """The means and deviations by which a norm has normalized its input x, to (x - mean) * rstd.

    Attributes:
        mean: the means; None if the norm subtracts no mean.
        rstd: the reciprocal standard deviations.
        inner: as in `Normalization`; None if x is laid out differently.
        shape: the shape in which mean and rstd broadcast to x; None for their own.
    """

    mean: torch.Tensor | None
    rstd: torch.Tensor
    inner: int | None
    shape: tuple[int, ...] | None = None

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized x, at least in float32."""
        mean, rstd = self.mean, self.rstd
        if self.shape is not None:
            mean, rstd = None if mean is None else mean.view(self.shape), rstd.view(self.shape)
        if mean is not None:
            x = x.to(rstd.dtype) - mean
        return (x * rstd).to(torch.promote_types(rstd.dtype, torch.float32))


def usual_features(dims: int) -> tuple[int, ...]:
    """Return the feature dimensions of a tensor with so many dimensions: an image's channels, or the last one."""
    if dims > 3:
        return (1,)
    return (dims - 1,) if dims > 1 else ()


def channels_of(x: torch.Tensor, features: tuple[int, ...]) -> int:
    """Return the number of channels whose means and scales a rotated copy of x has.

    Channels differ along the dimensions `features`, from 0, which have to be the innermost ones in storage.
    """
    return count_of(x.shape, x.stride() if is_dense(x) else contiguous_stride(x.shape), features)


def count_of(shape, stride, features: tuple[int, ...]) -> int:
    """Return `channels_of` a dense tensor of this shape and these strides."""
    count, extent = 1, 1
    for dim in features:
        size = shape[dim]
        if size != 1:
            count *= size
            extent = max(extent, stride[dim] * size)
    # The features of a dense tensor are innermost exactly if none of them spans more elements than they have together.
    return count if 1 < count == extent and math.prod(shape) >= LEAST_ROWS * count else 0


def estimated_rows(rows: int) -> list[int]:
    """Return the evenly distributed rows from which means and scales are estimated."""
    count = min(rows, MOST_ROWS)
    return [index * rows // count for index in range(count)]


def runs_of(chosen: list[int]) -> list[list[int]]:
    """Return the chosen rows in four runs, which are summed one after the other."""
    ends = [run * len(chosen) // 4 for run in range(5)]
    return [chosen[begin:end] for begin, end in pairwise(ends)]


def map_affine(values: torch.Tensor, affine) -> torch.Tensor:
    """Compute values * scale + shift in place. `affine` is (scale, shift, _), each of which may be None."""
    scale, shift, _ = affine or (None, None, None)
    if scale is not None:
        values.mul_(scale)
    if shift is not None:
        values.add_(shift)
    return values
