"""The page docs/results/alternatives.md agrees with the measurements, which count what they say."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import fewbit

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results" / "alternatives.json"


def test_the_page_shows_the_stored_results():
    from rivals import page as alternatives_page

    rows = json.loads(RESULTS.read_text())["rows"]
    page = alternatives_page.PAGE.read_text(encoding="utf-8")
    assert set(alternatives_page.MARKER.findall(page)) == set(alternatives_page.tables(rows))
    assert alternatives_page.with_tables(page, rows) == page, (
        "run python benchmarks/alternatives.py --page"
    )


def test_cells_of_a_table():
    from rivals import page as alternatives_page

    exact = {"network": "net", "arm": "exact", "saved_bytes": 4 * 2**20, "peak_bytes": 2**23}
    exact |= {"bfloat16_saved_bytes": 2**21, "ratio": 1.01, "error": 0.0}
    few = {"network": "net", "arm": "few", "saved_bytes": 2**20, "peak_bytes": 2**22}
    few |= {"bfloat16_saved_bytes": 2**20, "ratio": 1.25, "low": 1.2, "high": 1.5}
    few |= {"error": 0.123}
    more = few | {
        "arm": "more",
        "saved_bytes": 8 * 2**20,
        "bfloat16_saved_bytes": 2**21,
        "error": 4e-4,
    }
    diverged = few | {"arm": "diverged", "error": None}
    broken = {"network": "net", "arm": "broken", "failure": "RuntimeError: a | b"}
    (table,) = alternatives_page.tables([exact, few, more, diverged, broken]).values()
    assert table.splitlines()[2:] == [
        "| exact | 4.0 | 2.0 | 8.0 | 1 | 0 |",
        "| few | 1.0 (4.0x) | 1.0 | 4.0 | 1.25 | 12.3% |",
        "| more | 8.0 (2.0x more) | 2.0 | 4.0 | 1.25 | 0 |",
        "| diverged | 1.0 (4.0x) | 1.0 | 4.0 | 1.25 | not finite |",
        "| broken | RuntimeError: a / b |  |  |  |  |",
    ]


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))

    def forward(self, x):
        """Return a loss whose graph saves the result of the body."""
        return self.body(x).square().sum()


@pytest.mark.slow
def test_the_bytes_of_a_step():
    """Those of a compressed model are the meter's."""
    from rivals.step_bytes import step_bytes

    torch.manual_seed(0)
    model, x = Squares(), torch.randn(512, 256)
    model(x).backward()
    saved, peak = step_bytes(model, model, (x,))
    hidden, result = 4 * 512 * 512, 4 * 512 * 256
    assert 0 <= saved - (2 * hidden + result) <= 64  # the loss itself
    gradients = 4 * sum(p.numel() for p in model.parameters())
    assert peak >= max(saved, gradients)
    fewbit.compress_(model, bits=2, verbose=False)
    model(x).backward()
    saved, _ = step_bytes(model, model, (x,))
    assert saved == pytest.approx(fewbit.saved_bytes(model, x).total, rel=0.01)


@pytest.mark.slow
def test_the_hooks_save_rows_of_8_bits():
    from rivals.hooks import int8_hooks
    from rivals.step_bytes import step_bytes

    torch.manual_seed(0)
    first, second = nn.Linear(256, 32, bias=False), nn.Linear(256, 32, bias=False)
    model = nn.ModuleList([first, second])
    x = torch.randn(512, 256).mul_(torch.logspace(-3, 3, 512)[:, None])
    weights = torch.randn(2, 512, 32)  # too small to be quantized

    def run(x):
        with torch.autograd.graph.saved_tensors_hooks(*int8_hooks(model)):
            return sum((layer(x) * g).sum() for layer, g in zip(model, weights, strict=True))

    run(x).backward()
    # In float64, and one element at a time: the nearest multiple of a 127th of the largest element of the row.
    step = x.double().abs().max(1).values[:, None] / 127
    restored = torch.floor(x.double() / step + 0.5) * step
    for layer, g in zip(model, weights, strict=True):
        torch.testing.assert_close(
            layer.weight.grad.double(), g.double().T @ restored, rtol=1e-4, atol=1e-2
        )
    saved, _ = step_bytes(model, run, (x,))
    one_copy = 512 * 256 + 4 * 512
    assert one_copy <= saved < one_copy + 2048, "both layers share one copy"


@pytest.mark.slow
def test_two_arms_run(tmp_path):
    arms = ["exact", "fewbit, 2 bits"]
    command = [sys.executable, str(BENCHMARKS / "alternatives.py"), "--quick"]
    command += ["--networks", "GPT-2", "--arms", *arms]
    environment = os.environ | {"OUT": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "alternatives_quick.json").read_text())
    assert document["machine"]["torch"] == importlib.metadata.version("torch")
    rows = {row["arm"]: row for row in document["rows"]}
    assert set(rows) == set(arms)
    exact, few = rows["exact"], rows["fewbit, 2 bits"]
    assert exact["error"] == 0 and 0.02 < few["error"] < 0.6
    assert exact["saved_bytes"] > 5 * few["saved_bytes"] > 0
    for field in ("loss", "held_out"):
        assert few[field] != exact[field] and few[field] == pytest.approx(exact[field], rel=0.1)
    assert "| fewbit, 2 bits |" in done.stdout
