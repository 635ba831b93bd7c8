"""A gradient as a matrix, and the sums of it that are the gradients of weights and biases."""

from __future__ import annotations


def rows(x):
    """x as a matrix of its rows; sizes of 0 are allowed."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def over_rows(x, kept: int = 1):
    """The sum over all dimensions but the last `kept`."""
    leading = x.dim() - kept
    return x.flatten(0, leading - 1).sum(0) if leading else x


def over_channels(x):
    """The sum over all dimensions but the second."""
    return x.sum([dim for dim in range(x.dim()) if dim != 1])
