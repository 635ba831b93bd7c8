"""Linear layers."""

from __future__ import annotations

from torch import Tensor, nn

from fewbit import functional as F
from fewbit.nn.base import Quantized

__all__ = ["Bilinear", "Linear"]


class Linear(Quantized, nn.Linear):
    """A torch.nn.Linear that computes `fewbit.functional.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._exact(input)
        return F.linear(input, self.weight, self.bias, quantizer=self.quantizer)


class Bilinear(Quantized, nn.Bilinear):
    """A torch.nn.Bilinear that computes `fewbit.functional.bilinear`."""

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        if not self.training:
            return self._exact(input1, input2)
        return F.bilinear(input1, input2, self.weight, self.bias, quantizer=self.quantizer)
