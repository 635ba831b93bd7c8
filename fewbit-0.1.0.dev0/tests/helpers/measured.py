"""A small model whose gradients are measured, and a loss with a different gradient for each output."""

import torch
from torch import nn
from torch.nn import functional as F


class Images(nn.Module):
    """A small residual network with batch norm."""

    def __init__(self, classes=10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        x = self.stem(x)
        return self.head(F.relu(x + self.body(x)).mean((2, 3)))


def squared(model, batch):
    y = model(batch)
    weights = torch.linspace(0.5, 1.5, y[0].numel(), device=y.device).view(y.shape[1:])
    return (y * weights).square().mean()


def gradient(model, batch, loss=squared):
    """Return the gradients of all parameters in one float64 vector."""
    found = torch.autograd.grad(loss(model, batch), list(model.parameters()))
    return torch.cat([tensor.double().flatten() for tensor in found])
