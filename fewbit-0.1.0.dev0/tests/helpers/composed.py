"""A model of a few modules whose forward is given as a function."""

from torch import nn


class Composed(nn.Module):
    """A module with submodules and parameters, and a forward that takes the module and its inputs."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.of = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.of(self, *inputs)
