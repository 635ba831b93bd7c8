"""PReLU, with torch's arguments plus `bits` and `group_size`, as in `fewbit.functional.prelu`."""

from __future__ import annotations

from torch import Tensor, nn

from fewbit import functional as F
from fewbit.nn.base import Quantized

__all__ = ["PReLU"]


class PReLU(Quantized, nn.PReLU):
    """A torch.nn.PReLU that computes `fewbit.functional.prelu`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._exact(input)
        return F.prelu(input, self.weight, quantizer=self.quantizer)
