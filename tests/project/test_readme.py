"""The README's table of pretrained networks has the numbers of benchmarks/results/pretrained.json."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "pretrained.json").read_text("utf-8"))
ROWS = {(row["network"], row["setting"]): row for row in RESULTS["rows"]}
NETWORKS = "SmolLM2-135M", "all-MiniLM-L6-v2", "EfficientNet-lite0"


def test_the_table_of_pretrained_networks():
    text = (ROOT / "README.md").read_text("utf-8")
    header = "| | SmolLM2-135M | MiniLM-L6 | EfficientNet-lite0 |\n|---|---|---|---|\n"
    lines = text.split(header)[1].split("\n\n")[0].splitlines()
    assert len(lines) >= 5
    for line in lines:
        setting, *cells = (cell.strip().replace("`", "") for cell in line.strip("|").split("|"))
        for network, cell in zip(NETWORKS, cells, strict=True):
            row = ROWS.get((network, setting))
            if row is None:
                assert cell == ""
                continue
            error = f", {100 * row['error']:.1f} %" if "error" in row else ""
            assert cell == f"{row['mib']:.1f} MiB{error}"
