"""The table of architectures: the script runs, its results are complete, and the page has the results."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = json.loads((BENCHMARKS / "results" / "models.json").read_text())
ROWS = {row["model"]: row for row in RESULTS["rows"]}
MODELS = "Llama", "nn.GRU", "nn.Transformer"


@pytest.fixture
def table():
    return import_module("model_table")


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_results_are_those_of_the_zoo(table):
    assert list(ROWS) == [entry.name for entry in table.model_zoo.ZOO]
    assert len(ROWS) >= 60
    assert not [row for row in ROWS.values() if "error" in row]


def test_the_page_has_the_results(table):
    page = table.PAGE.read_text()
    assert page == table.with_tables(page, table.tables(RESULTS["machine"], RESULTS["rows"]))
    # Not only by the function that has written it.
    for name, row in ROWS.items():
        (line,) = [
            line
            for line in page.split("### Less than")[0].splitlines()
            if line.startswith(f"| {name} |")
        ]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert float(cells[2]) == pytest.approx(row["exact_bytes"] / row["bytes_2"], abs=0.051)


def test_models_that_save_little_have_a_reason():
    """A reason for at least half of what is saved, if the bytes fall to more than a sixth."""
    little = [row for row in ROWS.values() if row["exact_bytes"] < 6 * row["bytes_2"]]
    assert all(row["library"] == "torch" for row in little)
    for row in little:
        shares = [int(part.split("%")[0]) for part in row["remains"].split("; ")]
        assert sum(shares) > 50, row["model"]


def test_gradients_with_8_bits_are_right():
    """A gradient that is wrong has another direction. MobileViT's is a sum that almost cancels (the page says why)."""
    assert min(row["cosine_8"] for name, row in ROWS.items() if name != "MobileViT") > 0.999


def test_a_model_that_fails_has_a_row(table, monkeypatch, one_thread):
    def broken():
        raise RuntimeError("this model | is broken\nin two lines")

    entries = (table.model_zoo.Entry("broken", "torch", broken),)
    monkeypatch.setattr(table.model_zoo, "ZOO", entries)
    row = table.row_of(0)
    assert row == {
        "model": "broken",
        "library": "torch",
        "error": "RuntimeError: this model | is broken",
    }
    assert table.line_of(row).startswith("| broken | failed: RuntimeError: this model")


@pytest.mark.slow
def test_the_script_measures_what_the_results_say():
    """The bytes depend on versions of libraries."""
    pytest.importorskip("transformers")
    before = (BENCHMARKS / "results" / "models.json").read_bytes()
    command = [sys.executable, str(BENCHMARKS / "model_table.py"), *MODELS]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (BENCHMARKS / "results" / "models.json").read_bytes() == before
    lines = found.splitlines()
    assert len(lines) == len(MODELS)
    for name, line in zip(MODELS, lines, strict=True):
        assert line.startswith(name)
        numbers, cosines, _ = line[len(name) :].split("|", 2)
        times = dict(part.split() for part in numbers.split(","))
        for setting in ("4", "2", "2_everything"):
            assert float(times[setting]) == pytest.approx(
                ROWS[name][f"times_less_{setting}"], rel=0.1
            )
        assert float(cosines.split(",")[0]) > 0.9999
