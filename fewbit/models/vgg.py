"""VGG-11 to VGG-19 without batch norm (Simonyan and Zisserman, 2015), with torchvision's `state_dict` keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fewbit.models.activation_names import relu

# The number of convolutions of each stage. A 2x2 max pooling follows every stage.
LAYERS = {
    "vgg11": (1, 1, 2, 2, 2),
    "vgg13": (2, 2, 2, 2, 2),
    "vgg16": (2, 2, 3, 3, 3),
    "vgg19": (2, 2, 4, 4, 4),
}
_WIDTHS = (64, 128, 256, 512, 512)


class VGG(nn.Module):
    """VGG, which computes logits (batch, classes) for images (batch, 3, height, width). `name` is a key of `LAYERS`."""

    def __init__(self, name: str, activation: Callable = relu, classes: int = 1000):
        super().__init__()
        features, inputs = [], 3
        for width, depth in zip(_WIDTHS, LAYERS[name], strict=True):
            for _ in range(depth):
                features += [nn.Conv2d(inputs, width, 3, padding=1), activation()]
                inputs = width
            features.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*features)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(inputs * 7 * 7, 4096),
            activation(),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            activation(),
            nn.Dropout(0.5),
            nn.Linear(4096, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
