"""Two processes over gloo on the CPU train one model. The cases are in the files cases_*.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cases_checkpoint import CASES as CHECKPOINT
from cases_context import CASES as CONTEXT
from cases_data import CASES as DATA
from cases_fit import CASES as FIT
from cases_pipeline import CASES as PIPELINE
from cases_policies import CASES as POLICIES
from cases_tensor import CASES as TENSOR

WORKER = Path(__file__).parent / "worker.py"
FILES = {
    "cases_data": DATA,
    "cases_tensor": TENSOR,
    "cases_pipeline": PIPELINE,
    "cases_context": CONTEXT,
    "cases_checkpoint": CHECKPOINT,
    "cases_policies": POLICIES,
    "cases_fit": FIT,
}


@pytest.mark.processes
@pytest.mark.parametrize("file", FILES)
def test_two_processes(file, tmp_path):
    """Two processes run all cases of a file, because starting them takes longer than a case."""
    failed = {name: errors for name, errors in _run(file, tmp_path).items() if errors}
    assert not failed, "\n".join(f"{name}: {error}" for name in failed for error in failed[name])


def _run(file, folder):
    paths = [folder / f"results{rank}" for rank in range(2)]
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), file, str(rank), str(folder / "rendezvous"), str(path)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, path in enumerate(paths)
    ]
    try:
        output = [worker.communicate(timeout=300)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    messages = {}
    for path in paths:
        for name, error in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
            messages.setdefault(name, []).append(error)
    missing = [f"the processes ended before this case:\n{text[-2000:]}" for text in output]
    return {
        case.__name__: [error for error in messages.get(case.__name__, missing) if error]
        for case in FILES[file]
    }
