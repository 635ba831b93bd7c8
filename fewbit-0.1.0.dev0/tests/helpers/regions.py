"""A model with checkpointed blocks."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def block(width=64):
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
    )


class Regions(nn.Module):
    """A model of a layer and two blocks in checkpoints.

    Args:
        reentrant: as of torch's checkpoint.
        regions: the form in which checkpoints call the blocks, "modules", "functions" or "both"; None without checkpoints.
        width: features.
    """

    def __init__(self, reentrant, regions="modules", width=64):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([block(width), block(width)])
        self.reentrant, self.regions = reentrant, regions

    def forward(self, x):
        x = self.first(x)
        for number, region in enumerate(self.blocks):
            call = region
            if self.regions == "functions" or (self.regions == "both" and number == 0):
                call = lambda x, layers=region: layers[3](layers[2](layers[1](layers[0](x))))  # noqa: E731
            x = checkpoint(call, x, use_reentrant=self.reentrant) if self.regions else region(x)
        return x
