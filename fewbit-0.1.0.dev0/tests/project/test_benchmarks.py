"""The benchmarks can be imported, and the quantizer of their own replaces the one of the layers."""

from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

import fewbit

# Benchmarks import packages that the fast tier does not install.
pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ONLY_BENCHMARKS_NEED = {"kmeans1d"}


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_benchmark_can_be_imported(name):
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ONLY_BENCHMARKS_NEED:
            raise
        pytest.skip(f"{error.name} is not installed")


def test_the_arm_with_one_range_for_each_tensor_saves_one_range():
    arms = import_module("adaptive_arms")
    model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Linear(8, 8))
    arms.compress(model, "per tensor", 4)
    saved = fewbit.saved_bytes(model, torch.randn(32, 64))
    codes, one_range = (
        32 * 64 + 32 * 8,
        2 * 8,
    )  # a byte for each element; (minimum, step) in float32 for each input
    assert saved.total == codes + one_range


def test_the_page_has_the_estimates_for_fused_passes(capsys):
    import_module("fused_passes").main()
    page = (BENCHMARKS.parent / "docs" / "gpu.md").read_text()
    assert capsys.readouterr().out in page
