"""Runs a script in two processes."""

import os
import subprocess
import sys
from pathlib import Path


def run_twice(script, *arguments, folder) -> list[str]:
    """Run a script with the arguments (*arguments, rank, folder) in two processes. Return their outputs; both must succeed."""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments, str(rank), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        for rank in range(2)
    ]
    try:
        results = [one.communicate(timeout=600) for one in workers]
    finally:
        for one in workers:
            one.kill()
    assert [one.returncode for one in workers] == [0, 0], "\n".join(error for _, error in results)
    return [text for text, _ in results]
