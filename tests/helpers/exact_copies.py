"""Quantizers that save tensors unchanged, or that remember what they saved."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.quantizers.spec import SavedTensors, in_dtype, map_affine


class ExactSpec(NamedTuple):
    """The spec of one tensor that is saved unchanged, with the attributes of the spec of a quantized copy that layers read."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    count: int = 1

    def dequantize(self, tensors, dtype=None, affine=None):
        return in_dtype(map_affine(tensors[0].clone(), affine), dtype or self.dtype)


class Exact(Quantizer):
    """A quantizer that saves tensors unchanged, so that gradients are what the formula of the layer's backward makes them.

    Attributes:
        saved: the saved values in the order of the forward pass.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.saved = []

    def quantize(self, x, *settings, **options):
        x = x.detach()
        self.saved.append(x)
        return SavedTensors((x,), ExactSpec(tuple(x.shape), x.stride(), x.dtype))

    def quantize_normalized(self, x, statistics, features=None):
        x = x.to(torch.promote_types(statistics.rstd.dtype, torch.float32))
        return self.quantize(statistics.normalized(x))


class Replaying(Exact):
    """A quantizer that saves given values in place of the tensors of the layer."""

    def __init__(self, values):
        super().__init__()
        self.values = iter(values)

    def quantize(self, x, *settings, **options):
        return super().quantize(next(self.values))


class Remembering(Quantizer):
    """A quantizer that remembers its copies.

    Attributes:
        kept: the copies in the order of the forward pass.
    """

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.kept = []

    def quantize(self, x, *settings, **options):
        self.kept.append(super().quantize(x, *settings, **options))
        return self.kept[-1]

    def quantize_normalized(self, *arguments):
        self.kept.append(super().quantize_normalized(*arguments))
        return self.kept[-1]

    def restored(self):
        """Return the dequantized values of the copies."""
        return [copy.spec.dequantize(copy.tensors) for copy in self.kept]
