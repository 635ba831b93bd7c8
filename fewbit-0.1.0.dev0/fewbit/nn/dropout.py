"""Dropout, whose mask is saved in 1 bit for each element."""

from __future__ import annotations

from torch import Tensor, nn

from fewbit import functional as F
from fewbit.nn.base import Guarded

__all__ = [
    "AlphaDropout",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "FeatureAlphaDropout",
]


class Dropout(Guarded, nn.Dropout):
    """A torch.nn.Dropout that computes `fewbit.functional.dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.p, self.training, self.inplace)


class Dropout1d(Guarded, nn.Dropout1d):
    """A torch.nn.Dropout1d that computes `fewbit.functional.dropout1d`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout1d(input, self.p, self.training, self.inplace)


class Dropout2d(Guarded, nn.Dropout2d):
    """A torch.nn.Dropout2d that computes `fewbit.functional.dropout2d`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout2d(input, self.p, self.training, self.inplace)


class Dropout3d(Guarded, nn.Dropout3d):
    """A torch.nn.Dropout3d that computes `fewbit.functional.dropout3d`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout3d(input, self.p, self.training, self.inplace)


class AlphaDropout(Guarded, nn.AlphaDropout):
    """A torch.nn.AlphaDropout that computes `fewbit.functional.alpha_dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.alpha_dropout(input, self.p, self.training)


class FeatureAlphaDropout(Guarded, nn.FeatureAlphaDropout):
    """A torch.nn.FeatureAlphaDropout that computes `fewbit.functional.feature_alpha_dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.feature_alpha_dropout(input, self.p, self.training)
