"""A bilinear layer that keeps both inputs quantized."""

from __future__ import annotations

from torch import Tensor, nn

from fewbit.functional.bilinear import bilinear
from fewbit.nn.base import Quantized

__all__ = ["Bilinear"]


class Bilinear(Quantized, nn.Bilinear):
    """torch.nn.Bilinear; see `fewbit.functional.bilinear`."""

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        if not self.training:
            return self._exact(input1, input2)
        return bilinear(input1, input2, self.weight, self.bias, quantizer=self.quantizer)
