"""Embedding."""

from __future__ import annotations

from torch import Tensor, nn

from fewbit import functional as F
from fewbit.nn.base import Guarded

__all__ = ["Embedding"]


class Embedding(Guarded, nn.Embedding):
    """A torch.nn.Embedding that computes `fewbit.functional.embedding`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        return F.embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
