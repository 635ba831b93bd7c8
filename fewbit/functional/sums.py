"""A gradient as a matrix, and the sums of it that are the gradients of weights and biases."""

from __future__ import annotations

from math import prod


def rows(x):
    """x as a matrix of its rows; sizes of 0 are allowed."""
    if x.dim() == 2:
        return x
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def over_rows(x, kept: int = 1):
    """The sum over all dimensions but the last `kept`."""
    leading = list(range(x.dim() - kept))
    return x.sum(leading) if leading else x


def over_channels(x):
    """The sum over all dimensions but the second."""
    return x.sum([dim for dim in range(x.dim()) if dim != 1])
