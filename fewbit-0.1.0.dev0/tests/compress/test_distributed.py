"""Two processes over gloo: data parallel, fully sharded, and batch norm over both."""

import subprocess
import sys
from pathlib import Path

import pytest
from distributed_worker import CASES

WORKER = Path(__file__).parent / "distributed_worker.py"


@pytest.mark.processes
@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
def test_two_processes(name, tmp_path):
    """Each process asserts the exact model's gradients over both inputs, within 2 %, and what is kept.

    Or, adapting, that both keep the same bits.
    """
    command = [sys.executable, str(WORKER), name]
    rendezvous = str(tmp_path / "rendezvous")
    workers = [
        subprocess.Popen([*command, str(rank), rendezvous], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [worker.communicate(timeout=120)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
