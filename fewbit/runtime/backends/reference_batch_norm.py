"""The backward of batch norm from a rotated copy of its normalized input, in plain torch."""

from __future__ import annotations

import torch

from fewbit.config import ROTATED
from fewbit.runtime.backends.reference_quantizer import dequantize
from fewbit.runtime.format.layout import storage_order

__all__ = ["batch_norm_backward", "can_compute_batch_norm"]


def can_compute_batch_norm(bits: int, group_size: int, shape: tuple[int, ...]) -> bool:
    """Return whether `batch_norm_backward` has a kernel for a rotated copy of this shape."""
    return True


def batch_norm_backward(packed, ranges, bits, group_size, grad, rstd, weight, needs_input=True):
    """Return the gradients of a batch norm's input, weight and bias, from a rotated copy of the normalized input.

    For the dequantized normalized input x~ and the gradient g of the result, they are sum(g x~) for the weight, sum(g)
    for the bias, and for the input

        weight rstd (g - mean(g) - x~ mean(g x~))

    with sums and means over a channel, in float32, in an order that depends on the backend.

    `packed`, `ranges`, `bits` and `group_size` are as in `quantize`. `grad` is g, a dense float32, float16 or bfloat16
    tensor with samples outermost in storage; element number e, in storage order, has channel e mod C. `rstd` and
    `weight`, which may be None, are (C,) float32.

    Returns:
        The three gradients, those of weight and bias in float32, that of the input None unless `needs_input`. None if
        the backend has no kernel for these tensors.
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
