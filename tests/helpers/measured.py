"""A small model whose gradients are measured, a loss with a different gradient for each output, and the peak of a step."""

import gc

import torch
from harness import most_bytes
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves


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


def measured_peak(model, batch, loss, make=torch.optim.AdamW):
    """Return the most bytes that exist at one moment of the second step."""
    optimizer = make(model.parameters())

    def step():
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = tree_leaves(batch)
    before = sum(x.nbytes for x in [*model.parameters(), *model.buffers(), *tensors, *states])
    gc.collect()  # garbage that is freed within the step would count
    return before + most_bytes(step)
