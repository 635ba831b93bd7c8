"""The quantized copy that softmax saves of its result, which matrix products with this factor share."""

from __future__ import annotations

import torch

from fewbit.config import UNIFORM
from fewbit.runtime.interop.tensor_kinds import is_eager
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.quantizers.spec import SavedTensors


def quantize_softmax(quantizer: Quantizer, y: torch.Tensor, node) -> SavedTensors:
    """Return a quantized copy of y, the result of the softmax with this autograd node, for it and for matrix products.

    That adds no bias if the other factor does not depend on y: softmax multiplies its copy by the gradient of y, which
    the product computes from the other factor alone.
    """
    saved = quantizer.quantize(y, usual=UNIFORM)
    context = quantizer.context
    if context is None or saved.trace_anchor is not None:
        return saved
    saving = context.saving(y)
    # A policy measures the bits of every product by itself.
    if saving.shared is not None and context.policy is None:
        saving.shared.put_softmax(y, quantizer.key, saved)
    saving.want_result(node, y)
    return saved


def quantize_factor(quantizer: Quantizer, x: torch.Tensor) -> SavedTensors:
    """Return softmax's copy of x if x is a view of a result of softmax, else a new copy."""
    context = quantizer.context
    if context is not None and is_eager(x):
        shared = context.saving(x).shared
        saved = None if shared is None else shared.get_softmax(x, quantizer.key)
        if saved is not None:
            return saved
    return quantizer.quantize(x)
