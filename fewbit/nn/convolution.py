"""Convolutions that keep quantized inputs."""

from __future__ import annotations

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
    """The forward of torch's Conv1d to Conv3d, around one of our functions."""

    def _convolve(self, function, input: Tensor) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            # The padded input is what is quantized.
            input = F.pad(input, self._reversed_padding_repeated_twice, self.padding_mode)
            padding = 0
        arguments = self.stride, padding, self.dilation, self.groups
        return function(input, self.weight, self.bias, *arguments, quantizer=self.quantizer)


class Conv1d(_Conv, nn.Conv1d):
    """torch.nn.Conv1d; see `fewbit.functional.conv1d`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._convolve(F.conv1d, input) if self.training else self._exact(input)


class Conv2d(_Conv, nn.Conv2d):
    """torch.nn.Conv2d; see `fewbit.functional.conv2d`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._convolve(F.conv2d, input) if self.training else self._exact(input)


class Conv3d(_Conv, nn.Conv3d):
    """torch.nn.Conv3d; see `fewbit.functional.conv3d`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._convolve(F.conv3d, input) if self.training else self._exact(input)


class _ConvTranspose(Quantized):
    """The forward of torch's ConvTranspose1d to ConvTranspose3d, around one of our functions."""

    def _convolve(self, function, dims: int, input: Tensor, output_size) -> Tensor:
        output_padding = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation
        )
        arguments = self.stride, self.padding, output_padding, self.groups, self.dilation
        return function(input, self.weight, self.bias, *arguments, quantizer=self.quantizer)


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d; see `fewbit.functional.conv_transpose1d`."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if not self.training:
            return self._exact(input, output_size)
        return self._convolve(F.conv_transpose1d, 1, input, output_size)


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d; see `fewbit.functional.conv_transpose2d`."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if not self.training:
            return self._exact(input, output_size)
        return self._convolve(F.conv_transpose2d, 2, input, output_size)


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d; see `fewbit.functional.conv_transpose3d`."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if not self.training:
            return self._exact(input, output_size)
        return self._convolve(F.conv_transpose3d, 3, input, output_size)
