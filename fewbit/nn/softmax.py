"""Softmax and its logarithm with the probabilities quantised."""

from __future__ import annotations

from torch import Tensor, nn

from fewbit.functional.softmax import log_softmax, softmax
from fewbit.nn.base import Quantised

__all__ = ["LogSoftmax", "Softmax"]


class Softmax(Quantised, nn.Softmax):
    """torch.nn.Softmax; see `fewbit.functional.softmax`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._exact(input)
        return softmax(input, self.dim, _stacklevel=5, quantiser=self.quantiser)


class LogSoftmax(Quantised, nn.LogSoftmax):
    """torch.nn.LogSoftmax; see `fewbit.functional.log_softmax`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._exact(input)
        return log_softmax(input, self.dim, _stacklevel=5, quantiser=self.quantiser)
