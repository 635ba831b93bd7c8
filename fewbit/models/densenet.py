"""DenseNet-121 to DenseNet-201 (Huang et al., 2017), with torchvision's `state_dict` keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fewbit.models.activation_names import relu

# Growth rate, channels after the first convolution, and number of dense layers of each block.
LAYERS = {
    "densenet121": (32, 64, (6, 12, 24, 16)),
    "densenet161": (48, 96, (6, 12, 36, 24)),
    "densenet169": (32, 64, (6, 12, 32, 32)),
    "densenet201": (32, 64, (6, 12, 48, 32)),
}
_BOTTLENECK = 4  # output channels of a dense layer's first convolution, divided by the growth rate


class DenseLayer(nn.Module):
    """A 1x1 and a 3x3 convolution, each after batch norm and activation."""

    def __init__(self, inputs: int, growth: int, activation: Callable):
        super().__init__()
        width = _BOTTLENECK * growth
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = activation()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu2 = activation()
        self.conv2 = nn.Conv2d(width, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = torch.cat(features, 1)
        x = self.conv1(self.relu1(self.norm1(x)))
        return self.conv2(self.relu2(self.norm2(x)))


class DenseBlock(nn.ModuleDict):
    """Dense layers, each of which adds `growth` channels to its input."""

    def __init__(self, inputs: int, growth: int, depth: int, activation: Callable):
        super().__init__()
        for i in range(depth):
            self[f"denselayer{i + 1}"] = DenseLayer(inputs + i * growth, growth, activation)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class Transition(nn.Sequential):
    """A 1x1 convolution, and a pooling that halves height and width."""

    def __init__(self, inputs: int, outputs: int, activation: Callable):
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.relu = activation()
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.pool = nn.AvgPool2d(2)


class DenseNet(nn.Module):
    """DenseNet, which computes logits (batch, classes) for images (batch, 3, height, width). `name` is a key of `LAYERS`."""

    def __init__(self, name: str, activation: Callable = relu, classes: int = 1000):
        super().__init__()
        growth, channels, depths = LAYERS[name]
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(3, channels, 7, 2, padding=3, bias=False))
        self.features.add_module("norm0", nn.BatchNorm2d(channels))
        self.features.add_module("relu0", activation())
        self.features.add_module("pool0", nn.MaxPool2d(3, 2, padding=1))
        for i, depth in enumerate(depths, start=1):
            block = DenseBlock(channels, growth, depth, activation)
            self.features.add_module(f"denseblock{i}", block)
            channels += depth * growth
            if i < len(depths):
                transition = Transition(channels, channels // 2, activation)
                self.features.add_module(f"transition{i}", transition)
                channels //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(channels))
        self.relu = activation()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.relu(self.features(x)))
        return self.classifier(torch.flatten(x, 1))
