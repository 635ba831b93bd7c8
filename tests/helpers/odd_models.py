"""Models that are odd to resume: layers that are skipped, called twice, checkpointed, or called by the loop itself."""

import torch
from composed import Composed
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def linear(inputs=8, outputs=8):
    return nn.Linear(inputs, outputs)


def wide(activation):
    return nn.Sequential(linear(8, 64), activation, linear(64, 8))


def between():
    """A layer saves a tensor between an activation and the layer that saves the activation's result."""

    def forward(model, x):
        h = model.act(model.a(x))
        g = model.b(x * 2)
        return model.c(h) + g

    return Composed(forward, a=linear(8, 64), b=linear(), c=linear(64, 8), act=nn.GELU())


def two_followers():
    """Two layers save one result, in an order that depends on the data."""

    def forward(model, x):
        h = model.act(model.up(x))
        first, second = (model.a, model.b) if x.sum() > 0 else (model.b, model.a)
        return first(h) + 2 * second(h)

    return Composed(forward, up=linear(8, 64), act=nn.ReLU(), a=linear(64, 8), b=linear(64, 8))


def dropped():
    """Some layers are skipped in some forwards."""

    def forward(model, x):
        for number, block in enumerate(model.blocks):
            h = block[1](block[0](x))
            x = x + (block[2](h) if x[number].sum() > 0 else h[:, :8])
        return x

    return Composed(forward, blocks=nn.ModuleList(wide(nn.SiLU()) for _ in range(3)))


def keeps_nothing():
    """In some forwards only a copy is saved that an activation makes for a layer that is then not called."""

    def forward(model, x):
        h = model.act((x * model.scale).repeat(1, 8))
        return model.layer(h) if x.sum() > 0 else h * 2

    return Composed(forward, act=nn.ReLU(), layer=linear(64, 8), scale=nn.Parameter(torch.ones(8)))


def again():
    """One module is called twice, with dropout and functions. Norms save two copies."""

    def forward(model, x):
        for _ in range(2):
            x = model.norm(x + model.dropout(model.block(x)))
            x = x + F.linear(F.gelu(x), model.weight)
            q = x[:, None]
            x = x + F.scaled_dot_product_attention(q, q, q)[:, 0]
        return x

    weight = nn.Parameter(torch.eye(8))
    layers = {"norm": nn.LayerNorm(8), "block": wide(nn.GELU()), "dropout": nn.Dropout(0.2)}
    return Composed(forward, **layers, weight=weight)


def checkpointed(reentrant):
    """Checkpointed regions are modules, layers and functions, one of them called twice; reentrant or not."""

    def forward(model, x):
        x = model.layer(model.first(x))
        for region in (model.layer, model.block, model.block, lambda x: model.layer(x.relu())):
            x = x + checkpoint(region, x, use_reentrant=reentrant)
        return x

    block = wide(nn.GELU()).append(nn.Dropout(0.2))
    return Composed(forward, block=block, first=linear(), layer=linear())


class WhollyCheckpointed(nn.Module):
    """The training loop recomputes the whole forward."""

    def __init__(self, reentrant):
        super().__init__()
        self.layers, self.reentrant = wide(nn.GELU()), reentrant

    def forward(self, x):
        return self.layers(x)

    def parts(self, x):
        return checkpoint(self, x.requires_grad_(), use_reentrant=self.reentrant)


class ByItself(nn.Module):
    """The training loop calls the model's parts, of which the first is a layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.body = linear(), nn.Sequential(nn.GELU(), linear())

    def parts(self, x):
        return self.body(self.embed(x * torch.arange(1.0, len(x) + 1)[:, None]))


ODD = {
    "between": between,
    "two followers": two_followers,
    "two followers, of other bits": two_followers,
    "dropped": dropped,
    "keeps nothing": keeps_nothing,
    "again": again,
    "checkpointed": lambda: checkpointed(False),
    "checkpointed, reentrant": lambda: checkpointed(True),
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
