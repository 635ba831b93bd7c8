"""Upsampling that keeps nothing but sizes."""

from __future__ import annotations

from torch import Tensor, nn

from fewbit.functional.interpolation import interpolate
from fewbit.nn.guarded import Guarded

__all__ = ["Upsample", "UpsamplingBilinear2d", "UpsamplingNearest2d"]


class Upsample(Guarded, nn.Upsample):
    """torch.nn.Upsample; see `fewbit.functional.interpolate`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        return interpolate(
            input,
            self.size,
            self.scale_factor,
            self.mode,
            self.align_corners,
            recompute_scale_factor=self.recompute_scale_factor,
        )


class UpsamplingNearest2d(Upsample, nn.UpsamplingNearest2d):
    """torch.nn.UpsamplingNearest2d; torch's own keeps nothing."""


class UpsamplingBilinear2d(Upsample, nn.UpsamplingBilinear2d):
    """torch.nn.UpsamplingBilinear2d; torch's own keeps nothing."""
