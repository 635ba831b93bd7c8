"""Pooling that keeps of its input nothing, or the places of the maxima."""

from __future__ import annotations

from torch import Tensor, nn

from fewbit.functional import pooling as F
from fewbit.nn.guarded import Guarded

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
]


def _max_pool(function, module, input):
    return function(
        input,
        module.kernel_size,
        module.stride,
        module.padding,
        module.dilation,
        ceil_mode=module.ceil_mode,
        return_indices=module.return_indices,
    )


def _avg_pool(function, module, input, *divisor):
    return function(
        input,
        module.kernel_size,
        module.stride,
        module.padding,
        module.ceil_mode,
        module.count_include_pad,
        *divisor,
    )


class MaxPool1d(Guarded, nn.MaxPool1d):
    """torch.nn.MaxPool1d; see `fewbit.functional.max_pool1d`."""

    def forward(self, input: Tensor):
        return _max_pool(F.max_pool1d, self, input) if self.training else super().forward(input)


class MaxPool2d(Guarded, nn.MaxPool2d):
    """torch.nn.MaxPool2d; see `fewbit.functional.max_pool2d`."""

    def forward(self, input: Tensor):
        return _max_pool(F.max_pool2d, self, input) if self.training else super().forward(input)


class MaxPool3d(Guarded, nn.MaxPool3d):
    """torch.nn.MaxPool3d; see `fewbit.functional.max_pool3d`."""

    def forward(self, input: Tensor):
        return _max_pool(F.max_pool3d, self, input) if self.training else super().forward(input)


class AvgPool1d(Guarded, nn.AvgPool1d):
    """torch.nn.AvgPool1d; see `fewbit.functional.avg_pool1d`."""

    def forward(self, input: Tensor) -> Tensor:
        return _avg_pool(F.avg_pool1d, self, input) if self.training else super().forward(input)


class AvgPool2d(Guarded, nn.AvgPool2d):
    """torch.nn.AvgPool2d; see `fewbit.functional.avg_pool2d`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        return _avg_pool(F.avg_pool2d, self, input, self.divisor_override)


class AvgPool3d(Guarded, nn.AvgPool3d):
    """torch.nn.AvgPool3d; see `fewbit.functional.avg_pool3d`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        return _avg_pool(F.avg_pool3d, self, input, self.divisor_override)


class AdaptiveMaxPool1d(Guarded, nn.AdaptiveMaxPool1d):
    """torch.nn.AdaptiveMaxPool1d; see `fewbit.functional.adaptive_max_pool1d`."""

    def forward(self, input: Tensor):
        if not self.training:
            return super().forward(input)
        return F.adaptive_max_pool1d(input, self.output_size, self.return_indices)


class AdaptiveMaxPool2d(Guarded, nn.AdaptiveMaxPool2d):
    """torch.nn.AdaptiveMaxPool2d; see `fewbit.functional.adaptive_max_pool2d`."""

    def forward(self, input: Tensor):
        if not self.training:
            return super().forward(input)
        return F.adaptive_max_pool2d(input, self.output_size, self.return_indices)


class AdaptiveMaxPool3d(Guarded, nn.AdaptiveMaxPool3d):
    """torch.nn.AdaptiveMaxPool3d; see `fewbit.functional.adaptive_max_pool3d`."""

    def forward(self, input: Tensor):
        if not self.training:
            return super().forward(input)
        return F.adaptive_max_pool3d(input, self.output_size, self.return_indices)


class AdaptiveAvgPool1d(Guarded, nn.AdaptiveAvgPool1d):
    """torch.nn.AdaptiveAvgPool1d; see `fewbit.functional.adaptive_avg_pool1d`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        return F.adaptive_avg_pool1d(input, self.output_size)


class AdaptiveAvgPool2d(Guarded, nn.AdaptiveAvgPool2d):
    """torch.nn.AdaptiveAvgPool2d; see `fewbit.functional.adaptive_avg_pool2d`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        return F.adaptive_avg_pool2d(input, self.output_size)


class AdaptiveAvgPool3d(Guarded, nn.AdaptiveAvgPool3d):
    """torch.nn.AdaptiveAvgPool3d; see `fewbit.functional.adaptive_avg_pool3d`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        return F.adaptive_avg_pool3d(input, self.output_size)
