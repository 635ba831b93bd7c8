"""The largest numbers of a dtype are finite after dequantization, so that gradients are finite."""

from __future__ import annotations

import pytest
import torch
from samples import name_of, normal

import fewbit.functional as F
from fewbit.config import QUANTIZERS, UNIFORM
from fewbit.runtime.quantizers.quantizer import Quantizer

MOST = torch.finfo(torch.float16).max
TENSORS = {
    "both": lambda: torch.tensor([[MOST, -MOST] * 64]),
    "one": lambda: torch.full((1, 128), MOST),
    "the other": lambda: torch.full((1, 128), -MOST),
    "among others": lambda: torch.cat([normal((1, 126)), torch.tensor([[MOST, -MOST]])], 1),
    "from zero": lambda: torch.tensor([[MOST, 0.0] * 64]),
}


@pytest.mark.parametrize("bits", [1, 2, 5, 8])
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_float16_is_restored_finite(name, bits, kind, backend):
    x = TENSORS[name]().to(backend.device, torch.float16)
    torch.manual_seed(0)
    kept = Quantizer(bits, kind=kind).quantize(x)
    restored = kept.spec.dequantize(kept.tensors)
    assert restored.isfinite().all() and restored.abs().max() <= MOST
    if kind == UNIFORM:
        step = 2 * MOST / (2**bits - 1) * (1 + 2**-6)
        assert (restored.double() - x.double()).abs().max() <= step


CALLS = {
    "linear": lambda m, x, w, **ours: m.linear(x, w, **ours),
    "layer_norm": lambda m, x, w, **ours: m.layer_norm(x, (128,), w[0], **ours),
    "group_norm": lambda m, x, w, **ours: m.group_norm(x, 2, w[0], **ours),
    "batch_norm": lambda m, x, w, **ours: m.batch_norm(x.t(), None, None, training=True, **ours),
}


@pytest.mark.parametrize("bits", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=name_of)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("values", TENSORS)
def test_gradients_are_finite_where_torchs_are(values, name, dtype, bits):
    def gradients(functions, **ours):
        x = TENSORS[values]().to(dtype).requires_grad_()
        w = torch.full((1, 128), 1e-4, dtype=dtype, requires_grad=True)
        y = CALLS[name](functions, x, w, **ours)
        wanted = [x] if name == "batch_norm" else [x, w]
        return torch.autograd.grad(y, wanted, torch.full_like(y, 1e-3))

    for ours, theirs in zip(gradients(F, bits=bits), gradients(torch.nn.functional), strict=True):
        assert ours.isfinite().all() or not theirs.isfinite().all()
