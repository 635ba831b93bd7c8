"""Batch norm's backward by a kernel that reads the quantized copy, against torch's function for the dequantized values."""

import importlib

import pytest
import torch
from fake_cuda import DEVICE, FakeCuda
from layers import relative
from samples import normal
from torch import nn

import fewbit
from fewbit.runtime import backends
from fewbit.runtime.backends import reference

BATCH_NORM = importlib.import_module("fewbit.functional.batch_norm")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture
def calls(device, monkeypatch):
    """Give the CPU's backend the kernels that only CUDA has. Return a list that gets what each call of the kernels returns."""
    backend, found = backends.on[torch.empty(0, device=device).device], []
    kernel = (reference if device == "cpu" else backend).batch_norm_backward

    def called(*args):
        found.append(kernel(*args))
        return found[-1]

    monkeypatch.setattr(backend, "batch_norm_backward", called, raising=False)
    if device == "cpu":
        monkeypatch.setattr(
            backend, "can_compute_batch_norm", lambda bits, *_: bits <= 4, raising=False
        )
    return found


def gradients(model, x, grad):
    """Return the gradients of the input and of the parameters that need one. Copies are rounded alike in each call."""
    x = x.detach().requires_grad_(x.requires_grad)
    torch.manual_seed(1)
    model.zero_grad()
    model(x).backward(grad)
    leaves = x, *model.parameters()
    return [leaf.grad.clone() for leaf in leaves if leaf.requires_grad]


def compare(monkeypatch, model, x, grad, tolerance):
    found = gradients(model, x, grad)
    with monkeypatch.context() as patch:
        patch.setattr(BATCH_NORM, "batch_norm_gradients", lambda *_: None)
        expected = gradients(model, x, grad)
    assert len(found) == len(expected) > 0
    for actual, value in zip(found, expected, strict=True):
        assert actual.dtype == value.dtype and actual.stride() == value.stride()
        assert relative(actual.double(), value.double()) < tolerance


def images(shape, dtype, device, seed):
    return normal(shape, dtype, device, seed=seed).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bits", (1, 2, 4))
@pytest.mark.parametrize("shape", ((8, 64, 4, 8), (3, 256, 5, 7), (2, 24, 16, 16)), ids=str)
def test_channels_last(device, monkeypatch, calls, shape, bits, dtype):
    layer = fewbit.nn.BatchNorm2d(shape[1], bits=bits).to(device)
    x, grad = (images(shape, dtype, device, seed) for seed in (1, 2))
    with torch.no_grad():
        layer.weight.copy_(normal(shape[1:2], device=device, seed=3))
    compare(monkeypatch, layer, x.requires_grad_(), grad, TOLERANCE[dtype])
    assert len(calls) == 1 and calls[0] is not None


@pytest.mark.parametrize("needs", ("input", "weight", "bias and weight", "input and weight"))
def test_what_needs_a_gradient(device, monkeypatch, calls, needs):
    layer = fewbit.nn.BatchNorm2d(64, bits=2).to(device)
    layer.weight.requires_grad_("weight" in needs)
    layer.bias.requires_grad_("bias" in needs)
    x, grad = (images((4, 64, 8, 8), torch.float32, device, seed) for seed in (1, 2))
    compare(monkeypatch, layer, x.requires_grad_("input" in needs), grad, 1e-5)
    assert len(calls) == 1 and (calls[0][0] is None) == ("input" not in needs)


@pytest.mark.parametrize("kind", ("no weight", "rows", "contiguous gradient", "expanded gradient"))
def test_other_norms_and_gradients(device, monkeypatch, calls, kind):
    """The layer after the norm may return a contiguous gradient, or an expanded one."""
    if kind == "rows":
        layer = fewbit.nn.BatchNorm1d(512, bits=3).to(device)
        x, grad = (normal((64, 512), device=device, seed=seed) for seed in (1, 2))
    else:
        layer = fewbit.nn.BatchNorm2d(64, affine=kind != "no weight", bits=2).to(device)
        x, grad = (images((4, 64, 8, 8), torch.float32, device, seed) for seed in (1, 2))
    grad = grad.contiguous() if kind == "contiguous gradient" else grad
    grad = grad[:1].expand(x.shape) if kind == "expanded gradient" else grad
    compare(monkeypatch, layer, x.requires_grad_(), grad, 1e-5)
    assert len(calls) == 1 and calls[0] is not None


@pytest.mark.parametrize("why", ("contiguous", "two copies", "uniform", "float64", "5 bits"))
def test_torchs_function_computes_all_other_gradients(device, monkeypatch, calls, why):
    options = {"copies": 2} if why == "two copies" else {}
    quantizer = "uniform" if why == "uniform" else None
    bits = 5 if why == "5 bits" else 2
    layer = fewbit.nn.BatchNorm2d(64, bits=bits, quantizer=quantizer, **options).to(device)
    dtype = torch.float64 if why == "float64" else torch.float32
    x, grad = (images((4, 64, 8, 8), dtype, device, seed) for seed in (1, 2))
    if why == "contiguous":
        x = x.contiguous()
    compare(monkeypatch, layer.to(dtype), x.requires_grad_(), grad, 1e-5)
    assert not calls


class Part(nn.Module):
    def forward(self, x):
        return x[:48]


def test_a_policy_learns_that_the_copy_is_used(device, calls):
    """If the norm's samples are not those of the batch, all have the same bits, and the policy still learns that the copy is used."""
    model = nn.Sequential(nn.Linear(8, 32), Part(), nn.BatchNorm1d(32)).to(device)
    controller = fewbit.compress_(model, fewbit.AdaptiveBits(2, interval=1), verbose=False)
    x = normal((64, 8), device=device, seed=1)
    for _ in range(4):
        model(x).square().mean().backward()
    assert any(found is not None for found in calls)
    assert controller.context.policy.knowledge.slots["2", 0].sensitivity > 0


def test_launches(monkeypatch):
    """The backward launches three kernels and does not dequantize the copy."""
    with FakeCuda(monkeypatch) as cuda:
        model = nn.Sequential(nn.BatchNorm2d(8)).to(DEVICE)
        fewbit.compress_(model, bits=2, verbose=False)
        x = normal((4, 8, 16, 16)).contiguous(memory_format=torch.channels_last)
        y = model(x.to(DEVICE).requires_grad_())
        cuda.launches.clear()
        y.sum().backward()
    ours = [name for name in cuda.launches if name.startswith("fewbit")]
    assert ours == ["fewbit.batch_norm_backward"] * 3
    assert not any("batch_norm" in name for name in cuda.launches if name not in ours)
