"""Softmax and its logarithm."""

from __future__ import annotations

from torch import Tensor, nn

from fewbit import functional as F
from fewbit.nn.base import Quantized

__all__ = ["LogSoftmax", "Softmax"]


class Softmax(Quantized, nn.Softmax):
    """A torch.nn.Softmax that computes `fewbit.functional.softmax`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._exact(input)
        return F.softmax(input, self.dim, _stacklevel=5, quantizer=self.quantizer)


class LogSoftmax(Quantized, nn.LogSoftmax):
    """A torch.nn.LogSoftmax that computes `fewbit.functional.log_softmax`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._exact(input)
        return F.log_softmax(input, self.dim, _stacklevel=5, quantizer=self.quantizer)
