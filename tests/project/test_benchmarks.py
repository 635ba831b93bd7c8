"""The benchmarks can be imported, and a page has what one of them prints."""

from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("torch")


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


def test_the_page_has_the_estimates_for_fused_passes(capsys):
    import_module("fused_passes").main()
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    gains = {name: int(gain.rstrip("%")) for name, dtype, *_, gain in rows if dtype == "bfloat16"}
    page = " ".join((BENCHMARKS.parent / "docs" / "gpu.md").read_text().split())
    norms = [gain for name, gain in gains.items() if name.startswith("layer norm")]
    product = "dequantized input, and its product with {} outputs"
    assert f"gains {gains['GELU, and copy of its result']} %" in page
    assert f"norms ({min(norms)} to {max(norms)} %)" in page
    assert f"gain {gains[product.format(768)]} % at 768 outputs" in page
    assert f"lose {-gains[product.format(3072)]} % at 3,072" in page
