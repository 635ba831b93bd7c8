"""A small language model, its loss, and `fewbit.fit_` without output."""

import torch
from torch import nn
from torch.nn import functional as F

import fewbit

MIB = 2**20
WORDS, WIDTH = 200, 64


class Language(nn.Module):
    def __init__(self, layers=4, dropout=0.1, words=WORDS, width=WIDTH):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, "gelu", batch_first=True)
        self.embedding = nn.Embedding(words, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x)))


def loss(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def language(**options):
    torch.manual_seed(0)
    return Language(**options).train(), torch.randint(WORDS, (8, 64))


def fit(model, batch, memory, **options):
    return fewbit.fit_(
        model, batch, memory, **{"loss": loss, "verbose": False, "progress": False, **options}
    )


def mean_loss(model, batch):
    return model(batch).mean()
