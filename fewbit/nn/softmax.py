"""Softmax and its logarithm with the probabilities quantized."""

from __future__ import annotations

from torch import Tensor, nn

from fewbit.functional.softmax import log_softmax, softmax
from fewbit.nn.base import Quantized

__all__ = ["LogSoftmax", "Softmax"]


class Softmax(Quantized, nn.Softmax):
    """torch.nn.Softmax; see `fewbit.functional.softmax`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._exact(input)
        return softmax(input, self.dim, _stacklevel=5, quantizer=self.quantizer)


class LogSoftmax(Quantized, nn.LogSoftmax):
    """torch.nn.LogSoftmax; see `fewbit.functional.log_softmax`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._exact(input)
        return log_softmax(input, self.dim, _stacklevel=5, quantizer=self.quantizer)
