"""EfficientNet-B0, B3 and B7 (Tan and Le, 2019), with torchvision's `state_dict` keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fewbit.models.activation_names import silu

# Width multiplier, depth multiplier, and dropout before the classifier.
SCALES = {
    "efficientnet_b0": (1.0, 1.0, 0.2),
    "efficientnet_b3": (1.2, 1.4, 0.3),
    "efficientnet_b7": (2.0, 3.1, 0.5),
}
# For each stage of B0: expansion factor, kernel size, stride, input channels, output channels, number of blocks.
_STAGES = (
    (1, 3, 1, 32, 16, 1),
    (6, 3, 2, 16, 24, 2),
    (6, 5, 2, 24, 40, 2),
    (6, 3, 2, 40, 80, 3),
    (6, 5, 1, 80, 112, 3),
    (6, 5, 2, 112, 192, 4),
    (6, 3, 1, 192, 320, 1),
)
_SURVIVAL = 0.2  # training drops block i of n, i from 0, with probability 0.2 i / n


def _channels(number: float) -> int:
    """Return the nearest multiple of 8 that is at least nine tenths of the number."""
    rounded = max(8, int(number + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * number else rounded + 8


def _unit(inputs, outputs, kernel, stride=1, groups=1, activation=None, eps=1e-5, momentum=0.1):
    layers = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps, momentum),
    ]
    return nn.Sequential(*layers, *([activation()] if activation else []))


class SqueezeExcitation(nn.Module):
    """A module that scales channels by factors from all channels' means."""

    def __init__(self, channels: int, squeezed: int, activation: Callable):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.activation = activation()
        self.scale_activation = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.fc2(self.activation(self.fc1(self.avgpool(x))))
        return self.scale_activation(scale) * x


class StochasticDepth(nn.Module):
    """A module that sets each sample to zero with probability p, and divides the others by 1 - p, in training mode only."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = torch.empty((len(x), 1, 1, 1), dtype=x.dtype, device=x.device)
        return x * keep.bernoulli_(1 - self.p).div_(1 - self.p)


class MBConv(nn.Module):
    """An inverted bottleneck: expansion, depthwise convolution, squeeze and excitation, projection."""

    def __init__(self, inputs, outputs, expansion, kernel, stride, drop, activation, norm):
        super().__init__()
        self.use_res_connect = stride == 1 and inputs == outputs
        width, layers = _channels(inputs * expansion), []
        if width != inputs:
            layers.append(_unit(inputs, width, 1, activation=activation, **norm))
        layers += [
            _unit(width, width, kernel, stride, groups=width, activation=activation, **norm),
            SqueezeExcitation(width, max(1, inputs // 4), activation),
            _unit(width, outputs, 1, **norm),
        ]
        self.block = nn.Sequential(*layers)
        self.stochastic_depth = StochasticDepth(drop)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        return x + self.stochastic_depth(y) if self.use_res_connect else y


class EfficientNet(nn.Module):
    """EfficientNet, which computes logits (batch, classes) for images (batch, 3, height, width). `name` is a key of `SCALES`."""

    def __init__(self, name: str, activation: Callable = silu, classes: int = 1000):
        super().__init__()
        wide, deep, dropout = SCALES[name]
        # B5 and larger were trained with TensorFlow's batch norm settings.
        norm = {"eps": 1e-3, "momentum": 0.01} if wide > 1.5 else {}
        stages = [
            (e, k, s, _channels(i * wide), _channels(o * wide), math.ceil(n * deep))
            for e, k, s, i, o, n in _STAGES
        ]
        total, done = sum(stage[-1] for stage in stages), 0
        features = [_unit(3, stages[0][3], 3, 2, activation=activation, **norm)]
        for expansion, kernel, stride, inputs, outputs, depth in stages:
            blocks = []
            for i in range(depth):
                drop = _SURVIVAL * done / total
                first = (inputs, outputs, expansion, kernel, stride)
                shape = first if i == 0 else (outputs, outputs, expansion, kernel, 1)
                blocks.append(MBConv(*shape, drop, activation, norm))
                done += 1
            features.append(nn.Sequential(*blocks))
        channels = stages[-1][4]
        features.append(_unit(channels, 4 * channels, 1, activation=activation, **norm))
        self.features = nn.Sequential(*features)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout, inplace=True), nn.Linear(4 * channels, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
