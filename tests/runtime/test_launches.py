"""The number of kernels that a training step launches on a GPU. The budgets are the numbers in a table of docs/gpu.md."""

import importlib
from pathlib import Path

import pytest
import torch
from fake_cuda import DEVICE, FakeCuda
from launches import LAYERS, fuse, steps_of
from layers import relative
from samples import normal
from torch import nn

import fewbit

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def budgets() -> dict[str, list[int]]:
    """Return {layer: kernels of torch, and of fewbit} from the page's table."""
    section = PAGE.read_text().partition("## Launches\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return {name: [int(count) for count in counts] for name, *counts in rows[2:]}


def test_the_table_has_each_layer():
    assert list(budgets()) == list(LAYERS)


@pytest.mark.parametrize("name", LAYERS)
def test_no_step_launches_more_kernels(name):
    exact = {step.total for step in steps_of(name, is_exact=True)}
    ours = {step.total for step in steps_of(name, is_exact=False)[1:]}
    assert [*exact, *ours] == budgets()[name]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11
@pytest.mark.parametrize("make", [lambda: nn.BatchNorm2d(8), lambda: nn.MaxPool2d(3, 2, 1)])
def test_no_zeros_for_results_without_a_gradient(make):
    """autograd fills zeros in C++, where the fake device does not see it."""
    model = nn.Sequential(make())
    fewbit.compress_(model, bits=2, verbose=False)
    y = model(normal((4, 8, 16, 16)).requires_grad_())
    with torch.profiler.profile(profile_memory=True) as profile:
        y.backward(torch.ones_like(y))
    sizes = {event.name: event.cpu_memory_usage for event in profile.events()}
    assert any(name.startswith("aten::") and name.endswith("_backward") for name in sizes)
    assert sizes.get("aten::zeros", 0) <= 8


@pytest.mark.parametrize("has_weight", [True, False])
def test_torchs_kernel_for_the_backward_of_rms_norm(monkeypatch, has_weight):
    """The gradients that one kernel computes are those of fewbit's own formula."""
    module = importlib.import_module("fewbit.functional.layer_norm")
    x, weight = normal((4, 32, 64), seed=1), normal((64,), seed=2)
    found = []
    with FakeCuda(monkeypatch) as cuda:
        fuse(monkeypatch, cuda, is_exact=False)
        for is_fused in (True, False):
            monkeypatch.setattr(module, "_HAS_RMS_NORM_BACKWARD", is_fused)
            layer = nn.RMSNorm(64, elementwise_affine=has_weight).to(DEVICE)
            if has_weight:
                layer.weight.data.copy_(weight.to(DEVICE))
            model = nn.Sequential(layer)
            fewbit.compress_(model, bits=2, verbose=False)
            leaf = x.to(DEVICE).requires_grad_()
            cuda.launches.clear()
            torch.manual_seed(3)  # copies are rounded alike
            model(leaf).sin().sum().backward()
            assert ("_fused_rms_norm_backward" in cuda.launches) == is_fused
            found.append([leaf.grad.cpu(), *(p.grad.cpu() for p in model.parameters())])
    assert all(relative(a, b) < 1e-5 for a, b in zip(*found, strict=True))
