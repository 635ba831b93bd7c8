"""The README has at most one screen of words; its table and that of pretrained networks have the numbers of benchmarks/results/."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
NETWORKS = NETWORK, *_ = "SmolLM2-135M", "all-MiniLM-L6-v2", "EfficientNet-lite0"
SETTINGS = {  # {the first cell: the arm of the fine-tuning, and the setting of the gradient's error}
    "exact": ("exact", None),
    "`bits=4`": ("4 bits", "4 bits"),
    "`bits=2`": ("2 bits", "2 bits"),
    "torch's checkpointing": ("checkpointing", None),
    "`fewbit.checkpoint_`, 8 bits": ("checkpoint_, 8 bits", "checkpoint_ 8 bits"),
}


def rows_of(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))["rows"]


def test_the_table():
    header = "| | saved | peak | time of a step | noise | loss |\n|---|---|---|---|---|---|\n"
    lines = README.split(header)[1].split("\n\n")[0].splitlines()
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [cells[0] for cells in shown] == list(SETTINGS)
    measured = {row["setting"]: row for row in rows_of("pretrained") if row["network"] == NETWORK}
    tuned = {row["arm"]: row for row in rows_of("finetuning_summary") if row["task"] == "lora"}
    for name, saved, peak, time, noise, loss in shown:
        arm, setting = SETTINGS[name]
        row = tuned[arm]
        assert saved == f"{row['mib']:.1f} MiB" and peak == f"{row['peak_mib']:.1f} MiB"
        assert time == ("1" if arm == "exact" else f"{row['time']:.2f}")
        assert noise == (f"{measured[setting]['added_variance']:.2g}" if setting else "")
        if "standard_error" in row:
            error = row["standard_error"]
            digits = 4 if error >= 5e-5 else 5
            assert loss == f"{row['difference']:+.4f} ± {error:.{digits}f}"
        else:
            assert loss == ""


def test_the_batches_on_a_gpu():
    rows = [row for row in rows_of("gpu_training") if row.get("measure") == "training"]
    gpt2 = {row["arm"]: row for row in rows if row["case"] == "gpt2"}
    exact, few, again = (gpt2[name] for name in ("exact", "L2 2 bits", "checkpointing"))
    text = " ".join(README.split())
    assert f"{few['largest_batch']} sequences with 2 bits" in text
    assert f"{again['largest_batch']} with checkpointing and {exact['largest_batch']} in" in text
    factor = exact["largest_samples_per_s"] / few["largest_samples_per_s"]
    assert f"a sequence takes {factor:.2f} times as long" in text


def test_the_table_of_pretrained_networks():
    text = (ROOT / "docs" / "results" / "index.md").read_text("utf-8")
    header = "| | SmolLM2-135M | MiniLM-L6 | EfficientNet-lite0 |\n|---|---|---|---|\n"
    lines = text.split(header)[1].split("\n\n")[0].splitlines()
    assert len(lines) >= 5
    measured = {(row["network"], row["setting"]): row for row in rows_of("pretrained")}
    for line in lines:
        setting, *cells = (cell.strip().replace("`", "") for cell in line.strip("|").split("|"))
        for network, cell in zip(NETWORKS, cells, strict=True):
            row = measured.get((network, setting))
            error = f", {100 * row['error']:.1f} %" if row and "error" in row else ""
            assert cell == (f"{row['mib']:.1f} MiB{error}" if row else "")


def test_the_length():
    assert len(README.split()) <= 600
