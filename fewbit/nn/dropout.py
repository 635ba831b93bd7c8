"""Dropout with its mask kept in 1 bit an element."""

from __future__ import annotations

from torch import Tensor, nn

from fewbit.functional.dropout import (
    alpha_dropout,
    dropout,
    dropout1d,
    dropout2d,
    dropout3d,
    feature_alpha_dropout,
)
from fewbit.nn.guarded import Guarded

__all__ = [
    "AlphaDropout",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "FeatureAlphaDropout",
]


class Dropout(Guarded, nn.Dropout):
    """torch.nn.Dropout; see `fewbit.functional.dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p, self.training, self.inplace)


class Dropout1d(Guarded, nn.Dropout1d):
    """torch.nn.Dropout1d; see `fewbit.functional.dropout1d`."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout1d(input, self.p, self.training, self.inplace)


class Dropout2d(Guarded, nn.Dropout2d):
    """torch.nn.Dropout2d; see `fewbit.functional.dropout2d`."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout2d(input, self.p, self.training, self.inplace)


class Dropout3d(Guarded, nn.Dropout3d):
    """torch.nn.Dropout3d; see `fewbit.functional.dropout3d`."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout3d(input, self.p, self.training, self.inplace)


class AlphaDropout(Guarded, nn.AlphaDropout):
    """torch.nn.AlphaDropout; see `fewbit.functional.alpha_dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        return alpha_dropout(input, self.p, self.training)


class FeatureAlphaDropout(Guarded, nn.FeatureAlphaDropout):
    """torch.nn.FeatureAlphaDropout; see `fewbit.functional.feature_alpha_dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        return feature_alpha_dropout(input, self.p, self.training)
