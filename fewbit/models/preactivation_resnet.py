"""Pre-activation residual networks for 32 by 32 images (He et al., 2016b), as in section 4 of BLPA (Chakrabarti and Moseley, 2019).

Three stages, with 64, 128 and 256 channels, have (depth - 2) / 9 bottleneck units of three blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fewbit.errors import InputError

DEPTHS = (164, 254, 488, 1001)
"""The depths that the paper measures."""
STEM, WIDTHS, EXPANSION = 16, (16, 32, 64), 4


class PreActivationBlock(nn.Module):
    """A block that computes linear(activation(norm(x))), with the children of `fewbit.nn.PreActivation`."""

    def __init__(self, norm: nn.Module, linear: nn.Module, activation: nn.Module | None = None):
        super().__init__()
        self.norm = norm
        self.activation = nn.ReLU(inplace=True) if activation is None else activation
        self.linear = linear

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(self.activation(self.norm(input)))


class PreActivationBottleneck(nn.Module):
    """The sum of x, subsampled and extended by zeros if shapes differ, and the result of three blocks, the first two with `width` channels."""

    def __init__(self, inputs: int, width: int, stride: int, block: Callable):
        super().__init__()
        self.stride = stride
        self.more = EXPANSION * width - inputs

        def made(inputs, outputs, kernel, stride=1):
            convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
            return block(nn.BatchNorm2d(inputs), convolution)

        self.reduce = made(inputs, width, 1)
        self.convolve = made(width, width, 3, stride)
        self.expand = made(width, EXPANSION * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        short_cut = x
        if self.stride != 1:
            short_cut = x[:, :, :: self.stride, :: self.stride]
        if self.more:
            short_cut = nn.functional.pad(short_cut, (0, 0, 0, 0, 0, self.more))
        return short_cut + self.expand(self.convolve(self.reduce(x)))


class PreActivationResNet(nn.Module):
    """A pre-activation ResNet, which computes logits (batch, classes) for images (batch, channels, H, W).

    Args:
        depth: The depth, 9 n + 2 for a whole n.
        width: The factor of the number of channels in every layer; 4 for the paper's ResNet-1001-4x.
        channels: The number of channels of the images.
        block: Makes a block of a norm and a convolution: `PreActivationBlock` or `fewbit.nn.PreActivation`, with the same `state_dict` keys.

    Raises:
        InputError: The depth is not 9 n + 2.
    """

    def __init__(
        self,
        depth: int = 164,
        classes: int = 10,
        width: int = 1,
        channels: int = 3,
        block: Callable = PreActivationBlock,
    ):
        super().__init__()
        units, rest = divmod(depth - 2, 9)
        if rest or units < 1:
            raise InputError(f"depth: expected 9 n + 2, got {depth!r}")
        inputs = STEM * width
        self.stem = nn.Conv2d(channels, inputs, 3, padding=1, bias=False)
        stages = []
        for stage, of_stage in enumerate(WIDTHS):
            layers = []
            for unit in range(units):
                stride = 2 if stage and not unit else 1
                layers.append(PreActivationBottleneck(inputs, of_stage * width, stride, block))
                inputs = EXPANSION * of_stage * width
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(inputs)
        self.activation = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        x = self.pool(self.activation(self.norm(x)))
        return self.linear(torch.flatten(x, 1))
