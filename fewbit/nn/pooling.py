"""Pooling and upsampling. Max pooling saves the position of each maximum, the others save nothing."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fewbit import functional as F
from fewbit.nn.base import Guarded

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Upsample",
    "UpsamplingBilinear2d",
    "UpsamplingNearest2d",
]


class _Resizing(Guarded):
    """A mixin that calls the function `_function` with the attributes `_names` of the module."""

    _function: Callable
    _names: tuple[str, ...]

    def forward(self, input: Tensor):
        if not self.training:
            return super().forward(input)
        return self._function(input, **{name: getattr(self, name) for name in self._names})


class _MaxPool(_Resizing):
    _names = "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"


class MaxPool1d(_MaxPool, nn.MaxPool1d):
    """A torch.nn.MaxPool1d that computes `fewbit.functional.max_pool1d`."""

    _function = staticmethod(F.max_pool1d)


class MaxPool2d(_MaxPool, nn.MaxPool2d):
    """A torch.nn.MaxPool2d that computes `fewbit.functional.max_pool2d`."""

    _function = staticmethod(F.max_pool2d)


class MaxPool3d(_MaxPool, nn.MaxPool3d):
    """A torch.nn.MaxPool3d that computes `fewbit.functional.max_pool3d`."""

    _function = staticmethod(F.max_pool3d)


class _AvgPool(_Resizing):
    _names = "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"


class AvgPool1d(_AvgPool, nn.AvgPool1d):
    """A torch.nn.AvgPool1d that computes `fewbit.functional.avg_pool1d`."""

    _function = staticmethod(F.avg_pool1d)


class AvgPool2d(_AvgPool, nn.AvgPool2d):
    """A torch.nn.AvgPool2d that computes `fewbit.functional.avg_pool2d`."""

    _function = staticmethod(F.avg_pool2d)
    _names = *_AvgPool._names, "divisor_override"


class AvgPool3d(_AvgPool, nn.AvgPool3d):
    """A torch.nn.AvgPool3d that computes `fewbit.functional.avg_pool3d`."""

    _function = staticmethod(F.avg_pool3d)
    _names = *_AvgPool._names, "divisor_override"


class _AdaptiveMaxPool(_Resizing):
    _names = "output_size", "return_indices"


class AdaptiveMaxPool1d(_AdaptiveMaxPool, nn.AdaptiveMaxPool1d):
    """A torch.nn.AdaptiveMaxPool1d that computes `fewbit.functional.adaptive_max_pool1d`."""

    _function = staticmethod(F.adaptive_max_pool1d)


class AdaptiveMaxPool2d(_AdaptiveMaxPool, nn.AdaptiveMaxPool2d):
    """A torch.nn.AdaptiveMaxPool2d that computes `fewbit.functional.adaptive_max_pool2d`."""

    _function = staticmethod(F.adaptive_max_pool2d)


class AdaptiveMaxPool3d(_AdaptiveMaxPool, nn.AdaptiveMaxPool3d):
    """A torch.nn.AdaptiveMaxPool3d that computes `fewbit.functional.adaptive_max_pool3d`."""

    _function = staticmethod(F.adaptive_max_pool3d)


class _AdaptiveAvgPool(_Resizing):
    _names = ("output_size",)


class AdaptiveAvgPool1d(_AdaptiveAvgPool, nn.AdaptiveAvgPool1d):
    """A torch.nn.AdaptiveAvgPool1d that computes `fewbit.functional.adaptive_avg_pool1d`."""

    _function = staticmethod(F.adaptive_avg_pool1d)


class AdaptiveAvgPool2d(_AdaptiveAvgPool, nn.AdaptiveAvgPool2d):
    """A torch.nn.AdaptiveAvgPool2d that computes `fewbit.functional.adaptive_avg_pool2d`."""

    _function = staticmethod(F.adaptive_avg_pool2d)


class AdaptiveAvgPool3d(_AdaptiveAvgPool, nn.AdaptiveAvgPool3d):
    """A torch.nn.AdaptiveAvgPool3d that computes `fewbit.functional.adaptive_avg_pool3d`."""

    _function = staticmethod(F.adaptive_avg_pool3d)


class Upsample(_Resizing, nn.Upsample):
    """A torch.nn.Upsample that computes `fewbit.functional.interpolate`."""

    _function = staticmethod(F.interpolate)
    _names = "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor"


class UpsamplingNearest2d(Upsample, nn.UpsamplingNearest2d):
    """A torch.nn.UpsamplingNearest2d that computes `fewbit.functional.interpolate`."""


class UpsamplingBilinear2d(Upsample, nn.UpsamplingBilinear2d):
    """A torch.nn.UpsamplingBilinear2d that computes `fewbit.functional.interpolate`."""
