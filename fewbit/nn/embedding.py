"""Embedding with its indices kept in the narrowest integers."""

from __future__ import annotations

from torch import Tensor, nn

from fewbit.functional.embedding import embedding
from fewbit.nn.guarded import Guarded

__all__ = ["Embedding"]


class Embedding(Guarded, nn.Embedding):
    """torch.nn.Embedding; see `fewbit.functional.embedding`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        return embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
