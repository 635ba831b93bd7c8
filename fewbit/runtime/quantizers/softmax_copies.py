"""The copy that softmax saves of its result, which matrix products with the result as a factor may use as well.

The *cache* of a forward pass finds the copy by the factor, so softmax and the products need not know each other.
"""

from __future__ import annotations

import torch

from fewbit.config import UNIFORM
from fewbit.runtime.interop.tensor_kinds import is_eager
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.quantizers.spec import SavedTensors


def quantize_softmax(quantizer: Quantizer, y: torch.Tensor) -> SavedTensors:
    """Return a quantized copy of y, a result of softmax, which matrix products with the factor y may use as well.

    If the other factor does not depend on y, this adds no bias: softmax multiplies the copy by the product's gradient
    of y, which is computed without the copy.
    """
    saved = quantizer.quantize(y, usual=UNIFORM)
    context = quantizer.context
    # A policy measures the bits of every product by itself.
    if context is not None and context.policy is None and is_eager(y):
        context.cache.put_softmax(y, quantizer.key, saved)
    return saved


def quantize_factor(quantizer: Quantizer, x: torch.Tensor) -> SavedTensors:
    """Return softmax's copy of x if x is a view of a result of softmax, else make a copy with `quantizer.quantize(x)`.

    Matrix products call this function to save a factor.
    """
    context = quantizer.context
    if context is not None and is_eager(x):
        saved = context.cache.get_softmax(x, quantizer.key)
        if saved is not None:
            context.record_save()
            return saved
    return quantizer.quantize(x)
