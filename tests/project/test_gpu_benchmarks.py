"""The benchmarks of `make gpu` on the CPU: they write rows as they go, and a failure leaves the other rows."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

TRAINING = """
import sys
sys.path.insert(0, {benchmarks!r})
import gpu_training, harness

# Outside of the condition, because processes of arms execute this too.
gpu_training.TOLERANCE = -1.0  # the check fails
def broken(model):
    raise RuntimeError("this arm is broken")
gpu_training.ARMS["broken"] = broken

if __name__ == "__main__":
    save = harness.save
    def counting(name, about, rows):
        save(name, about, rows)
        print("saved", len(rows))
    harness.save = counting
    gpu_training.main()
"""

KERNELS = """
import sys
sys.path.insert(0, {benchmarks!r})
import activations, harness
save, measure = harness.save, activations.measure_kernels
def counting(name, about, rows):
    save(name, about, rows)
    print("saved", len(rows))
harness.save = counting
def measure_kernels(name, dtype, *rest):
    if (name, dtype) == ("gelu", "bfloat16"):
        raise RuntimeError("this kernel is broken")
    return measure(name, dtype, *rest)
measure_kernels.__name__ = "kernels"
activations.measure_kernels = measure_kernels
activations.main()
"""


def writing_to(folder):
    """Return the environment of a benchmark that writes its results to a folder."""
    return os.environ | {"OUT": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(tmp_path, source, *arguments):
    """Run the source as a script, which must end with exit status 1. Return its numbers of saved rows, and the rows."""
    script = tmp_path / "script.py"
    script.write_text(source.format(benchmarks=str(BENCHMARKS)))
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=writing_to(tmp_path), capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    saved = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("saved")]
    (path,) = tmp_path.glob("*.json")
    return saved, json.loads(path.read_text())["rows"], done.stderr


@pytest.mark.slow
def test_training(tmp_path):
    arms = ["exact", "broken", "L2 2 bits"]
    options = ["--device", "cpu", "--quick", "--no-search", "--cases", "gpt2", "--steps", "2"]
    saved, rows, errors = run(tmp_path, TRAINING, *options, "--seconds", "250", "--arms", *arms)
    assert saved == [1, 2, 3, 4]
    check, exact, broken, compressed = rows
    assert check["measure"] == "gradient at 8 bits" and 0 < check["float32"] < 0.05
    assert [row["arm"] for row in rows[1:]] == arms
    assert broken["error"] == "RuntimeError: this arm is broken"
    for row in (exact, compressed):
        assert row["step_ms"] > 0 and row["samples_per_s"] > 0 and row["allocated_bytes"] > 0
    assert "gpt2: expected gradients at 8 bits within -1.0 of exact" in errors


@pytest.mark.slow
def test_kernels(tmp_path):
    saved, rows, errors = run(tmp_path, KERNELS, "cpu", "--quick")
    assert len(saved) == 1 + 2 * 2 * 3 and saved == sorted(set(saved)) and saved[-1] == len(rows)
    failed = [row for row in rows if "error" in row]
    assert [(row["function"], row["dtype"]) for row in failed] == [("gelu", "bfloat16")]
    assert failed[0]["error"] == "RuntimeError: this kernel is broken"
    rates = [row for row in rows if row["measure"] == "decode_mul"]
    assert len(rates) == 3 and all(row["gigabytes_per_second"] > 0 for row in rates)
    assert errors.endswith("1 parts failed\n")


@pytest.mark.slow
def test_proof(tmp_path):
    """Every part but the fine-tuning, whose function test_pretrained.py runs, and the search for the largest batch."""
    command = [sys.executable, str(BENCHMARKS / "gpu_proof.py"), "--device", "cpu"]
    environment = writing_to(tmp_path)
    command += ["--without-losses", "--seconds", "240"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert {row["part"] for row in rows} == {"Llama blocks", "largest batch", "batches"}
    assert not [row["error"] for row in rows if "error" in row]
    for row in rows:
        assert row["step_ms"] > 0 and row["allocated_bytes"] > 0
        assert row["part"] != "largest batch" or row["largest_batch"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cuda_kernels", "gpu_compiled"])
def test_other_benchmarks(tmp_path, name):
    script = ["cuda_kernels.py"] if name == "cuda_kernels" else ["study.py", name]
    command = [sys.executable, str(BENCHMARKS / script[0]), *script[1:], "--device", "cpu"]
    done = subprocess.run(command, env=writing_to(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    if name == "cuda_kernels":
        assert "failed" not in done.stdout and "masked quantize" in done.stdout
    else:
        *_, few = map(ast.literal_eval, done.stdout.splitlines())
        assert few["arm"] == "fewbit.compile 2 bits" and 0.01 < few["error"] < 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_without_a_gpu_nothing_is_built(tmp_path):
    """An empty architecture would build the kernels for all GPUs."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = ["make", "--silent", "gpu-build", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout == "gpu-build: torch found no CUDA device\n"
