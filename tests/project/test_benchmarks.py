"""The benchmarks can be imported."""

from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("torch")


# Benchmarks import packages that the fast tier does not install.
pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ONLY_BENCHMARKS_NEED = {"kmeans1d"}


NAMES = [
    ".".join(path.relative_to(BENCHMARKS).with_suffix("").parts)
    for path in sorted(BENCHMARKS.rglob("*.py"))
]


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_can_be_imported(name):
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ONLY_BENCHMARKS_NEED:
            raise
        pytest.skip(f"{error.name} is not installed")
