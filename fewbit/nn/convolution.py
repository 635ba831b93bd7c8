"""Convolutions."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fewbit import functional as F
from fewbit.nn.base import Quantized

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
]


class _Conv(Quantized):
    _function: Callable

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._exact(input)
        padding = self.padding
        if self.padding_mode != "zeros":
            # The convolution below then saves the padded input.
            amounts = self._reversed_padding_repeated_twice
            input = F.pad(input, amounts, self.padding_mode)
            padding = 0
        arguments = self.stride, padding, self.dilation, self.groups
        return self._function(input, self.weight, self.bias, *arguments, quantizer=self.quantizer)


class Conv1d(_Conv, nn.Conv1d):
    """A torch.nn.Conv1d that computes `fewbit.functional.conv1d`."""

    _function = staticmethod(F.conv1d)


class Conv2d(_Conv, nn.Conv2d):
    """A torch.nn.Conv2d that computes `fewbit.functional.conv2d`."""

    _function = staticmethod(F.conv2d)


class Conv3d(_Conv, nn.Conv3d):
    """A torch.nn.Conv3d that computes `fewbit.functional.conv3d`."""

    _function = staticmethod(F.conv3d)


class _ConvTranspose(Quantized):
    _function: Callable

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if not self.training:
            return self._exact(input, output_size)
        windows = self.stride, self.padding, self.kernel_size, len(self.kernel_size), self.dilation
        output_padding = self._output_padding(input, output_size, *windows)
        arguments = self.stride, self.padding, output_padding, self.groups, self.dilation
        return self._function(input, self.weight, self.bias, *arguments, quantizer=self.quantizer)


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """A torch.nn.ConvTranspose1d that computes `fewbit.functional.conv_transpose1d`."""

    _function = staticmethod(F.conv_transpose1d)


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """A torch.nn.ConvTranspose2d that computes `fewbit.functional.conv_transpose2d`."""

    _function = staticmethod(F.conv_transpose2d)


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """A torch.nn.ConvTranspose3d that computes `fewbit.functional.conv_transpose3d`."""

    _function = staticmethod(F.conv_transpose3d)
