"""Modules whose settings torch accepts and no table serves: a conversion skips them and reports the reason."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fewbit

UNSERVED = {
    "Hardtanh(0, inf)": (lambda: nn.Hardtanh(0.0, math.inf), "a finite number for max_val"),
    "Hardtanh(-inf, 1)": (lambda: nn.Hardtanh(-math.inf, 1.0), "a finite number for min_val"),
    "Hardshrink(-.5)": (lambda: nn.Hardshrink(-0.5), "expected lambd >= 0"),
    "Softplus(-1)": (lambda: nn.Softplus(beta=-1.0), "expected beta > 0"),
    "Softplus(1, inf)": (lambda: nn.Softplus(1.0, math.inf), "a finite number for threshold"),
    "CELU(-1)": (lambda: nn.CELU(-1.0), "expected alpha > 0"),
    "Threshold(0, inf)": (lambda: nn.Threshold(0.0, math.inf), "a finite number for value"),
    "LeakyReLU(nan)": (lambda: nn.LeakyReLU(math.nan), "a finite number for negative_slope"),
}
CONVERTERS = [fewbit.compress_, fewbit.replace_activations_]


def report_of(model, convert):
    made = convert(model, bits=2, verbose=False)
    return getattr(made, "report", made)


@pytest.mark.parametrize("convert", CONVERTERS, ids=["compress_", "replace_activations_"])
@pytest.mark.parametrize("name", UNSERVED)
def test_they_stay_torchs_own(name, convert):
    make, reason = UNSERVED[name]
    model = nn.Sequential(make(), nn.ReLU())
    x = torch.linspace(-3.0, 3.0, 50).requires_grad_()
    y = model(x)
    (expected,) = torch.autograd.grad(y.sum(), x)
    report = report_of(model, convert)
    assert type(model[1]) is fewbit.ReLU and type(model[0]) is type(make())
    (row,) = report.left_alone
    assert row.path == "0" and row.reason.startswith("no table for its settings: ")
    assert reason in row.reason and "\n" not in row.reason
    ours = model(x)
    assert torch.equal(ours.nan_to_num(7.0), y.nan_to_num(7.0))
    (gradient,) = torch.autograd.grad(ours.sum(), x)
    assert torch.equal(gradient.nan_to_num(7.0), expected.nan_to_num(7.0))
    fewbit.restore_(model)
    assert type(model[1]) is nn.ReLU


SERVED = [
    lambda: nn.Hardshrink(0.0),
    lambda: nn.Softshrink(0.0),
    lambda: nn.LeakyReLU(torch.tensor(0.2)),
    lambda: nn.Hardtanh(-1, 1),
    lambda: nn.Softplus(2, 10),
    lambda: nn.RReLU(-1.0, 2.0),
]


@pytest.mark.parametrize("make", SERVED)
def test_zeros_and_numbers_of_other_types_are_served(make):
    model = nn.Sequential(make())
    assert not report_of(model, fewbit.compress_).left_alone
    x = torch.linspace(-3.0, 3.0, 50).requires_grad_()
    assert torch.autograd.grad(model(x).sum(), x)[0].isfinite().all()
