"""PReLU with the sign of its input in 1 bit and the rest of it quantized."""

from __future__ import annotations

from torch import Tensor, nn

from fewbit.functional.prelu import prelu
from fewbit.nn.base import Quantized

__all__ = ["PReLU"]


class PReLU(Quantized, nn.PReLU):
    """torch.nn.PReLU; see `fewbit.functional.prelu`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._exact(input)
        return prelu(input, self.weight, quantizer=self.quantizer)
