"""The backward of batch norm from a rotated copy of its normalized input, in plain torch."""

from __future__ import annotations

import torch

from fewbit.config import ROTATED
from fewbit.runtime.backends.reference_quantizer import dequantize
from fewbit.runtime.format.layout import storage_order

__all__ = ["batch_norm_backward", "can_compute_batch_norm"]


def can_compute_batch_norm(bits: int, group_size: int, shape: tuple[int, ...]) -> bool:
    """Return whether `batch_norm_backward` can be called for a rotated copy of a tensor of this shape."""
    return True


def batch_norm_backward(packed, ranges, bits, group_size, grad, rstd, weight, needs_input=True):
    """Return the gradients of a batch norm's input, weight and bias.

    For the dequantized normalized input x~ and the gradient g of the result, they are sum(g x~) for the weight, sum(g)
    for the bias, and for the input

        weight rstd (g - mean(g) - x~ mean(g x~))

    with sums and means over a channel, in float32, in an order that depends on the backend.

    Args:
        packed: the packed codes of a rotated copy.
        ranges: the ranges of the copy.
        bits: the bits per element of the copy, 1 to 8.
        group_size: the number of elements in a group.
        grad: g, a dense float32, float16 or bfloat16 tensor with samples outermost in storage. Element number e, in
            storage order, has channel e mod C.
        rstd: (C,) float32, the reciprocal standard deviations.
        weight: (C,) float32, or None.
        needs_input: whether to compute the gradient of the input; else it is None.

    Returns:
        The three gradients, those of weight and bias in float32. None if the backend has no kernel for these tensors.
    """
    x = torch.empty_like(grad, dtype=torch.float32)
    dequantize(packed, ranges, bits, group_size, x, kind=ROTATED)
    x, g = (storage_order(each).view(-1, len(rstd)) for each in (x, grad.float()))
    of_bias, of_weight = g.sum(0), (g * x).sum(0)
    if not needs_input:
        return None, of_weight, of_bias
    out = torch.empty_like(grad)
    scale = rstd if weight is None else rstd * weight
    of_input = scale * (g - of_bias / len(g) - x * (of_weight / len(g)))
    storage_order(out).copy_(of_input.view(-1))
    return out, of_weight, of_bias
