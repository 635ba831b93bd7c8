"""Cross-entropy losses as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fewbit import functional as F
from fewbit.nn.base import Quantized

__all__ = ["CrossEntropyLoss", "LinearCrossEntropy"]


class CrossEntropyLoss(Quantized, nn.CrossEntropyLoss):
    """A torch.nn.CrossEntropyLoss, plus `bits`, `group_size` and `quantizer`, that computes `fewbit.functional.cross_entropy`."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if not self.training:
            return self._exact(input, target)
        return F.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            quantizer=self.quantizer,
        )


class LinearCrossEntropy(nn.Linear):
    """The loss `nn.CrossEntropyLoss()(nn.Linear(in_features, out_features)(x), target)`, by `fewbit.functional.linear_cross_entropy`.

    Other arguments are those of these classes.

    Args:
        class_weight: the weights of the classes, (out_features,), or None.
        chunk_size: the number of rows in a chunk, or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        chunk_size: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.register_buffer("class_weight", class_weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.chunk_size = chunk_size

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of `input` (*, in_features) and the classes `target` (*,) int64, a scalar unless the reduction is "none"."""
        return F.linear_cross_entropy(
            input,
            self.weight,
            target,
            linear_bias=self.bias,
            weight=self.class_weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            chunk_size=self.chunk_size,
        )
