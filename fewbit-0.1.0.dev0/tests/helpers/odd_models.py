"""Models that are odd to resume: layers that are skipped, called twice, checkpointed, or called by the loop itself."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Between(nn.Module):
    """A layer saves a tensor between an activation and the layer that saves the activation's result."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.act = (
            nn.Linear(8, 64),
            nn.Linear(8, 8),
            nn.Linear(64, 8),
            nn.GELU(),
        )

    def forward(self, x):
        h = self.act(self.a(x))
        g = self.b(x * 2)
        return self.c(h) + g


class TwoFollowers(nn.Module):
    """Two layers save one result, in an order that depends on the data."""

    def __init__(self):
        super().__init__()
        self.up, self.act = nn.Linear(8, 64), nn.ReLU()
        self.a, self.b = (nn.Linear(64, 8) for _ in range(2))

    def forward(self, x):
        h = self.act(self.up(x))
        first, second = (self.a, self.b) if x.sum() > 0 else (self.b, self.a)
        return first(h) + 2 * second(h)


class Dropped(nn.Module):
    """Some layers are skipped in some forwards."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 8)) for _ in range(3)
        )

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            h = block[1](block[0](x))
            x = x + (block[2](h) if x[i].sum() > 0 else h[:, :8])
        return x


class KeepsNothing(nn.Module):
    """In some forwards only a copy is saved that an activation makes for a layer that is then not called."""

    def __init__(self):
        super().__init__()
        self.act, self.layer, self.scale = nn.ReLU(), nn.Linear(64, 8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        h = self.act((x * self.scale).repeat(1, 8))
        return self.layer(h) if x.sum() > 0 else h * 2


class Again(nn.Module):
    """One module is called twice, with dropout and functions. Norms save two copies."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.block = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
        self.dropout, self.weight = nn.Dropout(0.2), nn.Parameter(torch.eye(8))

    def forward(self, x):
        for _ in range(2):
            x = self.norm(x + self.dropout(self.block(x)))
            x = x + F.linear(F.gelu(x), self.weight)
            q = x[:, None]
            x = x + F.scaled_dot_product_attention(q, q, q)[:, 0]
        return x


class Checkpointed(nn.Module):
    """Checkpointed regions are modules, layers and functions, one of them called twice; reentrant or not."""

    def __init__(self, reentrant):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8), nn.Dropout(0.2))
        self.first, self.layer, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 8), reentrant

    def forward(self, x):
        x = self.layer(self.first(x))
        for region in (self.layer, self.block, self.block, lambda x: self.layer(x.relu())):
            x = x + checkpoint(region, x, use_reentrant=self.reentrant)
        return x


class WhollyCheckpointed(nn.Module):
    """The training loop recomputes the whole forward."""

    def __init__(self, reentrant):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
        self.reentrant = reentrant

    def forward(self, x):
        return self.layers(x)

    def parts(self, x):
        return checkpoint(self, x.requires_grad_(), use_reentrant=self.reentrant)


class ByItself(nn.Module):
    """The training loop calls the model's parts, of which the first is a layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Linear(8, 8), nn.Sequential(nn.GELU(), nn.Linear(8, 8))

    def parts(self, x):
        return self.body(self.embed(x * torch.arange(1.0, len(x) + 1)[:, None]))


ODD = {
    "between": Between,
    "two followers": TwoFollowers,
    "two followers, of other bits": TwoFollowers,
    "dropped": Dropped,
    "keeps nothing": KeepsNothing,
    "again": Again,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "wholly": lambda: WhollyCheckpointed(False),
    "wholly, reentrant": lambda: WhollyCheckpointed(True),
    "by itself": ByItself,
}


OPTIONS = {  # options of compress_ for some of these models
    "two followers, of other bits": {"overrides": {"*b": 3}},
    "dropped": {"layers": {"functional": False}},
    "keeps nothing": {"layers": {"functional": False}},
    "again": {"layers": {"copies": 2}},
}
