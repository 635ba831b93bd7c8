"""Linear layers that keep quantized inputs."""

from __future__ import annotations

from torch import Tensor, nn

from fewbit import functional as F
from fewbit.nn.base import Quantized

__all__ = ["Linear"]


class Linear(Quantized, nn.Linear):
    """torch.nn.Linear; see `fewbit.functional.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._exact(input)
        return F.linear(input, self.weight, self.bias, quantizer=self.quantizer)
