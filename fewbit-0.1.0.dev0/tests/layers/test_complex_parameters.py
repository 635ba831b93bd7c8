"""Complex parameters are measured as pairs of real ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fewbit


class Filtered(nn.Module):
    """A model with a learned filter of frequencies before a norm, as one complex parameter or as pairs of real ones."""

    def __init__(self, is_complex: bool):
        super().__init__()
        torch.manual_seed(0)
        pairs = torch.randn(5, 2)
        self.is_complex = is_complex
        self.filter = nn.Parameter(torch.view_as_complex(pairs) if is_complex else pairs)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        filter = self.filter if self.is_complex else torch.view_as_complex(self.filter)
        return self.last(self.norm(torch.fft.irfft(torch.fft.rfft(x) * filter, n=8)))


def loss(model, batch):
    return model(batch).square().mean()


BATCH = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))


def profile(model):
    found = fewbit.variance_profile(model, BATCH, loss, draws=4)
    return [found.sampling.sum(), found.quantization.sum()]


def planned(model):
    found = fewbit.plan(model, BATCH, loss, progress=False)
    return [found.gradient, found.sampling]


def ratio(model):
    controller = fewbit.compress_(model, bits=2, verbose=False)
    return [controller.gradient_ratio(BATCH, loss).ratio]


@pytest.mark.slow
@pytest.mark.parametrize("measure", [profile, planned, ratio])
def test_they_are_measured_as_pairs(measure):
    ours, pairs = measure(Filtered(True)), measure(Filtered(False))
    for a, b in zip(ours, pairs, strict=True):
        assert float(a) > 0 and float(a) == pytest.approx(float(b), rel=1e-5)
