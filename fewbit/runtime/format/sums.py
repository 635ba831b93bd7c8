"""A gradient as a matrix, and sums over it."""

from __future__ import annotations

from math import prod


def rows(x):
    """Return x as a matrix: all dimensions but the last are merged into one. Sizes of 0 are allowed."""
    if x.ndim == 2:
        return x
    *leading, last = x.shape
    return x.reshape(prod(leading) if 0 in x.shape else -1, last)


def over_rows(x, dims: int = 1):
    """Return the sum of x over all dimensions except the last `dims`."""
    leading = list(range(x.ndim - dims))
    return x.sum(leading) if leading else x


def over_channels(x):
    """Return the sum of x over all dimensions but dimension 1, the channels."""
    return x.sum([dim for dim in range(x.dim()) if dim != 1])
